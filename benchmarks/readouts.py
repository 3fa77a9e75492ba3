"""Times steps that read a copy of the checkpoint in fewer bytes against ones that read the float32 checkpoint, on a Hopper GPU.

    python benchmarks/readouts.py --out FILE.json [--families gdn,mamba2,kda] [--batch 256] [--tokens 1]
        [--readouts checkpoint,raw,bf16,bf16_plane,fp8_e4m3,nvfp4]

"raw" reads the checkpoint too, but with raw records as the copies have them: what a copy gains and what they cost come apart.
float32 checkpoint, bfloat16 activations, window 16 (32 for 9 drafts), the GPU backend as ``step`` and ``verify`` call it. Every
measurement is a compiled loop on a donated state at a fixed number of records, read off the profiler's timeline: ``us`` is the
time on the device of all that a step launches, per step; what the loop itself launches is among the ``kernels``, but not in it.
With 15 records (one draft) every row is due: it folds, writes its checkpoint and its copy.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.kernels import DRAFT_RECORDS, FEW, GEOMETRIES, LOOP, RECURRENCES, WINDOW, window_mean  # noqa: E402
from benchmarks.turns import measure_all, timeline, write  # noqa: E402

# Kernels of the loop, as its compiled body has them: the lengths, a constant; the sum of answers; the counter.
LOOPS_OWN = ("loop_broadcast_fusion", "loop_add_fusion", "loop_add_fusion_1")
# what ordinary steps read: the float32 checkpoint, with records of updates or raw ones; or a copy of it, with raw records
READOUTS = ("checkpoint", "raw", "bf16", "bf16_plane", "fp8_e4m3", "nvfp4")


@dataclasses.dataclass(frozen=True)
class Job:
    """One compiled program."""

    family: str
    readout: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.family} {self.readout}, batch {self.batch}, {self.tokens} tokens"

    @property
    def window(self) -> int:
        return WINDOW if 2 * self.tokens <= WINDOW else 2 * WINDOW

    @property
    def records(self) -> tuple[int, ...]:
        """Numbers of committed records to time it at: ordinary rows, the last of them, and rows that are due."""
        if self.tokens == 1:
            return FEW
        if self.tokens in DRAFT_RECORDS:
            return DRAFT_RECORDS[self.tokens]
        last = self.window - 2 * self.tokens
        return tuple(sorted({*(n for n in (1, 7) if n < last), last, self.window - self.tokens}))


def program(job: Job) -> tuple[Any, Any]:
    """The compiled loop, (length, state, tokens) -> (state, checksum), and what makes its state and tokens."""
    import jax
    import jax.numpy as jnp

    import replayssm_jax as rs
    from replayssm_jax import replay_pallas
    from replayssm_jax.readout import PLANE, encode, lower_plane

    delta_rule, channel_gate = RECURRENCES[job.family]
    (heads, key_heads), (value_dim, key_dim) = GEOMETRIES[job.family][0]
    recurrence = rs.Recurrence(
        num_value_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        delta_rule=delta_rule,
        gate="channel" if channel_gate else "head",
    )
    records = {"checkpoint": {"records": "update"}, "raw": {"records": "raw"}}
    read: dict[str, Any] = records.get(job.readout) or {"readout": job.readout}
    policy = rs.ReplayPolicy(window=job.window, max_draft=job.tokens, record_dtype="bfloat16", **read)
    decay = (heads, key_dim) if channel_gate else (heads,)
    lead = (job.batch, job.tokens)

    def make() -> tuple[Any, Any]:
        seeds = iter(jax.random.split(jax.random.key(0), 12))

        def normal(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
            return (scale * jax.random.normal(next(seeds), shape)).astype(dtype)

        def uniform(shape: tuple[int, ...], low: float, high: float) -> jax.Array:
            return jax.random.uniform(next(seeds), shape, minval=low, maxval=high)

        state = rs.init_state(recurrence, policy, job.batch)
        checkpoint, ring = normal(state.checkpoint.shape, "float32", 0.1), state.buffer
        buffer = dataclasses.replace(
            ring,
            key=normal(ring.key.shape, ring.key.dtype, key_dim**-0.5),
            update=normal(ring.update.shape, ring.update.dtype),
            weight=None if ring.weight is None else uniform(ring.weight.shape, 0.0, 1.0),
            log_decay=uniform(ring.log_decay.shape, -0.3, 0.0),
            factor=None if ring.factor is None else jnp.ones_like(ring.factor),
        )
        copy = None if state.readout is None else encode(job.readout, checkpoint)
        checkpoint = lower_plane(checkpoint) if job.readout == PLANE else checkpoint
        tokens = rs.Tokens(
            q=normal((*lead, key_heads, key_dim), "bfloat16", key_dim**-0.5),
            k=normal((*lead, key_heads, key_dim), "bfloat16", key_dim**-0.5),
            v=normal((*lead, heads, value_dim), "bfloat16"),
            log_decay=uniform((*lead, *decay), -0.3, 0.0),
            beta=uniform((*lead, heads), 0.0, 1.0),
            q_scale=jnp.ones((*lead, key_heads)),
            k_scale=jnp.ones((*lead, key_heads)),
        )
        return dataclasses.replace(state, checkpoint=checkpoint, buffer=buffer, readout=copy), tokens

    def run(length: jax.Array, state: Any, tokens: Any) -> tuple[Any, jax.Array]:
        slots, lengths = jnp.arange(job.batch)[::-1].astype(jnp.int32), jnp.full(job.batch, job.tokens, jnp.int32)
        state = dataclasses.replace(state, pointer=dataclasses.replace(state.pointer, length=length))

        def one(_: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            state, out = replay_pallas.verify(carry[0], tokens, slots, lengths)
            return state, carry[1] + out[0, 0, 0, 0].astype(jnp.float32)

        return jax.lax.fori_loop(0, LOOP, one, (state, jnp.float32(0)))

    state, tokens = jax.eval_shape(make)
    length = jax.ShapeDtypeStruct((job.batch,), jnp.int32)
    return jax.jit(run, donate_argnums=1).lower(length, state, tokens).compile(), jax.jit(make).lower().compile()


def per_call(events: list[tuple[str, float, float]]) -> dict[str, float]:
    """Time on the device per call of the loop, by kernel [us]."""
    durations: dict[str, list[float]] = collections.defaultdict(list)
    for name, _, duration in events:
        durations[name].append(duration)
    # what runs once is the loop's surroundings; of the rest the median, times how often a call launches it
    each = {name: sorted(found)[len(found) // 2] * round(len(found) / LOOP) for name, found in durations.items()}
    return {name: round(us, 3) for name, us in each.items() if us}


def measure(job: Job, compiled: tuple[Any, Any]) -> tuple[list[dict[str, Any]], str]:
    """The entries of a job, a step's mean among them, and a line that says them."""
    import jax.numpy as jnp

    run, make = compiled
    state, tokens = make()
    heads, dims = GEOMETRIES[job.family][0]
    entries = []
    for records in job.records:
        length = jnp.full(job.batch, records, jnp.int32)
        state, _ = run(length, state, tokens)
        (state, _), events = timeline(run, length, state, tokens)
        kernels = per_call(events)
        entry: dict[str, Any] = {"family": job.family, "heads": list(heads), "dims": list(dims), "batch": job.batch}
        entry |= {"kernel": "pallas", "readout": job.readout, "what": "step" if job.tokens == 1 else "verify"}
        entry |= {"tokens": job.tokens, "records": records, "flush": records + 2 * job.tokens > job.window}
        entry["window"] = job.window
        us = round(sum(time for name, time in kernels.items() if name not in LOOPS_OWN), 3)
        entries.append(entry | {"us": us, "kernel_us": us, "kernels": kernels})
    if job.tokens == 1 and (mean := window_mean(entries)):
        entries.append(mean | {"readout": job.readout})
    return entries, " ".join(f"{entry.get('records', 'mean')}:{entry['us']:.1f}" for entry in entries) + " us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("readouts.json"), help="results")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(GEOMETRIES))
    parser.add_argument("--readouts", type=lambda text: text.split(","), default=list(READOUTS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    kinds = [(family, readout) for family in options.families for readout in options.readouts]
    jobs = [Job(*kind, options.batch, tokens) for tokens in sorted(options.tokens)[::-1] for kind in kinds]
    entries = measure_all(jobs, program, measure, options.processes)
    notes = [
        "us: time on the device of all that one step or verify launches, off the profiler's timeline",
        f"kernels: all of the loop, its own {', '.join(LOOPS_OWN)} included",
    ]
    write(options.out, notes, entries)


if __name__ == "__main__":
    main()
