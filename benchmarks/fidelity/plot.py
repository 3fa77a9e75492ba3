"""Draws KL divergence against position from results of ``benchmarks.fidelity``; puts several together.

python -m benchmarks.fidelity.plot RESULTS.json [MORE.json ...] [--out=MERGED.json]
"""

import argparse
import json
import pathlib
from typing import Any

FAMILIES = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2", "kda": "Kimi Delta Attention"}
TEXTS = {"held_out": "held-out text", "generated": "the float32 model's own text"}
# Okabe and Ito's palette; read-out copies are solid, checkpoints of 16 bits dashed, what the library does not offer dotted
STYLES = {
    "fp32, raw records": ("#999999", "-"),
    "fp16 nearest": ("#56B4E9", "--"),
    "fp16 stochastic": ("#0072B2", "--"),
    "bf16 nearest": ("#E69F00", "--"),
    "bf16 read-out": ("#E69F00", "-"),
    "fp8 read-out": ("#009E73", "-"),
    "nvfp4 read-out": ("#0072B2", "-"),
    "nvfp4 read-out, fp16 stochastic": ("#56B4E9", "-"),
    "shared fp8": ("#CC79A7", ":"),
    "shared nvfp4": ("#D55E00", ":"),
    "bf16 updates": ("#000000", ":"),
}


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """One panel per text and family that were measured, a line per variant, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    order = list(STYLES)
    entries = sorted(result["measurements"], key=lambda entry: order.index(entry["variant"]))
    measured = {(entry["family"], entry["text"]) for entry in entries}
    pairs = [(family, text) for text in TEXTS for family in FAMILIES if (family, text) in measured]
    columns = -(-len(pairs) // 2)
    rows = -(-len(pairs) // columns)
    size: dict[str, Any] = {"figsize": (1 + 4.4 * columns, 1.2 + 3.6 * rows), "layout": "constrained"}
    figure, panels = plt.subplots(rows, columns, squeeze=False, sharey=True, **size)
    for axes in panels.flat[len(pairs) :]:
        axes.set_visible(False)
    for axes, (family, text) in zip(panels.flat, pairs, strict=False):
        for entry in entries:
            if (entry["family"], entry["text"]) == (family, text):
                draw_line(axes, entry, result["bin"])
        axes.set(yscale="log", title=f"{FAMILIES[family]}, {TEXTS[text]}", xlabel="position [1,024 tokens]")
        axes.grid(alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("KL divergence from fp32 [nats]")
    lines = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    named = {label: lines[label] for label in order if label in lines}
    columns = max(2, min(4, columns + 1))
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    figure.savefig(path)
    plt.close(figure)


def draw_line(axes: Any, entry: dict[str, Any], bin_width: int) -> None:
    colour, dashes = STYLES[entry["variant"]]
    middles = [(number + 0.5) * bin_width / 1024 for number in range(len(entry["kl_by_bin"]))]
    # a logarithm has no place for a divergence of nothing
    values = [max(value, 1e-14) for value in entry["kl_by_bin"]]
    # the copy alone lies wide beneath the copy with a checkpoint of 16 bits: they coincide
    width = 3.2 if entry["variant"] == "nvfp4 read-out" else 1.3
    axes.plot(middles, values, color=colour, linestyle=dashes, label=entry["variant"], linewidth=width)


def headline(result: dict[str, Any]) -> dict[str, float]:
    """KL over the last positions of the held-out text, by family and variant: ``gdn_kl_shared_nvfp4`` and the like."""
    names = {"shared nvfp4": "shared_nvfp4", "nvfp4 read-out": "readout_nvfp4", "fp16 stochastic": "fp16_stochastic"}
    return {
        f"{entry['family']}_kl_{names[entry['variant']]}": entry["kl_last"]
        for entry in result["measurements"]
        if entry["text"] == "held_out" and entry["variant"] in names
    }


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of the measurements of several, which must agree in how they were made.

    Raises:
        ValueError: they differ in device, versions, dtype, interval of folds or bin.
    """
    first = results[0]
    for key in ("device", "versions", "dtype", "fold_every", "bin"):
        if any(result[key] != first[key] for result in results):
            raise ValueError(f"results differ in {key}: {[result[key] for result in results]}")
    commands = "; ".join(result["command"] for result in results)
    return first | {"command": commands, "measurements": [entry for result in results for entry in result["measurements"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="where to write them together, if anywhere")
    options = parser.parse_args()
    result = merge([json.loads(path.read_text()) for path in options.results])
    out = options.out or options.results[0]
    if options.out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, out.with_suffix(".svg"))
    for name, value in headline(result).items():
        print(f"{name:32s} {value:.3e}")


if __name__ == "__main__":
    main()
