"""Measures KL divergence against a float32 checkpoint by position, for every variant, and writes and draws it.

    python -m benchmarks.fidelity --out=benchmarks/results/fidelity_h200.json [--families=gdn,mamba2,kda] [--tokens=131072]
        [--sequences=4] [--texts=held_out,generated] [--generated=16384] [--weights=.runs/fidelity] [--dtype=float32]

Weights come from ``benchmarks.fidelity.train``. Activations are float32 unless --dtype says otherwise, so that what is seen is
the state's rounding and not an activation's. The figure lies beside --out. ``plot`` puts the results of several runs together.
Texts of one length (--generated as large as --tokens) are read in one batch, at little more than the cost of one.
"""

import argparse
import concurrent.futures
import datetime
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.fidelity import measure
from benchmarks.fidelity.models import FAMILIES, load_model, read_text
from benchmarks.fidelity.plot import draw
from benchmarks.fidelity.variants import BASE, VARIANTS, Variant
from replayssm_jax.models.decoder import Decoder


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    chosen = [v for v in VARIANTS if not options.variants or v.name in options.variants.split(",")]
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.fidelity", *(sys.argv[1:] if arguments is None else arguments)]),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "date": datetime.date.today().isoformat(),
        "dtype": options.dtype,
        "fold_every": options.drafts,
        "bin": options.bin,
        "measurements": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for family in options.families.split(","):
        for measured in measure_family(family, chosen, options):
            result["measurements"].append(measured)
            # after every variant, so that a run that is stopped leaves what it has
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, options.out.with_suffix(".svg"))
    print(f"{options.out} and {options.out.with_suffix('.svg')} written")


def measure_family(family: str, chosen: list[Variant], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry per text and variant."""
    begin = time.monotonic()

    def done(what: str) -> None:
        print(f"  {family} {time.monotonic() - begin:6.1f} s  {what}", flush=True)

    model = load_model(options.weights / f"{family}.safetensors", options.dtype)
    chosen = [variant for variant in chosen if family != "mamba2" or not variant.delta_rule]
    groups = read_together(options)
    rows = options.sequences * len(groups[0])
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        # compilation is most of a short run, and leaves Python's lock alone; texts are written meanwhile
        runs = pool.map(lambda v: measure.compile_piece(model, v, rows, options.piece, options.drafts), (BASE, *chosen))
        texts = {name: make_text(model, name, options, done) for group in groups for name in group}
        compiled = dict(zip((BASE, *chosen), runs, strict=True))
    done(f"{len(compiled)} variants compiled")
    for group in groups:
        tokens = np.concatenate([texts[name] for name in group])
        done(f"{', '.join(group)}: {tokens.shape[0]} sequences of {tokens.shape[1]:,} tokens")
        for variant, kl, other in measure.compare(model, compiled, tokens, options.piece, options.drafts, done):
            by_text = zip(group, np.split(kl, len(group)), np.split(other, len(group)), strict=True)
            for name, own_kl, own_other in by_text:
                yield entry(family, name, variant, own_kl, own_other, options)


def read_together(options: argparse.Namespace) -> list[list[str]]:
    """The texts in groups of one size: in one batch if they are as long as each other, else each alone.

    A variant's time is that of its steps one after another; twice the rows cost little.
    """
    names = options.texts.split(",")
    return [names] if options.generated == options.tokens else [[name] for name in names]


def make_text(model: Decoder, name: str, options: argparse.Namespace, done: Callable[[str], None]) -> np.ndarray:
    """The tokens of a text. [sequences, tokens or generated] int32"""
    _, held_out = read_text(options.text, options.held_out)
    read = measure.take_sequences(held_out, options.sequences, options.tokens)
    if name == "held_out":
        return read
    prompts = read[:, : measure.PROMPT]
    count = options.generated - prompts.shape[1]
    return measure.generate(model, prompts, count, seed=0, piece=options.piece, done=done)


def entry(
    family: str, text: str, variant: str, kl: np.ndarray, other: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """What a JSON file keeps of KL [B, N] and of other likeliest tokens [B, N]: means over sequences and bins of positions."""
    bins = kl.reshape(kl.shape[0], -1, options.bin)
    return {
        "family": family,
        "text": text,
        "variant": variant,
        "sequences": kl.shape[0],
        "tokens": kl.shape[1],
        "kl_mean": float(kl.mean()),
        "kl_last": float(kl[:, -options.last :].mean()),
        "kl_last_of_sequences": [float(x) for x in kl[:, -options.last :].mean(axis=1)],
        "other_likeliest_last": float(other[:, -options.last :].mean()),
        "kl_by_bin": [float(f"{x:.4g}") for x in bins.mean(axis=(0, 2))],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fidelity.json"), help="results")
    parser.add_argument("--weights", type=pathlib.Path, default=pathlib.Path(".runs/fidelity"), help="folder of the models")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--variants", default="", help="names, separated by commas; all if empty")
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path(".data/kjv.txt"))
    parser.add_argument("--held_out", type=float, default=0.15, help="share of the text, as in training")
    parser.add_argument("--tokens", type=int, default=131072, help="of a held-out sequence")
    parser.add_argument("--generated", type=int, default=16384, help="of a generated sequence, its prompt included")
    parser.add_argument("--texts", default="held_out,generated", help="what is read, in this order")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--drafts", type=int, default=16, help="tokens of a verify; a checkpoint is rounded after as many")
    parser.add_argument("--piece", type=int, default=4096, help="tokens of a compiled loop")
    parser.add_argument("--bin", type=int, default=1024, help="positions of a reported mean")
    parser.add_argument("--last", type=int, default=8192, help="positions of the reported end")
    parser.add_argument("--dtype", default="float32", help="of activations")
    parser.add_argument("--threads", type=int, default=12, help="that compile")
    options = parser.parse_args(arguments)
    for name in ("tokens", "generated"):
        if getattr(options, name) % options.piece or getattr(options, name) % options.bin:
            parser.error(f"--{name}={getattr(options, name)} must be a multiple of --piece and --bin")
    if unknown := set(options.texts.split(",")) - {"held_out", "generated"}:
        parser.error(f"--texts names {', '.join(sorted(unknown))}; there are held_out and generated")
    if "generated" in options.texts.split(",") and options.generated <= measure.PROMPT:
        parser.error(f"--generated={options.generated} must be more than the prompt's {measure.PROMPT} tokens")
    if options.piece % options.drafts:
        parser.error(f"--piece={options.piece} must be a multiple of --drafts={options.drafts}")
    return options


if __name__ == "__main__":
    main()
