"""Draws the figures of the GPU kernels from benchmarks/results/kernels_h200.json and readouts_h200.json.

    python benchmarks/plots.py [--results FILE.json] [--readouts FILE.json] [--out FOLDER]

speedup_h200.svg: speed-up over the recurrent kernel against batch, mean over a window, for the three families. verify_h200.svg:
time of a verification against its tokens at batch 256, beside snapshots, the published replay kernels and the time to read the
checkpoints once. readouts_h200.svg: time of an ordinary step against the records in its ring, for every copy that it may read.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
FAMILIES = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2", "kda": "Kimi Delta Attention"}
# [value heads, key heads] of the headline shapes
HEADLINE = {"gdn": [64, 16], "mamba2": [128, 8], "kda": [32, 32]}
RAW_BY_DEFAULT = ("kda",)  # families whose drafts are recorded raw unless a policy says otherwise
BATCH = 256
# Okabe and Ito's palette: told apart with any colour vision; ours is solid, theirs dashed
OURS, THEIRS, SNAPSHOTS, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"

Entry = dict[str, Any]


def with_raw_records(results: Entry, readouts: Entry, families: Sequence[str] = RAW_BY_DEFAULT) -> Entry:
    """Results whose verifies of some families, as a rule those of the default, are of raw records, which readouts.py times."""
    raw = [entry for entry in select(readouts["measurements"], readout="raw") if _is_verify_of(entry, families)]
    others = [entry for entry in results["measurements"] if not _is_verify_of(entry, families)]
    return results | {"measurements": others + raw}


def _is_verify_of(entry: Entry, families: Sequence[str]) -> bool:
    return entry.get("kernel") == "pallas" and entry.get("what") == "verify" and str(entry.get("family")) in families


def select(entries: Iterable[Entry], **wanted: Any) -> list[Entry]:
    """The entries with figures whose fields equal ``wanted``."""
    return [entry for entry in entries if "us" in entry and all(entry.get(name) == value for name, value in wanted.items())]


def time_of(entry: Entry) -> float:
    """Kernel time [us] where the timeline was recorded, the period of a replayed graph elsewhere."""
    return float(entry["kernel_us"] if "kernel_us" in entry else entry["us"])


def best(entries: Iterable[Entry], **wanted: Any) -> float | None:
    """The shortest time [us] of what matches: a thing published in two ways counts with the faster one."""
    return min((time_of(entry) for entry in select(entries, **wanted)), default=None)


def speedups(entries: list[Entry], family: str, kernel: str) -> list[tuple[int, float]]:
    """(batch, recurrent step / mean step of ``kernel``) of a family's headline shape, for the batches that have both."""
    shape: Entry = {"family": family, "heads": HEADLINE[family]}
    points = []
    for batch in sorted({entry["batch"] for entry in select(entries, **shape)}):
        recurrent = best(entries, **shape, batch=batch, kernel="recurrent", what="step")
        mean = best(entries, **shape, batch=batch, kernel=kernel, what="step_mean")
        if recurrent and mean:
            points.append((batch, recurrent / mean))
    return points


def verify_times(entries: list[Entry], family: str, kernel: str, flush: bool) -> list[tuple[int, float]]:
    """(tokens, time [us]) of verifications at the plot's batch; one token is an ordinary step with as many records."""
    shape: Entry = {"family": family, "heads": HEADLINE[family], "batch": BATCH, "kernel": kernel, "flush": flush}
    matching = select(entries, **shape, what="verify")
    # with as many records as were measured: an empty ring is read faster
    most = {entry["tokens"]: max(e["records"] for e in matching if e["tokens"] == entry["tokens"]) for entry in matching}
    points = [(tokens, best(matching, tokens=tokens, records=most[tokens])) for tokens in sorted(most)]
    return [(tokens, time) for tokens, time in points if time is not None]


def floor_us(results: Entry, family: str) -> float | None:
    """Time [us] to read a headline shape's float32 checkpoints once at the measured read bandwidth."""
    shapes = [entry["dims"] for entry in select(results["measurements"], family=family, heads=HEADLINE[family])]
    if not shapes or not results.get("ceiling", {}).get("read_tb_s"):
        return None
    size = BATCH * HEADLINE[family][0] * shapes[0][0] * shapes[0][1] * 4
    return size / results["ceiling"]["read_tb_s"] / 1e6


