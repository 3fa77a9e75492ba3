"""Plans a deployment from a model's config alone: memory per sequence, traffic per step, what replay should gain.

    python -m replayssm_jax.plan FOLDER_OR_CONFIG --batch=256 --context=32768 --window=16 [--drafts=4] [--readout=nvfp4]
        [--gpu=h200] [--gpus=1]

A prediction, not a measurement: it counts the bytes that a step must move and divides them by the GPU's read bandwidth. A
decode step at a serving batch is bound by bytes; at a few sequences it is bound by launches, and replay gains nothing.

Bytes of a recurrent layer and sequence, with S the state, C its read-out copy, r one record and m the records in the ring:

    plain recurrence             read S, write S
    replay, ordinary step        read S and m r, write r per token
    replay, flush                the same, and write S
    with a copy, ordinary step   read C and m r, write r per token
    with a copy, flush           read S and m r, write S, C, and r per token
    snapshots, T tokens          read S, write T S
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
from absl import app, flags
from flax import nnx

from replayssm_jax.mixers import MixerCache
from replayssm_jax.models import MODELS, CheckpointError, Decoder
from replayssm_jax.models.attention_cache import AttentionCache
from replayssm_jax.models.config import check_model_type
from replayssm_jax.models.moe import Experts
from replayssm_jax.models.weights import read_config
from replayssm_jax.policy import ReplayPolicy
from replayssm_jax.readout import FORMATS, PLANE
from replayssm_jax.state import num_bytes


@dataclasses.dataclass(frozen=True)
class GPU:
    """A device: bytes of memory, bytes per second it reads, and where the second figure comes from."""

    name: str
    memory: float
    bandwidth: float
    source: str


GPUS = {
    "h100": GPU("H100 SXM", 80e9, 3.35e12, "datasheet"),
    "h200": GPU("H200", 141e9, 4.31e12, "measured"),
    "b200": GPU("B200", 180e9, 8.0e12, "datasheet"),
    "b300": GPU("B300", 288e9, 8.0e12, "datasheet"),
}
WINDOWS = (4, 8, 16, 32, 64)
# of a device's memory, for activations, workspaces and fragmentation
RESERVED = 0.1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a config needs, in bytes. Per sequence unless it says otherwise.

    Attributes:
        weights: all of them, once.
        experts: of ``weights``, those of routed experts.
        experts_per_token, num_experts: of one mixture; 0 where there is none.
        recurrent_layers: how many.
        checkpoint: of all recurrent layers.
        readout: their read-out copies, 0 without.
        read: what an ordinary step reads: the checkpoint, its copy, or half of it.
        record: one token's records of all recurrent layers.
        conv: convolution histories.
        kv_per_token: attention caches.
        window, max_draft: of the policy.
    """

    weights: int
    experts: int
    experts_per_token: int
    num_experts: int
    recurrent_layers: int
    checkpoint: int
    readout: int
    read: int
    record: int
    conv: int
    kv_per_token: int
    window: int
    max_draft: int

    def sequence(self, context: int) -> int:
        """Memory of a sequence of ``context`` tokens."""
        return self.checkpoint + self.readout + self.window * self.record + self.conv + context * self.kv_per_token

    def weights_read(self, batch: int) -> float:
        """Weights that a step of ``batch`` tokens touches: routed experts only if a token chose them (evenly, by chance)."""
        if not self.experts:
            return self.weights
        touched = 1 - (1 - self.experts_per_token / self.num_experts) ** batch
        return self.weights - self.experts * (1 - touched)

    def plain_state(self, tokens: int) -> float:
        """State traffic of a step of ``tokens`` tokens without replay: a state written after each of them."""
        return self.checkpoint * (1 + tokens)

    def replay_state(self, tokens: int, accepted: float) -> float:
        """State traffic of a step of ``tokens`` tokens of which ``accepted`` are kept, mean over a window, flushes included."""
        between = self.window - 2 * self.max_draft + 1  # least accepted tokens from one flush to the next
        steps = max(1.0, between / accepted)
        live = (between - 1) / 2
        flush = self.checkpoint + self.readout  # written
        if self.read < self.checkpoint:  # which a flush reads as well
            flush += self.checkpoint
        return self.read + flush / steps + self.record * (live + tokens)


