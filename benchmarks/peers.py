"""Times the published kernels (vLLM, SGLang; Triton) on one GPU and checks them against the recurrence.

    python benchmarks/fetch_peers.py                                # once, with a network
    python benchmarks/peers.py --out FILE.json [--quick] [--families gdn,mamba2,kda] [--batches 1,8,32,128,256,512]

Needs PyTorch and Triton, and no network. fp32 states, bfloat16 activations, a window of 16 records. Kernels are first compiled
and checked by one process a family and part, all at once, through Triton's cache. peers_timing.py says what is timed,
peers_delta.py and peers_mamba2.py how each kernel is called. The file is written anew after every batch: a run that is cut
short leaves what it had.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import peers_checks, peers_delta, peers_mamba2  # noqa: E402
from benchmarks.peers_timing import WINDOW, ceiling, measure, window_mean  # noqa: E402

BATCHES = (1, 8, 32, 128, 256, 512)
VERIFY_TOKENS = (5, 9)
PARTS = ("step", "verify", "snapshots")
FEW_RECORDS = (0, 7, WINDOW - 2)
# [value heads, key heads] and [V, K]; the first of a family is its headline and gets all parts, the others steps at FEW_RECORDS
GEOMETRIES: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {
    "gdn": [((64, 16), (128, 128)), ((32, 16), (128, 128))],
    "mamba2": [((128, 8), (64, 128))],
    "kda": [((32, 32), (128, 128)), ((64, 64), (128, 128)), ((96, 96), (128, 128))],
}
SOURCES = {
    "gdn": {
        "recurrent": "vLLM fused_recurrent_gated_delta_rule_packed_decode",
        "published_replay step": "SGLang fused_recurrent_linear_replayssm_decode",
        "published_replay verify": "SGLang gdn_replayssm_spec_decode; compact: and commit_gdn_replayssm_circular",
        "snapshots": "vLLM fused_recurrent_gated_delta_rule",
    },
    "mamba2": {
        "recurrent, snapshots": "vLLM selective_state_update, tuned configuration",
        "published_replay step": "vLLM selective_state_update_replayssm_output_only",
        "published_replay verify": "reference implementation's selective_state_update_replayssm_spec",
    },
    "kda": {
        "recurrent": "SGLang fused_recurrent_kda_packed_decode (Triton)",
        "published_replay step": "SGLang fused_recurrent_linear_replayssm_decode",
    },
}
NOTES = [
    "us: period in a replayed CUDA graph; kernel_us: sum of kernel durations on the profiler's timeline",
    "every call works on the same slots: at batch 1 and 8 the states stay in the L2",
    "verify: 8 committed records, in a ring of 16 (5 tokens) or 32 (9 tokens) rows",
]
MODULES = {"gdn": peers_delta, "kda": peers_delta, "mamba2": peers_mamba2}


@dataclasses.dataclass(frozen=True)
class Job:
    """One family, shape, batch and part."""

    family: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    batch: int
    part: str

    def __str__(self) -> str:
        return f"{self.family} {self.heads[0]}/{self.heads[1]} heads, batch {self.batch}, {self.part}"


def plan(families: Sequence[str], batches: Sequence[int], parts: Sequence[str], quick: bool = False) -> list[Job]:
    """The jobs of a run, headlines first. ``quick`` leaves the other shapes out."""
    headline, others = [], []
    for family in families:
        for index, (heads, dims) in enumerate(GEOMETRIES[family]):
            for batch, part in itertools.product(batches, parts):
                job = Job(family, heads, dims, batch, part)
                if index == 0 and not (family == "kda" and part == "snapshots"):
                    headline.append(job)
                elif index > 0 and part == "step" and not quick:
                    others.append(job)
    return headline + others


def records_of(job: Job, quick: bool = False) -> tuple[int, ...]:
    """Numbers of records at which a job's steps are timed."""
    return FEW_RECORDS if quick or job.heads != GEOMETRIES[job.family][0][0] else tuple(range(WINDOW - 1))


def calls_of(job: Job, records: Sequence[int]) -> list[Any]:
    """What a job times."""
    module = MODULES[job.family]
    shape = (job.family, job.heads, job.dims, job.batch)
    if job.part == "step":
        return module.step_calls(*shape, records)
    return (module.verify_calls if job.part == "verify" else module.snapshot_calls)(*shape, VERIFY_TOKENS)


def run_job(job: Job, records: Sequence[int], samples: int) -> list[dict[str, Any]]:
    """The measurements of a job, and for steps the mean over a window."""
    try:
        calls = calls_of(job, records)
        entries = measure(calls, [call.entry(job.family, job.heads, job.dims, job.batch) for call in calls], samples)
    except Exception as error:  # out of memory, say
        return [{"family": job.family, "batch": job.batch, "what": job.part, "error": f"{type(error).__name__}: {error}"[:400]}]
    mean = window_mean([entry for entry in entries if entry["kernel"] == "published_replay"])
    return entries + ([mean] if mean else [])