def _panels(results: Entry, title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "replayssm", "font.size": 9, "axes.titlesize": 10})
    figure, axes = plt.subplots(1, len(FAMILIES), figsize=(12.5, 4), sharey=True, layout="constrained")
    figure.suptitle(
        f"{title} ({results.get('device', 'unknown device')}, float32 checkpoints, bfloat16 activations)", fontsize=10
    )
    for axis, (family, name) in zip(axes, FAMILIES.items(), strict=True):
        heads = HEADLINE[family]
        axis.set_title(f"{name}, {heads[0]} heads" + (f" in {heads[1]} groups" if heads[0] != heads[1] else ""))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _curve(axis: Any, points: list[tuple[int, float]], color: str, style: str) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), style, color=color, linewidth=1.8, markersize=4.5)


def _on_white(text: Any) -> None:
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8})


def _names(axis: Any, names: list[tuple[float, float, str, str]], gap: float = 0.062) -> None:
    """Names right of the curves' ends, moved apart where they would touch.

    Args:
        names: (x, y, text, color) of each curve's last point.
        gap: least distance between two names, as a share of the axis.
    """
    to_axes = axis.transData + axis.transAxes.inverted()
    placed: list[list[Any]] = sorted(
        ([to_axes.transform((x, y)).tolist(), text, color] for x, y, text, color in names), key=lambda p: p[0][1]
    )
    for below, above in itertools.pairwise(placed):
        above[0][1] = max(above[0][1], below[0][1] + gap)
    for (x, y), text, color in placed:
        at = (x + 0.03, y)
        _on_white(axis.text(*at, text, color=color, fontsize=7.5, weight="bold", va="center", transform=axis.transAxes))


def draw_speedup(results: Entry) -> Any:
    """The figure of speed-up against batch."""
    figure, axes = _panels(results, "Decode step, mean over a window of 16: speed-up over the recurrent kernel")
    curves: dict[str, list[Any]] = {
        family: [
            (speedups(results["measurements"], family, "published_replay"), "published replay", THEIRS, "s--", -11),
            (speedups(results["measurements"], family, "pallas"), "this package", OURS, "o-", 7),
        ]
        for family in FAMILIES
    }
    for axis, family in zip(axes, FAMILIES, strict=True):
        batches = sorted({batch for points, *_ in curves[family] for batch, _ in points})
        curves[family] = [
            ([(batches.index(batch), value) for batch, value in points], *rest) for points, *rest in curves[family]
        ]
        axis.axhline(1, color=GREY, linewidth=1)
        for points, _, color, style, rise in curves[family]:
            _curve(axis, points, color, style)
            for at, value in points:
                place = {"textcoords": "offset points", "ha": "center", "color": color, "fontsize": 7}
                _on_white(axis.annotate(f"{value:.2f}", (at, value), (0, rise), **place))
        if batches:
            axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axis.set_xlim(-0.5, 1.5 * len(batches))
        axis.minorticks_off()
        axis.set_xlabel("batch")
        axis.margins(y=0.12)
    axes[0].set_ylabel("speed-up")
    figure.canvas.draw()  # fixes the axes, which the names are placed by
    for axis, family in zip(axes, FAMILIES, strict=True):
        ends = [(*points[-1], name, color) for points, name, color, *_ in curves[family] if points]
        _names(axis, [*ends, (ends[0][0], 1, "recurrent", GREY)] if ends else [])
    return figure


