"""Trains the embedded demo model: a small byte-level Qwen3.5-style hybrid on the King James text.

    apt-get install bible-kjv && python examples/kjv.py --out=.data/kjv.txt
    python examples/train_demo_model.py --text=.data/kjv.txt --out=.runs/demo

Writes the best weights so far in published layout (config.json, model.safetensors in bfloat16), ``progress.json`` and
``loss.png`` to --out. A run that is stopped goes on from its last saved step when it is started again with the same flags.
A GPU takes minutes; a CPU takes a night, so start small there (--steps, --batch).
"""

import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import kjv
import numpy as np
import optax
from absl import app, flags
from flax import nnx
from safetensors.numpy import load_file, save_file

from replayssm_jax.models import Qwen3_5, Qwen3_5Config
from replayssm_jax.models.qwen3_5 import published_sources
from replayssm_jax.models.weights import published_tensors

FLAGS = flags.FLAGS
flags.DEFINE_string("text", ".data/kjv.txt", "Training text, as examples/kjv.py writes it.")
flags.DEFINE_string("out", ".runs/demo", "Folder for weights, progress and plot.")
flags.DEFINE_integer("steps", 1100, "Optimiser steps.", lower_bound=1)
flags.DEFINE_integer("batch", 64, "Sequences of a step.", lower_bound=1)
flags.DEFINE_integer("length", 512, "Bytes of a sequence.", lower_bound=2)
flags.DEFINE_float(
    "learning_rate", 4e-3, "Peak learning rate; warm-up over a twentieth of the steps, then a cosine to a tenth."
)
flags.DEFINE_float("weight_decay", 0.1, "Decoupled weight decay of matrices.")
flags.DEFINE_integer("evaluate_every", 100, "Steps between held-out evaluations; progress is saved then.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Of the initial weights and the order of the text.")

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 368,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def batch_of(text: np.ndarray, step: int) -> np.ndarray:
    """The windows of a step, [batch, length + 1]; a function of seed and step, so that a resumed run repeats nothing."""
    starts = np.random.default_rng((FLAGS.seed, step)).integers(0, len(text) - FLAGS.length, FLAGS.batch)
    return text[starts[:, None] + np.arange(FLAGS.length + 1)].astype(np.int32)


def make_step(graph: Any, optimiser: optax.GradientTransformation):
    """A jitted (weights, optimiser state, [B, T + 1] bytes) -> (weights, optimiser state, bits per byte)."""

    def loss(weights: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, weights)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() / jnp.log(2)

    def step(weights: Any, moments: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, tokens)
        updates, moments = optimiser.update(gradient, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(loss)


def make_optimiser() -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        0.0, FLAGS.learning_rate, max(1, FLAGS.steps // 20), FLAGS.steps, FLAGS.learning_rate / 10
    )

    def matrices(weights: Any) -> Any:
        return jax.tree.map(lambda w: w.ndim == 2 and min(w.shape) > 4, weights)

    decayed = optax.adamw(rate, b2=0.98, weight_decay=FLAGS.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), decayed)


def held_out_bits(loss: Any, weights: Any, text: np.ndarray) -> float:
    """Bits per byte over the whole held-out text, in windows of --length that each start without context."""
    count = (len(text) - 1) // FLAGS.length
    windows = np.lib.stride_tricks.sliding_window_view(text, FLAGS.length + 1)[:: FLAGS.length][:count].astype(np.int32)
    sums = [float(loss(weights, jnp.asarray(part))) * len(part) for part in np.split(windows, range(64, count, 64))]
    return sum(sums) / count


def save_weights(folder: pathlib.Path, model: Qwen3_5) -> None:
    """config.json and model.safetensors in published layout: bfloat16, but A_log and dt_bias in float32."""

    def store(name: str, value: np.ndarray) -> np.ndarray:
        # rounding to bfloat16 halves the file; the held-out figure is measured on the rounded weights
        return value if name.endswith(("A_log", "dt_bias")) else value.astype(jnp.bfloat16)

    tensors = {name: store(name, value) for name, value in published_tensors(model, published_sources(model.config))}
    _replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    _replace(folder / "config.json", lambda path: path.write_text(json.dumps(CONFIG, indent=2) + "\n"))


def save_progress(folder: pathlib.Path, step: int, carry: Any, curve: list[dict[str, float]]) -> None:
    leaves = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(carry))}
    _replace(folder / "progress.safetensors", lambda path: save_file(leaves, path, metadata={"step": str(step)}))
    record = {
        "flags": run_flags(),
        "config": CONFIG,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "curve": curve,
    }
    _replace(folder / "progress.json", lambda path: path.write_text(json.dumps(record, indent=1) + "\n"))


