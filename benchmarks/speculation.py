"""What rejecting drafts costs: replay, which moves a pointer, against a snapshot of the state for every draft.

    python benchmarks/speculation.py --out FILE.json [--batch 256] [--families gdn,mamba2,kda] [--drafts 4,8]
    JAX_PLATFORMS=cpu python benchmarks/speculation.py --out FILE.json --tiny

A round verifies the next token and D drafts of every sequence and keeps a random number of them. Both ways see the same tokens
and keep the same ones, and their outputs are compared before anything is timed. The snapshot way is what serving engines do
without replay: the plain recurrence token by token, the state kept after each of them, and the one that was accepted copied
back (in jnp, by the law itself; ``peers.py`` times the published kernels). Rounds run in a loop on the device, as many as
fold every sequence's ring several times, so that flushes are in the mean. Time is wall clock over the loop.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import shlex
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from replayssm_jax import Recurrence, ReplayPolicy, Tokens, commit, init_state, verify  # noqa: E402
from replayssm_jax.recurrence import recurrent_token  # noqa: E402

Array = jax.Array
ROUNDS, REPEATS, TOLERANCE = 32, 5, 2e-2  # outputs are bfloat16

FAMILIES = {
    "gdn": Recurrence(num_value_heads=64, num_key_heads=16, key_dim=128, value_dim=128, delta_rule=True, gate="head"),
    "mamba2": Recurrence(num_value_heads=128, num_key_heads=8, key_dim=128, value_dim=64, delta_rule=False, gate="head"),
    "kda": Recurrence(num_value_heads=32, num_key_heads=32, key_dim=128, value_dim=128, delta_rule=True, gate="channel"),
}


def make_round(recurrence: Recurrence, batch: int, count: int, key: Array) -> tuple[Tokens, Array]:
    """The tokens of a round, and how many of them every sequence keeps. [B] int32"""
    r, keys = recurrence, jax.random.split(key, 6)
    gate = (r.key_dim,) if r.gate == "channel" else ()

    def normal(key: Array, *shape: int) -> Array:
        return jax.random.normal(key, shape, jnp.float32)

    tokens = Tokens(
        q=(normal(keys[0], batch, count, r.num_key_heads, r.key_dim)).astype(jnp.bfloat16),
        k=(normal(keys[1], batch, count, r.num_key_heads, r.key_dim)).astype(jnp.bfloat16),
        v=normal(keys[2], batch, count, r.num_value_heads, r.value_dim).astype(jnp.bfloat16),
        log_decay=-jax.random.uniform(keys[3], (batch, count, r.num_value_heads, *gate), maxval=0.3),
        beta=jax.random.uniform(keys[4], (batch, count, r.num_value_heads)),
        q_scale=jnp.full((batch, count, r.num_key_heads), r.key_dim**-1.0),
        k_scale=jnp.full((batch, count, r.num_key_heads), r.key_dim**-0.5),
    )
    return tokens, jax.random.randint(keys[5], (batch,), 1, count + 1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=0)
def replay_rounds(state: Any, recurrence: Recurrence, count: int, rounds: int) -> tuple[Any, Array]:
    """The state after so many rounds, and the last one's outputs [B, T, H, V]."""

    def one(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        state, _ = carry
        tokens, accepted = make_round(recurrence, state.num_slots, count, jax.random.fold_in(jax.random.key(0), i % 2))
        state, out = verify(state, tokens)
        return dataclasses.replace(state, pointer=commit(state.pointer, accepted)), out

    r = recurrence
    out = jnp.zeros((state.num_slots, count, r.num_value_heads, r.value_dim), jnp.bfloat16)
    return lax.fori_loop(0, rounds, one, (state, out))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=0)
def snapshot_rounds(state: Array, recurrence: Recurrence, count: int, rounds: int) -> tuple[Array, Array]:
    """The same with states [B, H, V, K] float32, one of them kept for every token of a round."""
    r, batch = recurrence, state.shape[0]

    def token(state: Array, x: Tokens) -> tuple[Array, tuple[Array, Array]]:
        state, _, out = recurrent_token(recurrence, state, x)
        return state, (state, out.astype(x.v.dtype))

    def one(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, _ = carry
        tokens, accepted = make_round(recurrence, batch, count, jax.random.fold_in(jax.random.key(0), i % 2))
        _, (snapshots, out) = lax.scan(token, state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tokens))
        return snapshots[accepted - 1, jnp.arange(batch)], jnp.swapaxes(out, 0, 1)

    out = jnp.zeros((batch, count, r.num_value_heads, r.value_dim), jnp.bfloat16)
    return lax.fori_loop(0, rounds, one, (state, out))


def time_rounds(run: Any, make: Any, *static: Any) -> tuple[float, Any]:
    """Milliseconds per round, the median of several loops, and the outputs of the last round."""
    state, out = run(make(), *static)
    samples = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        state, _ = jax.block_until_ready(run(state, *static))
        samples.append((time.perf_counter() - started) / static[-1] * 1e3)
    return statistics.median(samples), out


def measure(family: str, recurrence: Recurrence, batch: int, drafts: int, window: int) -> dict[str, Any]:
    count = drafts + 1
    policy = ReplayPolicy(window=window, max_draft=count, record_dtype="bfloat16")
    shape = (batch, recurrence.num_value_heads, recurrence.value_dim, recurrence.key_dim)
    replay, out = time_rounds(replay_rounds, lambda: init_state(recurrence, policy, batch), recurrence, count, ROUNDS)
    snapshot, expected = time_rounds(snapshot_rounds, lambda: jnp.zeros(shape), recurrence, count, ROUNDS)
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
    state = batch * shape[1] * shape[2] * shape[3] * 4
    pool = jax.eval_shape(lambda: init_state(recurrence, policy, batch))
    ring = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool.buffer))
    return {
        "family": family,
        "batch": batch,
        "drafts": drafts,
        "window": window,
        "replay_ms": round(replay, 4),
        "snapshot_ms": round(snapshot, 4),
        "speed_up": round(snapshot / replay, 2),
        "relative_difference": error,
        "passed": error < TOLERANCE,
        "replay_bytes": state + ring,
        "snapshot_bytes": state * (1 + count),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--drafts", default="4")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="few small heads and sequences, for a CPU")
    options = parser.parse_args()
    results = []
    for family in options.families.split(","):
        recurrence, batch = FAMILIES[family], options.batch
        if options.tiny:
            heads: dict[str, Any] = {"num_value_heads": 4, "num_key_heads": 4 if recurrence.gate == "channel" else 2}
            recurrence, batch = dataclasses.replace(recurrence, **heads), min(batch, 4)
        for drafts in map(int, options.drafts.split(",")):
            window = max(options.window, 2 * (drafts + 1))
            results.append(measure(family, recurrence, batch, drafts, window))
            print(json.dumps(results[-1]), flush=True)
            report = {
                "command": shlex.join(["python", *sys.argv]),
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "date": datetime.date.today().isoformat(),
                "rounds": ROUNDS,
                "results": results,
            }
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
