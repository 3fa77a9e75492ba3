"""Writes benchmarks/results/summary.json, the headline figures, from the files that hold their samples.

python benchmarks/summary.py
"""

import json
import math
import pathlib
import re
import sys
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.fidelity.plot import headline  # noqa: E402
from benchmarks.kernels import RECURRENCES  # noqa: E402
from benchmarks.plots import HEADLINE, RAW_BY_DEFAULT, RESULTS, best, select, time_of, with_raw_records  # noqa: E402

SOURCE, READOUTS, FIDELITY = "kernels_h200.json", "readouts_h200.json", "fidelity_h200.json"
Entry = dict[str, Any]


def last_before_flush(entries: list[Entry], flush: bool = False, **wanted: Any) -> float | None:
    """Time [us] of a verify with the most records that were measured, of ordinary rows or of rows that flush."""
    matching = select(entries, what="verify", flush=flush, **wanted)
    return time_of(max(matching, key=lambda entry: entry["records"])) if matching else None


def floor_of(results: Entry, heads: list[int], dims: list[int]) -> float:
    """Time [us] to read the float32 checkpoints of a batch of 256 once."""
    return 4 * heads[0] * math.prod(dims) * 256 / (results["ceiling"]["read_tb_s"] * 1e6)


def figures(results: Entry) -> dict[str, float]:
    """Every headline figure that the results hold, by name."""
    entries: list[Entry] = results["measurements"]
    found: dict[str, float] = {}
    for family, heads in HEADLINE.items():
        shape: Entry = {"family": family, "heads": heads}
        ours: Entry = shape | {"kernel": "pallas"}
        dims = next(entry["dims"] for entry in select(entries, **ours))
        floor = floor_of(results, heads, dims)
        mean = best(entries, **ours, batch=256, what="step_mean")
        against = {
            "step_mean_speedup_vs_recurrent": best(entries, **shape, batch=256, kernel="recurrent", what="step"),
            "step_mean_speedup_vs_published_replay": best(
                entries, **shape, batch=256, kernel="published_replay", what="step_mean"
            ),
        }
        ratios = {name: time / mean for name, time in against.items() if time and mean}
        if mean:
            ratios["step_mean_over_floor"] = mean / floor
        for tokens in (5, 9):
            for suffix, flush in (("", False), ("_flush", True)):
                time = last_before_flush(entries, flush, **ours, batch=256, tokens=tokens)
                if time:
                    ratios[f"verify{tokens}{suffix}_over_floor"] = time / floor
        for batch, name, inverse in ((1, "step_b1_over_recurrent", False), (512, "step_b512_speedup_vs_recurrent", True)):
            own = best(entries, **ours, batch=batch, what="step_mean")
            recurrent = best(entries, **shape, batch=batch, kernel="recurrent", what="step")
            if own and recurrent:
                ratios[name] = recurrent / own if inverse else own / recurrent
        found |= {f"{family}_{name}": round(value, 3) for name, value in ratios.items()}
    return found


def ordinary_mean(entries: list[Entry]) -> float:
    """Mean time [us] of a window's ordinary steps, of 1 to 14 records, interpolated where not measured."""
    times = {entry["records"]: entry["us"] for entry in entries if not entry["flush"]}
    return float(np.interp(range(1, 15), sorted(times), [times[records] for records in sorted(times)]).mean())


def readout_figures(results: Entry) -> dict[str, float]:
    """Speed-ups of ordinary steps, and of a window's mean, that read a copy over those that read the float32 checkpoint."""
    entries: list[Entry] = results["measurements"]
    found: dict[str, float] = {}
    for family in HEADLINE:
        own = select(entries, family=family, batch=256)

        def time(readout: str, own: list[Entry] = own) -> tuple[float, float]:
            steps = ordinary_mean(select(own, readout=readout, what="step"))
            return steps, select(own, readout=readout, what="step_mean")[0]["us"]

        for readout in ("bf16", "bf16_plane", "fp8_e4m3", "nvfp4"):
            name = f"{family}_readout_{readout.removesuffix('_e4m3')}"
            for suffix, base, ours in zip(("speedup", "mean_speedup"), time("checkpoint"), time(readout), strict=True):
                found[f"{name}_{suffix}"] = round(base / ours, 3)
    return found


def raw_figures(results: Entry, readouts: Entry) -> dict[str, float]:
    """Headline figures of verifies with raw records, of the families that have the choice."""
    families = [family for family in HEADLINE if RECURRENCES[family][0]]
    found = figures(with_raw_records(results, readouts, families))
    return {name: value for name, value in found.items() if "_verify" in name and name.split("_")[0] in families}


def describe(found: dict[str, float], unit: str, results: Entry, source: str) -> dict[str, Entry]:
    about = {"unit": unit, "device": results["device"], "date": results["date"], "source": f"benchmarks/results/{source}"}
    return {name: {"value": value, **about} for name, value in found.items()}


def main() -> None:
    results = json.loads((RESULTS / SOURCE).read_text())
    summary = describe(figures(results), "ratio", results, SOURCE)
    if (RESULTS / READOUTS).exists():
        readouts = json.loads((RESULTS / READOUTS).read_text())
        summary |= describe(readout_figures(readouts), "ratio", readouts, READOUTS)
        for name, entry in describe(raw_figures(results, readouts), "ratio", readouts, READOUTS).items():
            if name.split("_")[0] in RAW_BY_DEFAULT:  # the other kind goes under a name of its own
                summary[re.sub(r"verify\d+", r"\g<0>_updates", name)] = summary[name]
                summary[name] = entry
            else:
                summary[re.sub(r"verify\d+", r"\g<0>_raw", name)] = entry
    if (RESULTS / FIDELITY).exists():
        results = json.loads((RESULTS / FIDELITY).read_text())
        divergences = {f"{name}_128k": float(f"{value:.4g}") for name, value in headline(results).items()}
        summary |= describe(divergences, "nats", results, FIDELITY)
    (RESULTS / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for name, entry in summary.items():
        print(f"{name:45s} {entry['value']:.4g}")


if __name__ == "__main__":
    main()
