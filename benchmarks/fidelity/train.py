"""Trains one family's model on bytes of text for a fixed time.

    python -m benchmarks.fidelity.train --family=gdn --minutes=1 [--text=.data/kjv.txt] [--out=.runs/fidelity] [--size=small]

Activations are bfloat16, weights, state and optimiser float32. Writes FAMILY.safetensors and FAMILY.json (command, device,
versions, date, memory of the states, curve) to --out at the end. The rate follows the clock, so any budget ends with a
cooled-down model.
"""

import argparse
import datetime
import functools
import json
import math
import pathlib
import shlex
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.fidelity.models import FAMILIES, SIZES, make_model, memory, read_text, save_weights

Array = jax.Array

STEPS_PER_CALL = 10


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    text, held_out = read_text(options.text, options.held_out)
    model = make_model(options.family, SIZES[options.size], "bfloat16", options.seed)
    graph, weights = nnx.split(model, nnx.Param)
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    print(f"{options.family}: {count:,} weights, {len(text):,} bytes, on {jax.devices()[0].device_kind}", flush=True)
    fresh = memory(model)
    weights, curve = train(graph, weights, text, held_out, options)
    options.out.mkdir(parents=True, exist_ok=True)
    save_weights(options.out / f"{options.family}.safetensors", options.family, SIZES[options.size], weights)
    given = sys.argv[1:] if arguments is None else arguments
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.fidelity.train", *given]),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "date": datetime.date.today().isoformat(),
        "weights": count,
        "memory_tokens": {"fresh": fresh, "trained": memory(nnx.merge(graph, weights))},
        "curve": curve,
    }
    (options.out / f"{options.family}.json").write_text(json.dumps(record, indent=1) + "\n")


def train(graph: Any, weights: Any, text: np.ndarray, held_out: np.ndarray, options: Any) -> tuple[Any, list[dict[str, float]]]:
    """Steps until the time is over, compilation not counted. The weights, and bits per byte on the way."""
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(0.1, mask=lambda tree: jax.tree.map(lambda w: w.ndim == 2 and min(w.shape) > 4, tree)),
    )
    moments = optimiser.init(weights)
    static = graph, optimiser, options.batch, options.length
    known, key, rates = jnp.asarray(text), jax.random.key(options.seed), jnp.zeros(STEPS_PER_CALL)
    run = train_steps.lower(*static, weights, moments, known, key, rates).compile()
    windows = held_out[: len(held_out) // (options.length + 1) * (options.length + 1)].reshape(-1, options.length + 1)[:64]
    curve: list[dict[str, float]] = []
    begin, step, done, shown = time.monotonic(), 0, 0.0, 0.0
    while done < 1.0:
        rate = jnp.full(STEPS_PER_CALL, options.learning_rate * rate_at(done))
        weights, moments, bits = run(weights, moments, known, jax.random.fold_in(key, step), rate)
        step += STEPS_PER_CALL
        bits = float(bits)  # waits for the device, so that the clock is right
        done = min(1.0, (time.monotonic() - begin) / max(1e-9, 60 * options.minutes))
        if done - shown >= 0.1 or step == STEPS_PER_CALL:
            shown = done
            print(f"  {done:4.0%}  step {step:5d}  {bits:.3f} bits per byte", flush=True)
        curve.append({"step": step, "seconds": round(time.monotonic() - begin, 1), "train": round(bits, 4)})
    curve[-1]["held_out"] = float(loss(graph, weights, jnp.asarray(windows, jnp.int32)))
    print(f"  held out: {curve[-1]['held_out']:.3f} bits per byte after {step} steps", flush=True)
    return weights, curve


def rate_at(done: float) -> float:
    """Share of the peak rate: a rise over the first twentieth, then a cosine down to a twentieth."""
    if done < 0.05:
        return max(done, 1e-3) / 0.05
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (done - 0.05) / 0.95)) / 2


@functools.partial(jax.jit, static_argnums=0)
def loss(graph: Any, weights: Any, tokens: Array) -> Array:
    """Bits per byte of windows [B, T + 1]."""
    logits = nnx.merge(graph, weights)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() / jnp.log(2)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(4, 5))
def train_steps(
    graph: Any, optimiser: Any, batch: int, length: int, weights: Any, moments: Any, text: Array, key: Array, rates: Array
) -> tuple[Any, Any, Array]:
    """As many steps as there are rates, on windows drawn from the text [bytes] uint8. The mean of their losses comes last."""

    def step(carry: Any, inputs: Any) -> tuple[Any, Array]:
        weights, moments = carry
        key, rate = inputs
        starts = jax.random.randint(key, (batch,), 0, text.shape[0] - length)
        tokens = text[starts[:, None] + jnp.arange(length + 1)].astype(jnp.int32)
        value, gradient = jax.value_and_grad(loss, argnums=1)(graph, weights, tokens)
        updates, moments = optimiser.update(gradient, moments, weights)
        return (optax.apply_updates(weights, jax.tree.map(lambda u: -rate * u, updates)), moments), value

    (weights, moments), values = jax.lax.scan(step, (weights, moments), (jax.random.split(key, rates.shape[0]), rates))
    return weights, moments, values.mean()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--minutes", type=float, default=1.0, help="of training, compilation not counted")
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path(".data/kjv.txt"), help="file to learn from")
    parser.add_argument("--held_out", type=float, default=0.15, help="share of the text, at its end, that is not trained on")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".runs/fidelity"), help="folder for weights and curve")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--length", type=int, default=1024, help="bytes of a sequence")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="peak")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
