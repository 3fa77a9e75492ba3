"""Decodes a model of each family on one device and on meshes of all of them: equal logits, time of a step.

    python benchmarks/sharded.py --out FILE.json [--families qwen3_next,mamba2] [--batch 64] [--implementation xla]
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python benchmarks/sharded.py --out FILE.json --tiny

The models have random weights, four layers and the head geometry of a published one (fewer experts). Each mesh splits the same
batch: over heads and experts, over slots, and over both where there are four devices or more. Logits are compared in float32 on
the same tokens, through one and a half windows; steps are timed in bfloat16, each on the token that the last one chose, in a
loop that the device runs by itself. The file is written anew after every mesh.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from replayssm_jax import ReplayPolicy  # noqa: E402
from replayssm_jax.mixers import MixerCache  # noqa: E402
from replayssm_jax.models import MODELS, shard  # noqa: E402

WINDOW, REPEATS = 16, 5
TOLERANCE = 1e-4  # of the largest logit, float32
_QWEN = {
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# Geometry of: Qwen3.5-9B, Qwen3-Next-80B-A3B, Kimi-Linear-48B-A3B, Nemotron-3-Nano-30B-A3B, Mamba2-2.7b (one group, repeated).
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**_QWEN, "hidden_size": 4096, "intermediate_size": 12288},
    "qwen3_next": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_experts": 128,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "kimi_linear": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 4,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "num_experts": 64,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "nemotron_h": {
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEM*",
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    },
    "mamba2": {"hidden_size": 2560, "num_hidden_layers": 4, "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1},
}
# What --tiny changes: widths and counts that say nothing about how heads split.
_TINY = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_TINY |= {"moe_shared_expert_intermediate_size": 32, "num_experts": 16, "n_routed_experts": 16, "kv_lora_rank": 32}
_TINY |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_head_dim": 16, "ssm_state_size": 16, "state_size": 16}
_COLLECTIVE = re.compile(r"= \(?(.*?)\)? (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")


def build(family: str, tiny: bool, dtype: str) -> Any:
    """A model of the family on the first device, its weights random, made by one compiled call."""
    config = {"model_type": family, "vocab_size": 512 if tiny else 32768, **CONFIGS[family]}
    if tiny:
        config |= {key: value for key, value in _TINY.items() if key in config}
    cls: Any = MODELS[family]
    sizes = cls.read_config(config)
    graph = nnx.split(nnx.eval_shape(lambda: cls(sizes, dtype=dtype, rngs=nnx.Rngs(0))))[0]
    weights = jax.jit(lambda: nnx.state(cls(sizes, dtype=dtype, rngs=nnx.Rngs(0)), nnx.Param))()
    return nnx.merge(graph, weights)


@functools.partial(jax.jit, static_argnames=("graph", "implementation", "steps"), donate_argnames="cache")
def decode(graph: Any, implementation: str | None, steps: int, weights: Any, cache: Any, first: jax.Array, forced: Any) -> Any:
    """Steps from one token per row on: the cache, the last tokens, and with ``forced`` [steps, B] the logits after each."""
    model = nnx.merge(graph, weights)

    def step(carry: Any, token: Any) -> Any:
        cache, chosen = carry
        token = chosen if token is None else token
        cache, logits = model.verify(cache, token[:, None], implementation=implementation)
        chosen = jnp.argmax(logits[:, 0], axis=-1).astype(token.dtype)
        return (model.commit(cache, 1), chosen), None if forced is None else logits[:, 0]

    (cache, chosen), logits = jax.lax.scan(step, (cache, first), forced, length=steps)
    return cache, chosen, logits


@dataclasses.dataclass
class Subject:
    """A model on one device or a mesh, ready to decode."""

    model: Any
    options: argparse.Namespace

    def start(self, steps: int, forced: Any) -> tuple[Any, Any, float]:
        """The compiled loop, a fresh cache and the seconds of compiling."""
        policy = ReplayPolicy(window=WINDOW, record_dtype=self.model.dtype)
        cache = self.model.init_cache(self.options.batch, self.options.context, policy)
        graph, self.weights = nnx.split(self.model)
        first = jnp.zeros(self.options.batch, jnp.int32)
        begin = time.perf_counter()
        lowered = decode.lower(graph, self.options.implementation, steps, self.weights, cache, first, forced)
        compiled = lowered.compile()
        return compiled, cache, time.perf_counter() - begin

    def logits(self, forced: Any) -> np.ndarray:
        """[steps, B, vocabulary] after each of the forced tokens [steps, B]."""
        compiled, cache, _ = self.start(len(forced), forced)
        return np.asarray(compiled(self.weights, cache, jnp.zeros(self.options.batch, jnp.int32), forced)[2])

    def timed(self) -> dict[str, Any]:
        """Milliseconds of a step: over whole windows, the median of repeats; and what the compiled program sends."""
        steps = 2 * (WINDOW - 1)
        compiled, cache, seconds = self.start(steps, None)
        token, times = jnp.zeros(self.options.batch, jnp.int32), []
        for _ in range(REPEATS + 1):  # the first warms up
            begin = time.perf_counter()
            cache, chosen, _ = compiled(self.weights, cache, token, None)
            jax.block_until_ready((cache, chosen))
            times.append((time.perf_counter() - begin) / steps * 1e3)
        state = next(layer for layer in cache.layers if isinstance(layer, MixerCache))
        own = state.checkpoint.addressable_shards[0].data
        sent = collectives(compiled.as_text())
        return {
            "ms_per_step": round(statistics.median(times[1:]), 4),
            "ms_per_step_all": [round(value, 4) for value in times[1:]],
            "checkpoint_per_device": list(own.shape),
            "collectives": {kind: len(sizes) for kind, sizes in sent.items()},
            "largest_collective": max((size for sizes in sent.values() for size in sizes), default=0),
            "checkpoint_elements": own.size,
            "compile_seconds": round(seconds, 1),
        }


def collectives(text: str) -> dict[str, list[int]]:
    """Elements of the results of every collective of a compiled program, by kind."""
    found: dict[str, list[int]] = {}
    for results, kind in _COLLECTIVE.findall(text):
        for dims in re.findall(r"\w+\[([\d,]*)\]", results):
            found.setdefault(kind, []).append(int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64)))
    return found


def meshes(count: int) -> Iterator[tuple[int, int]]:
    """Shapes (data, model) of a mesh of ``count`` devices."""
    yield from dict.fromkeys([(1, count), (count, 1)] + ([(2, count // 2)] if count >= 4 and count % 2 == 0 else []))


def run_family(family: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for one device, then one per mesh."""
    exact, quick = (build(family, options.tiny, dtype) for dtype in ("float32", "float32" if options.tiny else "bfloat16"))
    shape = (3 * WINDOW // 2, options.batch)
    forced = jax.random.randint(jax.random.key(1), shape, 0, exact.config.vocab_size, jnp.int32)
    want = Subject(exact, options).logits(forced)
    largest = float(np.abs(want).max())
    base = {"family": family, "batch": options.batch, "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(exact)))}
    single = Subject(quick, options).timed()
    yield {**base, "mesh": None, "largest_logit": largest, **single}
    for data, model in meshes(jax.device_count()):
        mesh = jax.make_mesh((data, model), ("data", "model"))
        error = float(np.abs(Subject(shard(exact, mesh), options).logits(np.asarray(forced)) - want).max()) / largest
        record = Subject(shard(quick, mesh), options).timed()
        speed_up = round(single["ms_per_step"] / record["ms_per_step"], 3)
        passed = error <= TOLERANCE and record["largest_collective"] < record["checkpoint_elements"]
        yield {
            **base,
            "mesh": {"data": data, "model": model},
            "logits_error": error,
            "passed": passed,
            "speed_up": speed_up,
            **record,
        }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file to write")
    parser.add_argument("--families", default=",".join(CONFIGS), help="comma-separated, of " + ", ".join(CONFIGS))
    parser.add_argument("--batch", type=int, default=None, help="rows of the whole batch (64, tiny: 8)")
    parser.add_argument("--context", type=int, default=None, help="positions of the attention caches (2048, tiny: 256)")
    parser.add_argument("--implementation", default=None, choices=["reference", "xla", "pallas"])
    parser.add_argument("--tiny", action="store_true", help="narrow float32 models, for a try on virtual CPU devices")
    options = parser.parse_args(arguments)
    options.batch = options.batch or (8 if options.tiny else 64)
    options.context = options.context or (256 if options.tiny else 2048)
    if unknown := set(options.families.split(",")) - set(CONFIGS):
        parser.error(f"--families names {', '.join(sorted(unknown))}; known are {', '.join(CONFIGS)}")
    if options.batch % jax.device_count():
        parser.error(f"--batch={options.batch} must be divisible by the {jax.device_count()} devices")
    report: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/sharded.py", *arguments]),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "window": WINDOW,
        "results": [],
    }
    for family in options.families.split(","):
        for record in run_family(family, options):
            report["results"].append(record)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps({k: v for k, v in record.items() if k != "ms_per_step_all"}), flush=True)
    return int(not all(record.get("passed", True) for record in report["results"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
