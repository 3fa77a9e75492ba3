"""Programs for one GPU: compiled by several processes at once, timed one after the other, off the profiler's timeline."""

import datetime
import fcntl
import glob
import json
import multiprocessing
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]


def timeline(run: Any, *arguments: Any) -> tuple[Any, list[tuple[str, float, float]]]:
    """Runs once under the profiler: the result, and (name, start, duration) [us] of all that the GPU did, by start."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = jax.block_until_ready(run(*arguments))
        trace = glob.glob(folder + "/**/*.xplane.pb", recursive=True)[0]
        planes = jax.profiler.ProfileData.from_file(trace).planes
        lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
        events = [(event.name, event.start_ns / 1e3, event.duration_ns / 1e3) for line in lines for event in line.events]
    return result, sorted(events, key=lambda event: event[1])


def measure_all(
    jobs: list[Any],
    program: Callable[[Any], Any],
    measure: Callable[[Any, Any], tuple[list[Entry], str]],
    processes: int,
    apart: bool = False,
) -> list[Entry]:
    """The entries of all jobs; of one that failed an entry with its "family" and the "error".

    Args:
        jobs: have a ``family`` and a name as text.
        program: compiles a job; a function of a module, as ``measure`` is.
        measure: of a job and what ``program`` made of it, the entries and a line that says them.
        processes: that compile at once.
        apart: whether nothing is timed before all are compiled: for wall clock, and where ``program`` runs on the GPU.
    """
    begin, share = time.monotonic(), min(processes, len(jobs))
    print(f"{len(jobs)} programs, compiled by {share} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        outs = [pathlib.Path(folder) / f"{index}.json" for index in range(share)]
        all_compiled = context.Barrier(share) if apart else None
        common = program, measure, f"{folder}/lock", all_compiled
        started = [context.Process(target=_work, args=(jobs[i::share], outs[i], *common)) for i in range(share)]
        for process in started:
            process.start()
        while any(process.is_alive() for process in started):
            time.sleep(0.1)
            if all_compiled is not None and any(process.exitcode for process in started):
                all_compiled.abort()  # or the others would wait for it
        entries = [entry for out in outs if out.exists() for entry in json.loads(out.read_text())]
        for i, process in enumerate(started):
            if process.exitcode:
                entries.append({"family": jobs[i].family, "error": f"a process of {jobs[i]} ended with {process.exitcode}"})
    failed = [entry["error"] for entry in entries if "error" in entry]
    print("\n".join(failed) or "all measured", f"in {time.monotonic() - begin:.0f} s")
    return entries


def _work(jobs: list[Any], out: pathlib.Path, program: Any, measure: Any, lock_file: str, all_compiled: Any) -> None:
    """A process: compiles its jobs, then times them in turn with the others."""
    results: list[Entry] = []
    compiled = []

    def failed(job: Any, error: Exception) -> Entry:
        return {"family": job.family, "error": f"{job}: {type(error).__name__}: {error}"[:400]}

    for job in jobs:
        try:
            compiled.append((job, program(job)))
        except Exception as error:
            results.append(failed(job, error))
    out.write_text(json.dumps(results))
    if all_compiled is not None:
        all_compiled.wait()
    for job, programs in compiled:
        with open(lock_file, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                entries, line = measure(job, programs)
                results += entries
                print(f"  {job}: {line}", flush=True)
            except Exception as error:
                results.append(failed(job, error))
        out.write_text(json.dumps(results))


def write(out: pathlib.Path, notes: list[str], entries: list[Entry]) -> None:
    """Entries with everything that reproduces them, as JSON."""
    import jax

    result = {
        "command": shlex.join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "date": datetime.date.today().isoformat(),
        "notes": notes,
        "measurements": entries,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