def load_progress(folder: pathlib.Path, carry: Any) -> tuple[Any, list[dict[str, float]]]:
    """The saved carry and curve, or ``carry`` and an empty curve if nothing was saved.

    Raises:
        SystemExit: what was saved belongs to other flags.
    """
    if not (folder / "progress.json").exists():
        return carry, []
    record = json.loads((folder / "progress.json").read_text())
    if record["flags"] != run_flags() or record["config"] != CONFIG:
        raise SystemExit(f"--out={folder} holds a run with other flags ({record['flags']}); name another folder or remove it")
    leaves = load_file(folder / "progress.safetensors")
    saved = [jnp.asarray(leaves[f"{i:05d}"]) for i in range(len(leaves))]
    return jax.tree.unflatten(jax.tree.structure(carry), saved), record["curve"]


def run_flags() -> dict[str, Any]:
    names = ("steps", "batch", "length", "learning_rate", "weight_decay", "evaluate_every", "seed")
    return {name: FLAGS[name].value for name in names}


def _replace(path: pathlib.Path, write: Any) -> None:
    """Writes beside ``path`` and renames, so that a stopped run never leaves half a file."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.replace(path)


def plot(curve: list[dict[str, float]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [point["step"] for point in curve]
    axes.plot(steps, [point["train"] for point in curve], label="training text", color="#7a9cc6")
    axes.plot(steps, [point["held_out"] for point in curve], label="held-out text", color="#c0392b")
    best = min(curve, key=lambda point: point["held_out"])
    axes.plot(best["step"], best["held_out"], "o", color="#c0392b")
    label = f"kept: {best['held_out']:.3f} at step {best['step']:.0f}"
    axes.annotate(label, (best["step"], best["held_out"]), textcoords="offset points", xytext=(4, 10), ha="right")
    axes.set(xlabel="step", ylabel="bits per byte", title="Demo model: bits per byte while training", ylim=(0.8, 3.0))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show_progress(step: int, train: float, held_out: float | None, started: float, first: int) -> None:
    done = step / FLAGS.steps
    left = (time.monotonic() - started) / max(1, step - first) * (FLAGS.steps - step)
    bar = "#" * int(30 * done) + "." * (30 - int(30 * done))
    held = "" if held_out is None else f", held out {held_out:.3f}"
    end = "\n" if held_out is not None or not sys.stderr.isatty() else ""
    print(f"\r[{bar}] {step}/{FLAGS.steps}  {train:.3f}{held} bits per byte, {left:.0f} s left ", end=end, file=sys.stderr)


def main(_: list[str]) -> None:
    folder = pathlib.Path(FLAGS.out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        train_text, held_out_text = map(as_bytes, kjv.split(pathlib.Path(FLAGS.text).read_text()))
    except FileNotFoundError:
        raise SystemExit(f"--text={FLAGS.text} does not exist: python examples/kjv.py --out={FLAGS.text} writes it") from None
    model = Qwen3_5(Qwen3_5Config.from_dict(CONFIG), rngs=nnx.Rngs(FLAGS.seed))
    graph, weights = nnx.split(model, nnx.Param)
    optimiser = make_optimiser()
    step_fn, loss_fn = make_step(graph, optimiser)
    (weights, moments), curve = load_progress(folder, (weights, optimiser.init(weights)))
    first = int(curve[-1]["step"]) if curve else 0
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    print(f"{count:,} weights on {jax.devices()[0].device_kind}, from step {first}", file=sys.stderr)

    started, recent = time.monotonic(), []
    for step in range(first + 1, FLAGS.steps + 1):
        weights, moments, bits = step_fn(weights, moments, jnp.asarray(batch_of(train_text, step)))
        recent.append(bits)
        if step % FLAGS.evaluate_every and step < FLAGS.steps:
            if step % 20 == 0 and sys.stderr.isatty():
                show_progress(step, float(bits), None, started, first)
            continue
        rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype) if w.ndim > 1 else w, weights)
        point = {
            "step": step,
            "train": float(jnp.mean(jnp.stack(recent))),
            "held_out": held_out_bits(loss_fn, rounded, held_out_text),
        }
        recent = []
        if not curve or point["held_out"] < min(p["held_out"] for p in curve):
            save_weights(folder, nnx.merge(graph, weights))
        curve.append(point)
        save_progress(folder, step, (weights, moments), curve)
        plot(curve, folder / "loss.png")
        show_progress(step, point["train"], point["held_out"], started, first)
    best = min(curve, key=lambda point: point["held_out"])
    print(f"{folder}: best held-out {best['held_out']:.3f} bits per byte at step {best['step']:.0f}")


if __name__ == "__main__":
    app.run(main)