def make_plan(config: dict[str, Any], window: int, drafts: int, dtype: str = "bfloat16", readout: str = "checkpoint") -> Plan:
    """Counts a config's bytes by tracing the model, without allocating any of it.

    Args:
        config: a parsed ``config.json``.
        window: ring rows.
        drafts: drafts per step beside the next token itself; 0 for plain decoding.
        dtype: of weights and activations; checkpoints are float32.
        readout: as in ``ReplayPolicy``.

    Raises:
        CheckpointError: no model of this type, or a value that it does not implement.
        ValueError: the window is too small for the drafts, or there is no such readout.
    """
    check_model_type(config, MODELS)
    cls: Any = MODELS[config["model_type"]]
    policy = ReplayPolicy(window=window, max_draft=drafts + 1, record_dtype=dtype, readout=readout)
    model: Decoder = nnx.eval_shape(lambda: cls(cls.read_config(config), dtype=dtype, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: model.init_cache(1, 1, policy))
    mixers = [layer for layer in cache.layers if isinstance(layer, MixerCache)]
    checkpoint, copy = (sum(num_bytes(getattr(mixer, name)) for mixer in mixers) for name in ("checkpoint", "readout"))
    read = checkpoint if readout == "checkpoint" else copy
    if readout == PLANE:  # a part of it
        checkpoint, copy = checkpoint + copy, 0
    mixtures = [module for _, module in nnx.iter_graph(model) if isinstance(module, Experts)]
    sparse = next((module for _, module in nnx.iter_graph(model) if hasattr(module, "experts")), None)
    return Plan(
        weights=num_bytes(nnx.state(model, nnx.Param)),
        experts=sum(num_bytes(nnx.state(mixture, nnx.Param)) for mixture in mixtures),
        experts_per_token=0 if sparse is None else _experts_per_token(sparse),
        num_experts=mixtures[0].num_experts if mixtures else 0,
        recurrent_layers=len(mixers),
        checkpoint=checkpoint,
        readout=copy,
        read=read,
        record=sum(num_bytes(mixer.buffer) for mixer in mixers) // window,
        conv=sum(num_bytes(mixer.conv) for mixer in mixers),
        kv_per_token=sum(num_bytes(layer) for layer in cache.layers if isinstance(layer, AttentionCache)),
        window=window,
        max_draft=drafts + 1,
    )


def _experts_per_token(mixture: Any) -> int:
    return mixture.routing.experts_per_token if hasattr(mixture, "routing") else mixture.experts_per_token


def best_window(plan: Plan, accepted: float) -> int:
    """The window of WINDOWS that moves the fewest bytes of state, of those that the plan's drafts allow."""
    # windows beyond the largest of WINDOWS are only ever chosen by hand
    usable = [dataclasses.replace(plan, window=window) for window in (*WINDOWS, plan.window) if window >= 2 * plan.max_draft]
    return min(usable, key=lambda candidate: candidate.replay_state(plan.max_draft, accepted)).window


def table(plan: Plan, gpu: GPU, batch: int, context: int, accepted: float, best: int) -> str:
    """The plan as text."""
    tokens = plan.max_draft
    room = gpu.memory * (1 - RESERVED) - plan.weights
    fits = f"{math.floor(room / plan.sequence(context)):,}" if room > 0 else "0 (the weights alone do not fit)"
    plain_state, replay_state = batch * plan.plain_state(tokens), batch * plan.replay_state(tokens, accepted)
    rest = plan.weights_read(batch * tokens) + batch * context * plan.kv_per_token
    ring = plan.window * plan.record
    baseline = "plain recurrence" if tokens == 1 else f"snapshots of {tokens} tokens"
    lines = [
        ("weights", _size(plan.weights)),
        ("", ""),
        ("per sequence", ""),
        (f"  state, {plan.recurrent_layers} recurrent layers", _size(plan.checkpoint)),
        *(
            [("  its read-out copy", f"{_size(plan.readout)} ({plan.readout / plan.checkpoint:.1%} of it)")]
            if plan.readout
            else []
        ),
        (f"  ring of {plan.window} records", f"{_size(ring)} ({ring / max(1, plan.checkpoint):.1%} of the state)"),
        ("  convolution histories", _size(plan.conv)),
        (f"  attention caches, {context:,} tokens", _size(context * plan.kv_per_token)),
        (f"sequences that fit on {gpu.name}", fits),
        ("", ""),
        (f"per step of {batch:,} sequences x {tokens} token{'s' * (tokens > 1)}", "bytes        time at most bandwidth"),
        ("  weights and attention caches", _moved(rest, gpu)),
        (f"  state, {baseline}", _moved(plain_state, gpu)),
        ("  state, replay, mean over a window", _moved(replay_state, gpu)),
        ("predicted speed-up of the state kernels", f"{plain_state / replay_state:.2f}x"),
        ("predicted speed-up of the whole step", f"{(rest + plain_state) / (rest + replay_state):.2f}x"),
        ("window that moves the fewest bytes", str(best)),
    ]
    width = max(len(name) for name, _ in lines) + 2
    body = "\n".join(f"{name:<{width}}{value}".rstrip() for name, value in lines)
    note = f"Predicted from bytes at {gpu.bandwidth / 1e12:.2f} TB/s ({gpu.source}); {RESERVED:.0%} of memory kept free."
    return f"{body}\n\n{note}"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:,.1f} {unit}" if unit != "B" else f"{size:,.0f} B"
        size /= 1024
    raise AssertionError("unreachable")


