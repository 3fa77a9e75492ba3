"""Device time of calls, bandwidth of the device, and the JSON entries that hold them.

Two figures a call: ``us`` is the period of the call inside a replayed CUDA graph (what a decode loop sees, gaps between kernels
included), ``kernel_us`` the sum of its kernels' durations on the profiler's timeline (gaps left out).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

WINDOW = 16  # records that a ring holds: an ordinary step finds 0..14 of them, the flush 15
GRAPH_US = 1000.0  # device time that one replayed graph should hold


@dataclasses.dataclass(frozen=True)
class Call:
    """One thing to time; ``run`` launches it once and may be repeated."""

    kernel: str  # recurrent, published_replay or snapshots
    what: str  # step or verify
    run: Callable[[], Any]
    tokens: int = 1
    records: int = 0
    flush: bool = False
    variant: str = ""  # where one thing is published in two ways
    error: str = ""  # why it cannot run

    def entry(self, family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int) -> dict[str, Any]:
        """The entry's key: everything but the figures."""
        key: dict[str, Any] = {"family": family, "heads": list(heads), "dims": list(dims), "batch": batch}
        key |= {"kernel": self.kernel, "what": self.what, "tokens": self.tokens, "records": self.records, "flush": self.flush}
        return key | ({"variant": self.variant} if self.variant else {})


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value at a fraction of the sorted ones, between neighbours linearly."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def figures(times: Sequence[float], name: str = "us") -> dict[str, Any]:
    """Median of the times [us] under ``name``; for ``us`` also how many there were and their 10th and 90th percentile."""
    result: dict[str, Any] = {name: round(percentile(times, 0.5), 3)}
    if name == "us":
        spread = [round(percentile(times, fraction), 3) for fraction in (0.1, 0.9)]
        result |= {"samples": len(times), "spread_us": spread}
    return result


def window_mean(entries: Sequence[dict[str, Any]], window: int = WINDOW) -> dict[str, Any] | None:
    """The mean step over a window: ``window - 1`` ordinary steps, at 0..window-2 records, and one flush.

    Records that were not measured are interpolated between measured neighbours.

    Args:
        entries: measurements of one family, shape, batch and kernel.

    Returns:
        An entry of ``what = "step_mean"``, or None where the flush or both ends of the window are missing.
    """
    steps = [entry for entry in entries if entry["what"] == "step" and "us" in entry]
    flushes = [entry for entry in steps if entry["flush"]]
    ordinary = {entry["records"]: entry for entry in steps if not entry["flush"]}
    if not flushes or 0 not in ordinary or window - 2 not in ordinary:
        return None
    mean = {name: flushes[0][name] for name in flushes[0] if name not in ("records", "flush", "samples", "spread_us", "error")}
    mean |= {"what": "step_mean", "window": window, "of": f"{window - 1} ordinary steps and one flush"}
    mean["measured_records"] = sorted(ordinary)
    mean["samples"] = sum(entry["samples"] for entry in [*ordinary.values(), *flushes])
    for name in ("us", "kernel_us"):
        if all(name in entry for entry in [*ordinary.values(), *flushes]):
            total = sum(_between(ordinary, records, name) for records in range(window - 1)) + flushes[0][name]
            mean[name] = round(total / window, 3)
    return mean


def _between(ordinary: dict[int, dict[str, Any]], records: int, name: str) -> float:
    below = max(known for known in ordinary if known <= records)
    above = min(known for known in ordinary if known >= records)
    share = (records - below) / max(above - below, 1)
    return (1 - share) * ordinary[below][name] + share * ordinary[above][name]


def graph_times(run: Callable[[], Any], samples: int) -> list[float]:
    """Device time [us] of a call, once per sample: a graph of several calls, replayed back to back between events."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        run()  # compiles
        start.record()
        for _ in range(4):
            run()
        stop.record()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    calls = max(1, min(64, round(GRAPH_US / max(start.elapsed_time(stop) * 1000 / 4, 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    for _ in range(2):
        graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1000 / calls for before, after in itertools.pairwise(marks)]


def kernel_times(runs: Sequence[Callable[[], Any]], repeats: int = 12) -> list[list[float]]:
    """Sums of kernel durations [us] of each call, from the profiler's timeline; calls are told apart by a spinning kernel."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for run in runs:
            for _ in range(repeats):
                run()
                torch.cuda._sleep(100)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    on_device.sort(key=lambda event: event.time_range.start)
    sums = [0.0]
    for event in on_device:
        if "spin_kernel" in event.name:
            sums.append(0.0)
        else:
            sums[-1] += event.time_range.elapsed_us()
    sums.pop()
    if len(sums) != len(runs) * repeats:
        raise RuntimeError(f"{len(sums)=} calls on the timeline; expected {len(runs) * repeats}")
    return [sums[first + 1 : first + repeats] for first in range(0, len(sums), repeats)]


def measure(calls: Sequence[Call], keys: Sequence[dict[str, Any]], samples: int) -> list[dict[str, Any]]:
    """Entries of all calls: their keys with figures. One that fails gets its error and no figures, and stops no other."""
    entries = [dict(key) for key in keys]
    for call, entry in zip(calls, entries, strict=True):
        if call.error:
            entry["error"] = call.error
            continue
        try:
            entry |= figures(graph_times(call.run, samples))
        except Exception as error:  # a peer's kernel may raise anything
            entry["error"] = f"{type(error).__name__}: {error}"[:400]
    sound = [index for index, entry in enumerate(entries) if "us" in entry]
    try:
        for index, times in zip(sound, kernel_times([calls[index].run for index in sound]), strict=True):
            entries[index] |= figures(times, "kernel_us")
    except Exception as error:  # without a profiler there is still the period
        for index in sound:
            entries[index]["kernel_error"] = f"{type(error).__name__}: {error}"[:200]
    return entries


def ceiling(gib: int = 4, samples: int = 20) -> dict[str, float]:
    """Bandwidth of the device [TB/s]: reading (the faster of two sums over ``gib`` GiB) and copying (read and written)."""
    import torch

    source = torch.ones(gib << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    rows = functools.partial(torch.sum, source.view(1 << 14, -1), dim=1)
    reads = (percentile(graph_times(read, samples), 0.5) for read in (rows, source.sum))
    copy = percentile(graph_times(lambda: target.copy_(source), samples), 0.5)
    return {"read_tb_s": round(size / min(reads) / 1e6, 4), "copy_tb_s": round(2 * size / copy / 1e6, 4)}