def compile_and_check(jobs: Sequence[Job], quick: bool) -> list[dict[str, Any]]:
    """Compiles the kernels of a family's part in a process of its own each, all at once, into Triton's cache.

    Returns:
        The results of the checks, which the same processes make.
    """
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--compile_only", *(["--quick"] if quick else [])]
    command.append("--batches=" + ",".join(str(batch) for batch in sorted({job.batch for job in jobs})))
    with tempfile.TemporaryDirectory() as scratch:
        processes = {}
        for family, part in dict.fromkeys((job.family, job.part) for job in jobs):
            out = pathlib.Path(scratch) / f"{family}_{part}.json"
            processes[out] = subprocess.Popen([*command, f"--families={family}", f"--parts={part}", f"--out={out}"])
        results: list[dict[str, Any]] = []
        for out, process in processes.items():
            code = process.wait()
            died = {"family": out.stem, "error": f"the process ended with {code}", "sound": False}
            results += json.loads(out.read_text()) if out.exists() else [died]
    return results


def compile_job(job: Job) -> None:
    """Launches everything of a job once."""
    import torch

    for call in calls_of(job, (0,)):
        try:
            call.run()
        except Exception as error:  # the measuring process meets and records it
            print(f"  {job}: {type(error).__name__}: {error}"[:300], flush=True)
    torch.cuda.synchronize()


def checks(jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """The checks of every family's part that a run times."""
    for family, heads, dims, part in dict.fromkeys((job.family, job.heads, job.dims, job.part) for job in jobs):
        for result in peers_checks.run_checks(family, heads, dims, part, VERIFY_TOKENS):
            figure = result.get("error") or f"{result['check']}: {result['relative_error']:.1e}"
            print(f"  {'' if result['sound'] else 'WRONG '}{family} {heads[0]} heads, {figure}", flush=True)
            yield result


def versions() -> dict[str, str]:
    """Of PyTorch, Triton, the driver's CUDA and the two engines."""
    import torch
    import triton

    engines = json.loads((ROOT / ".peers" / "versions.json").read_text())
    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda or "", **engines}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("peers.json"), help="results")
    parser.add_argument("--quick", action="store_true", help="headline shapes, batches 8 and 256, three numbers of records")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(GEOMETRIES))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--batches", type=numbers, help=f"default {','.join(str(batch) for batch in BATCHES)}")
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--compile_only", action="store_true", help="launch everything once, time nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.families if name not in GEOMETRIES] + [p for p in options.parts if p not in PARTS]
    if unknown:
        parser.error(f"{unknown=}; families are {', '.join(GEOMETRIES)}, parts are {', '.join(PARTS)}")
    options.batches = options.batches or ((8, 256) if options.quick else BATCHES)
    return options


def main() -> None:
    options = parse()
    jobs = plan(options.families, options.batches, options.parts, options.quick)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", flush=True)

    if not (ROOT / ".peers" / "versions.json").exists():
        sys.exit(".peers/ is not there: run python benchmarks/fetch_peers.py on a machine with a network")
    sys.path.insert(0, str(ROOT / ".peers"))
    checked = [] if options.compile_only else compile_and_check(jobs, options.quick)
    import torch

    if not hasattr(torch.accelerator, "device_index"):
        torch.accelerator.device_index = torch.cuda.device
    if options.compile_only:
        for job in jobs:
            compile_job(job)
            torch.cuda.empty_cache()
        options.out.write_text(json.dumps(list(checks(jobs))))
        return
    say(f"compiled; {sum(check['sound'] for check in checked)} of {len(checked)} checks are sound")
    results: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])}
    results |= {"device": torch.cuda.get_device_name(), "versions": versions(), "date": datetime.date.today().isoformat()}
    results |= {"ceiling": ceiling(), "notes": NOTES, "sources": SOURCES, "checks": checked, "measurements": []}
    say(f"{results['device']}: {results['ceiling']}")
    for job in jobs:
        entries = run_job(job, records_of(job, options.quick), options.samples)
        torch.cuda.empty_cache()
        results["measurements"] += entries
        options.out.write_text(json.dumps(results, indent=1))
        say(f"{job}: " + ", ".join(summary(entry) for entry in entries if shown(entry)))


def shown(entry: dict[str, Any]) -> bool:
    """Whether a progress line shows an entry: errors and everything but the steps between the ends of a window."""
    return "error" in entry or entry["what"] != "step" or entry["flush"] or entry["records"] == 0


def summary(entry: dict[str, Any]) -> str:
    """A few words on an entry."""
    name = entry.get("kernel", "")[:9] + (f" T={entry['tokens']}" if entry.get("tokens", 1) > 1 else "")
    name += (" mean" if entry["what"] == "step_mean" else "") + (" flush" if entry.get("flush") else "")
    return f"{name} {entry['error'][:80] if 'error' in entry else entry['us']}"


if __name__ == "__main__":
    main()