def draw_verify(results: Entry) -> Any:
    """The figure of verification time against tokens."""
    figure, axes = _panels(results, f"Verification at batch {BATCH}: kernel time")
    styles = [
        ("snapshots", False, "snapshots", SNAPSHOTS, "^:"),
        ("published_replay", True, "published, flush rows", THEIRS, "D--"),
        ("published_replay", False, "published replay", THEIRS, "s--"),
        ("pallas", True, "this package, flush rows", OURS, "D-"),
        ("pallas", False, "this package", OURS, "o-"),
    ]
    names = []
    for axis, family in zip(axes, FAMILIES, strict=True):
        floor, ticks = floor_us(results, family), set()
        if any(_is_verify_of(entry, [family]) and entry.get("readout") == "raw" for entry in results["measurements"]):
            axis.set_title(axis.get_title() + ", raw records")
        ends: list[tuple[float, float, str, str]] = []
        for kernel, flush, name, color, style in styles:
            points = verify_times(results["measurements"], family, kernel, flush)
            ticks |= {tokens for tokens, _ in points}
            _curve(axis, points, color, style)
            for at, value in points[:-1]:
                place = {"textcoords": "offset points", "ha": "right", "va": "center", "color": color, "fontsize": 7}
                _on_white(axis.annotate(f"{value:.0f}", (at, value), (-6, 0), **place))
            ends += [(*points[-1], f"{points[-1][1]:.0f}  {name}", color)] if points else []
        if floor and ticks:
            axis.axhline(floor, color=GREY, linewidth=1)
            ends.append((max(ticks), floor, f"{floor:.0f}  one read of the state", GREY))
        names.append(ends)
        axis.set_xticks(sorted(ticks))
        if ticks:
            axis.set_xlim(min(ticks) - 1.4, max(ticks) + 1.2 * (max(ticks) - min(ticks)) + 1)
        axis.set_xlabel("tokens verified (drafts + 1)")
        axis.set_yscale("log", base=2)
        axis.set_yticks([128, 256, 512, 1024, 2048], ["128", "256", "512", "1024", "2048"])
        axis.minorticks_off()
        axis.margins(y=0.08)
    axes[0].set_ylabel("microseconds")
    figure.canvas.draw()  # fixes the axes, which the names are placed by
    for axis, ends in zip(axes, names, strict=True):
        _names(axis, ends)
    return figure


def draw_readouts(results: Entry) -> Any:
    """The figure of an ordinary step's time against its records, for every copy."""
    figure, axes = _panels(results, f"Ordinary step at batch {BATCH}: time on the device of all that it launches")
    styles = {
        "checkpoint": ("float32 checkpoint", THEIRS, "s-"),
        "bf16": ("bfloat16 copy or plane", SNAPSHOTS, "^-"),
        "fp8_e4m3": ("FP8 copy", GREY, "D-"),
        "nvfp4": ("NVFP4 copy", OURS, "o-"),
    }
    names = []
    for axis, family in zip(axes, FAMILIES, strict=True):
        steps = select(results["measurements"], family=family, batch=BATCH, what="step", flush=False)
        ends: list[tuple[float, float, str, str]] = []
        for readout, (name, color, style) in styles.items():
            points = sorted((entry["records"], entry["us"]) for entry in select(steps, readout=readout))
            _curve(axis, points, color, style)
            ends += [(*points[-1], f"{points[-1][1]:.0f}  {name}", color)] if points else []
        names.append(ends)
        axis.set_xlim(0, 26)
        axis.set_xticks([1, 7, 14])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("records since the last flush")
    axes[0].set_ylabel("microseconds")
    figure.canvas.draw()  # fixes the axes, which the names are placed by
    for axis, ends in zip(axes, names, strict=True):
        _names(axis, ends)
    return figure


def draw(source: pathlib.Path, out: pathlib.Path, readouts: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Draws the figures of a results file, and of another of read-outs, into a folder.

    Returns:
        The files written.
    """
    from matplotlib import pyplot

    results = json.loads(source.read_text())
    measured = None if readouts is None else json.loads(readouts.read_text())
    verified = results if measured is None else with_raw_records(results, measured)
    figures = {"speedup_h200": draw_speedup(results), "verify_h200": draw_verify(verified)}
    if measured is not None:
        figures["readouts_h200"] = draw_readouts(measured)
    written = []
    for name, figure in figures.items():
        written.append(out / f"{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        pyplot.close(figure)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS / "kernels_h200.json")
    parser.add_argument("--readouts", type=pathlib.Path, default=RESULTS / "readouts_h200.json")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    for path in draw(options.results, options.out, options.readouts):
        print(path)


if __name__ == "__main__":
    main()