def _moved(size: float, gpu: GPU) -> str:
    return f"{_size(size):<12} {size / gpu.bandwidth * 1e3:.2f} ms"


def read(path: pathlib.Path) -> dict[str, Any]:
    """A config from a checkpoint folder or from a JSON file by itself."""
    if path.is_dir():
        return read_config(path)
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is neither a folder with a config.json nor a readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise app.UsageError("name one checkpoint folder or config file")
    options = flags.FLAGS
    accepted = options.accepted if options.accepted is not None else 1.0 + options.drafts / 2
    if not 0 < accepted <= options.drafts + 1:
        raise SystemExit(f"plan: --accepted={accepted} must be more than 0 and at most drafts + 1 = {options.drafts + 1}")
    try:
        config = read(pathlib.Path(arguments[1]))
        plan = make_plan(config, options.window, options.drafts, readout=options.readout)
        best = best_window(plan, accepted)
    except (CheckpointError, ValueError) as error:
        raise SystemExit(f"plan: {error}") from error
    gpu, count = GPUS[options.gpu], options.gpus
    if count > 1:
        gpu = GPU(f"{count} x {gpu.name}", gpu.memory * count, gpu.bandwidth * count, gpu.source)
    print(table(plan, gpu, options.batch, options.context, accepted, best))


def _define_flags(names: Iterable[str]) -> None:
    flags.DEFINE_integer("batch", 256, "Sequences decoded together.", lower_bound=1)
    flags.DEFINE_integer("context", 32768, "Tokens of a sequence, for the attention caches.", lower_bound=1)
    flags.DEFINE_integer("window", 16, "Ring rows.", lower_bound=2)
    flags.DEFINE_integer("drafts", 0, "Drafts per step beside the next token.", lower_bound=0)
    flags.DEFINE_enum("readout", "checkpoint", ["checkpoint", *FORMATS], "What ordinary reads of a state use.")
    flags.DEFINE_float("accepted", None, "Tokens kept per step, the next token included. Default: half of the drafts.")
    flags.DEFINE_enum("gpu", "h200", list(names), "Device.")
    flags.DEFINE_integer("gpus", 1, "Devices that share the weights, the sequences and the traffic evenly.", lower_bound=1)


if __name__ == "__main__":
    _define_flags(GPUS)
    app.run(main)
