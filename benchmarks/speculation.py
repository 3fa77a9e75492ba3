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
import functools
import os
import pathlib
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

from benchmarks.turns import measure_all, write  # noqa: E402
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


@dataclasses.dataclass(frozen=True)
class Job:
    """A layer, and the drafts of its rounds."""

    family: str
    batch: int
    drafts: int
    window: int
    tiny: bool

    def __str__(self) -> str:
        return f"{self.family}, batch {self.batch}, {self.drafts} drafts"

    @property
    def recurrence(self) -> Recurrence:
        recurrence = FAMILIES[self.family]
        heads: dict[str, Any] = {"num_value_heads": 4, "num_key_heads": 4 if recurrence.gate == "channel" else 2}
        return dataclasses.replace(recurrence, **heads) if self.tiny else recurrence

    def start(self) -> tuple[Any, Array]:
        """States of both ways."""
        r, count = self.recurrence, self.drafts + 1
        window = max(self.window, 16 * -(-2 * count // 16))  # the GPU kernels take 16 and 32
        policy = ReplayPolicy(window=window, max_draft=count, record_dtype="bfloat16")
        return init_state(r, policy, self.batch), jnp.zeros((self.batch, r.num_value_heads, r.value_dim, r.key_dim))


def program(job: Job) -> tuple[Any, Any]:
    """The compiled rounds of both ways, (state) -> (state, outputs)."""
    static = job.recurrence, job.drafts + 1, ROUNDS
    runs = zip((replay_rounds, snapshot_rounds), jax.eval_shape(job.start), strict=True)
    compiled = tuple(run.lower(state, *static).compile() for run, state in runs)
    return compiled[0], compiled[1]


def time_rounds(run: Any, state: Any) -> tuple[float, Array]:
    """Milliseconds per round, the median of several loops, and the outputs of the first loop's last round."""
    state, out = run(state)
    samples = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        state, _ = jax.block_until_ready(run(state))
        samples.append((time.perf_counter() - started) / ROUNDS * 1e3)
    return statistics.median(samples), out


def measure(job: Job, compiled: tuple[Any, Any]) -> tuple[list[dict[str, Any]], str]:
    """The entry of a job, and a line that says it."""
    pool, state = job.start()
    state_bytes, ring_bytes = state.nbytes, sum(x.nbytes for x in jax.tree.leaves(pool.buffer))
    window = pool.policy.window
    replay, out = time_rounds(compiled[0], pool)
    snapshot, expected = time_rounds(compiled[1], state)
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
    entry = {
        "family": job.family,
        "batch": job.batch,
        "drafts": job.drafts,
        "window": window,
        "records": "update" if pool.policy.records_updates(pool.recurrence) else "raw",
        "rounds": ROUNDS,
        "replay_ms": round(replay, 4),
        "snapshot_ms": round(snapshot, 4),
        "speed_up": round(snapshot / replay, 2),
        "relative_difference": error,
        "passed": error < TOLERANCE,
        "replay_bytes": state_bytes + ring_bytes,
        "snapshot_bytes": state_bytes * (2 + job.drafts),
    }
    return [entry], f"{replay:.3f} ms, with snapshots {snapshot:.3f} ms, difference {error:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--drafts", type=lambda text: [int(n) for n in text.split(",")], default=[4])
    parser.add_argument("--window", type=int, default=16, help="at least; two verifies fit it")
    parser.add_argument("--tiny", action="store_true", help="few small heads and sequences, for a CPU")
    parser.add_argument("--processes", type=int, default=6)
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    batch = min(options.batch, 4) if options.tiny else options.batch
    jobs = [
        Job(name, batch, drafts, options.window, options.tiny) for drafts in options.drafts[::-1] for name in options.families
    ]
    entries = measure_all(jobs, program, measure, options.processes, apart=True)
    write(options.out, ["wall clock of a round, verify and commit, tokens and what is kept drawn on the device in it"], entries)
    return 0 if entries and all(entry.get("passed") for entry in entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
