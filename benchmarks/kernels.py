"""Times the Pallas kernels on a Hopper GPU: step, flush and blocked verify of the three families, at batches 1 to 512.

    python benchmarks/kernels.py --out FILE.json [--families gdn,mamba2,kda] [--batches 1,8,32,128,256,512] [--sweep]

fp32 checkpoint, bfloat16 activations, window 16 (32 for 9 drafts). Every measurement is a compiled loop of kernel calls on a
donated state, read off the profiler's timeline: ``kernel_us`` is the median duration of the kernel, ``us`` the median time from
one start to the next. Programs are compiled by several processes at once, which then take turns on the GPU. ``--sweep`` tries
every cut of the work (``StreamConfig``) at batch 256 in place of the best known one.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.peers_timing import figures  # noqa: E402
from benchmarks.turns import measure_all, timeline, write  # noqa: E402

BATCHES = (1, 8, 32, 128, 256, 512)
LOOP = 48  # calls in one compiled loop
WINDOW = 16
DRAFT_RECORDS = {5: (0, 6, 8), 9: (0, 8, 15)}  # of a verify: an empty ring, ordinary rows, rows that flush
FEW = (1, 4, 5, 8, 9, 12, 13, 14, 15)  # records of a step: ring rows are copied eight together, which shows between 8 and 9
# [value heads, key heads], [V, K], the recurrence; the first of a family is its headline, the others are stepped at batch 256
GEOMETRIES: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {
    "gdn": [((64, 16), (128, 128)), ((32, 16), (128, 128)), ((30, 30), (192, 96))],
    "mamba2": [((128, 8), (64, 128)), ((96, 8), (80, 128))],
    "kda": [((32, 32), (128, 128)), ((64, 64), (128, 128)), ((96, 96), (128, 128))],
}
RECURRENCES = {"gdn": (True, False), "mamba2": (False, False), "kda": (True, True)}  # delta rule, channel gate


@dataclasses.dataclass(frozen=True)
class Job:
    """One compiled program and the numbers of records at which it is timed."""

    family: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    batch: int
    tokens: int
    records: tuple[int, ...]
    config: tuple[int, int] | None = None

    def __str__(self) -> str:
        cut = "" if self.config is None else f", {self.config[0]} heads, ring by {self.config[1]}"
        return f"{self.family} {self.heads[0]}/{self.heads[1]}, batch {self.batch}, {self.tokens} tokens{cut}"

    @property
    def window(self) -> int:
        return WINDOW if 2 * self.tokens <= WINDOW else 2 * WINDOW

    def is_due(self, records: int) -> bool:
        return records + 2 * self.tokens > self.window


def plan(families: list[str], batches: list[int], sweep: bool) -> list[Job]:
    """Steps at every number of records at the headline's batch 256, at a few elsewhere; verifies of 5 and 9 drafts."""
    every = tuple(range(WINDOW))
    jobs = []
    for family in families:
        (heads, dims), *others = GEOMETRIES[family]
        if sweep:
            cuts = [(n, chunk) for n in (1, 2, 4, 8) if (heads[0] // heads[1]) % n == 0 for chunk in (8, 16)]
            jobs += [Job(family, heads, dims, 256, 1, FEW, cut) for cut in cuts]
            jobs += [Job(family, heads, dims, 256, 5, DRAFT_RECORDS[5][1:], cut) for cut in cuts]
            continue
        for batch in batches:
            jobs.append(Job(family, heads, dims, batch, 1, every if batch == 256 else FEW))
        jobs += [Job(family, heads, dims, batch, 5, DRAFT_RECORDS[5]) for batch in batches if batch in (8, 256)]
        jobs += [Job(family, heads, dims, batch, 9, DRAFT_RECORDS[9]) for batch in batches if batch == 256]
        jobs += [Job(family, *other, 256, 1, FEW) for other in others if 256 in batches]
    return jobs


def program(job: Job) -> tuple[Any, Any]:
    """The compiled loop, (rows, tokens, pool) -> (pool, checksum), and what makes its tokens and pool."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import hopper

    delta_rule, channel_gate = RECURRENCES[job.family]
    (heads, key_heads), (value_dim, key_dim) = job.heads, job.dims
    f32, bf16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
    g = hopper.Geometry(
        rows=job.batch,
        slots=job.batch,
        tokens=job.tokens,
        value_heads=heads,
        key_heads=key_heads,
        value_dim=value_dim,
        key_dim=key_dim,
        window=job.window,
        max_draft=job.tokens,
        delta_rule=delta_rule,
        channel_gate=channel_gate,
        checkpoint_dtype=f32,
        record_dtype=bf16,
        value_dtype=bf16,
    )
    kernel = hopper.step if job.tokens == 1 else hopper.verify
    config = None if job.config is None else hopper.StreamConfig(*job.config)
    decay = (heads, key_dim) if channel_gate else (heads,)
    keys, values, window = (key_heads, key_dim), (heads, value_dim), job.window
    lead = (job.batch, job.tokens)

    def make() -> tuple[Any, Any]:
        seeds = iter(jax.random.split(jax.random.key(0), 12))

        def normal(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
            return (scale * jax.random.normal(next(seeds), shape)).astype(dtype)

        def uniform(shape: tuple[int, ...], low: float, high: float) -> jax.Array:
            return jax.random.uniform(next(seeds), shape, minval=low, maxval=high)

        scale = jnp.full((*lead, key_heads), key_dim**-0.5)
        tokens = hopper.Tokens(
            normal((*lead, *keys), bf16),
            normal((*lead, *keys), bf16),
            normal((*lead, *values), bf16),
            uniform((*lead, *decay), -0.3, 0.0),
            uniform((*lead, heads), 0.0, 1.0),
            scale,
            scale,
        )
        pool = [
            normal((job.batch, heads, value_dim, key_dim), f32, 0.1),
            normal((job.batch, key_heads, window, key_dim), bf16, key_dim**-0.5),
            normal((job.batch, heads, window, value_dim), g.update_dtype),
            uniform((job.batch, heads, window, *decay[1:]), -0.3, 0.0),
        ]
        return tokens, pool if delta_rule else [*pool, uniform((job.batch, heads, window), 0.0, 1.0)]

    def run(rows: Any, tokens: Any, pool: Any) -> tuple[Any, Any]:
        refs = [jax.new_ref(x) for x in pool]
        state = hopper.Pool(*refs)

        def one(_: Any, checksum: jax.Array) -> jax.Array:
            out = kernel(rows, tokens, state, g, config)
            return checksum + out[0, 0, 0, 0].astype(jnp.float32)

        checksum = jax.lax.fori_loop(0, LOOP, one, jnp.float32(0))
        return [jax.freeze(ref) for ref in refs], checksum

    vector: Any = jax.ShapeDtypeStruct((job.batch,), jnp.int32)
    made = jax.eval_shape(make)
    return jax.jit(run, donate_argnums=2).lower(hopper.Rows(*[vector] * 4), *made).compile(), jax.jit(make).lower().compile()


def measure(job: Job, compiled: tuple[Any, Any]) -> tuple[list[dict[str, Any]], str]:
    """The entries of a job, a step's mean among them, and a line that says them."""
    import jax.numpy as jnp

    from pallas_kernels import hopper

    run, make = compiled
    tokens, pool = make()
    order = jnp.asarray(np.random.default_rng(0).permutation(job.batch), jnp.int32)
    entries = []
    for records in job.records:
        full = jnp.full(job.batch, records, jnp.int32)
        rows = hopper.Rows(order, jnp.full(job.batch, job.tokens, jnp.int32), full, jnp.zeros(job.batch, jnp.int32))
        pool, _ = run(rows, tokens, pool)
        (pool, _), events = timeline(run, rows, tokens, pool)
        kernels = [(start, duration) for name, start, duration in events if "replay_" in name]
        durations, periods = [duration for _, duration in kernels], list(np.diff([start for start, _ in kernels]))
        entry: dict[str, Any] = {"family": job.family, "heads": list(job.heads), "dims": list(job.dims), "batch": job.batch}
        entry |= {"kernel": "pallas", "what": "step" if job.tokens == 1 else "verify", "tokens": job.tokens}
        entry |= {"records": records, "flush": job.is_due(records), "window": job.window}
        entry |= figures(periods) | figures(durations, "kernel_us")
        entries.append(entry | ({} if job.config is None else {"config": list(job.config)}))
    line = " ".join(f"{entry['records']}:{entry['kernel_us']:.1f}" for entry in entries)
    if mean := window_mean(entries) if job.config is None else None:
        return [*entries, mean], f"{line}; mean {mean['kernel_us']:.1f} us"
    return entries, line


def window_mean(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The mean step: ordinary ones at 1..14 records, interpolated where not measured, and one flush of 15, of 15 steps."""
    steps = {entry["records"]: entry for entry in entries if entry["what"] == "step"}
    if WINDOW - 1 not in steps:
        return None
    known = sorted(records for records in steps if records < WINDOW - 1)
    mean = {name: steps[WINDOW - 1][name] for name in ("family", "heads", "dims", "batch", "kernel", "tokens")}
    mean |= {"what": "step_mean", "window": WINDOW, "of": "14 ordinary steps and one flush", "measured_records": known}
    for name in ("us", "kernel_us"):
        ordinary = np.interp(range(1, WINDOW - 1), known, [steps[records][name] for records in known])
        mean[name] = round(float(ordinary.sum() + steps[WINDOW - 1][name]) / (WINDOW - 1), 3)
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("kernels.json"), help="results")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(GEOMETRIES))
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=list(BATCHES))
    parser.add_argument("--sweep", action="store_true", help="every cut of the work at batch 256")
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jobs = plan(options.families, options.batches, options.sweep)
    jobs.sort(key=lambda job: (-job.tokens, -job.batch))
    entries = measure_all(jobs, program, measure, options.processes)
    notes = ["us: start to start in a compiled loop; kernel_us: duration of the kernel; both on the profiler's timeline"]
    write(options.out, notes, entries)


if __name__ == "__main__":
    main()
