"""Serves requests through the engine: tokens per second and time of a round, on the GPU kernels and on XLA.

    python benchmarks/serving.py --out FILE.json [--models demo,qwen3_5,kimi_linear,nemotron_h] [--slots 128] [--requests 256]
    JAX_PLATFORMS=cpu python benchmarks/serving.py --out FILE.json --models demo --implementations xla --slots 8 --requests 16

"demo" is the demo model in float32 on a passage that repeats itself, token by token and with drafts looked up in the text; all
texts must be equal. The others have random weights in bfloat16, four layers and the head geometry of a published model
(``sharded.CONFIGS``), and answer random prompts of random length, token by token: what they say means nothing, what it costs
does. A round's time is that of the device's loop with every slot busy, a step or a verify of the whole model; tokens per
second are of the engine, which admits, reads prompts in pieces and hands out tokens meanwhile. Both are wall clock, after all
programs are compiled.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.sharded import build  # noqa: E402
from benchmarks.turns import measure_all, write  # noqa: E402
from replayssm_jax.decoding import Drafter, Engine, PromptLookup, SamplingParams  # noqa: E402
from replayssm_jax.models import from_pretrained  # noqa: E402

DEMO = ROOT / "examples" / "demo_model"
PASSAGE = (
    "And Seth lived an hundred and five years, and begat Enos: And Seth lived after he begat Enos eight hundred and seven "
    "years, and begat sons and daughters: And all the days of Seth were nine hundred and twelve years: and he died.\n"
    "And Enos lived ninety years, and begat Cainan: And Enos lived after he begat Cainan eight hundred and fifteen years, "
    "and begat sons and daughters: "
)
MAX_PROMPT, MAX_ANSWER, ROUNDS, BURSTS, DRAFTS = 512, 256, 32, 3, 4


@dataclasses.dataclass(frozen=True)
class Job:
    """An engine to measure, and how many requests it serves."""

    family: str
    implementation: str
    drafts: int
    slots: int
    count: int

    def __str__(self) -> str:
        return f"{self.family} {self.implementation}, {self.drafts} drafts"

    def drafter(self) -> Drafter:
        return PromptLookup(self.drafts) if self.drafts else Drafter()

    def load(self) -> tuple[Any, list[tuple[list[int], int]]]:
        """The model, and requests as (prompt, most tokens of the answer): the same for every job of the family."""
        if self.family == "demo":
            text = list(PASSAGE.encode())
            return from_pretrained(DEMO), [(text[i % 150 :], MAX_ANSWER) for i in range(self.count)]
        rng, model = np.random.default_rng(0), build(self.family, tiny=False, dtype="bfloat16")
        sizes, counts = (rng.integers(1, most + 1, self.count).tolist() for most in (MAX_PROMPT, MAX_ANSWER))
        return model, [
            (rng.integers(0, model.config.vocab_size, size).tolist(), n) for size, n in zip(sizes, counts, strict=True)
        ]


class Subject:
    """A job's model and requests, its programs compiled."""

    def __init__(self, job: Job):
        self.job, (self.model, self.requests) = job, job.load()
        self.max_length = max(len(prompt) + count for prompt, count in self.requests) + ROUNDS
        begin = time.perf_counter()
        self.busy = self.fill()
        self.compile_seconds = time.perf_counter() - begin

    def engine(self) -> Engine:
        slots = self.job.slots
        sizes = {"num_slots": slots, "max_length": self.max_length, "prefill_chunk": 256, "prefill_rows": min(8, slots)}
        options: dict[str, Any] = {**sizes, "implementation": self.job.implementation, "rounds_per_step": ROUNDS}
        return Engine(self.model, drafter=self.job.drafter(), **options)

    def fill(self) -> Engine:
        """An engine with every slot in the middle of a long answer."""
        engine = self.engine()
        for i in range(self.job.slots):
            prompt, _ = self.requests[i % len(self.requests)]
            engine.submit(prompt[:64], SamplingParams(max_tokens=self.max_length - 64))
        while engine.queues or engine.pool.unread.any():
            engine.step(0)
        engine.step(1)
        return engine

    def rounds(self) -> dict[str, float]:
        """Of the device's loop with every slot busy: milliseconds of a round, the median of a few bursts, and its tokens."""
        times = []
        for _ in range(BURSTS):
            before, started = self.counts().rounds.max(), time.perf_counter()
            self.busy.pool.decode(ROUNDS, self.job.slots)
            if (done := self.counts().rounds.max() - before) == 0:
                raise RuntimeError("a slot is full: answers are too short for so many bursts of rounds")
            times.append((time.perf_counter() - started) / done * 1e3)
        counts = self.counts()
        tokens = 1 + counts.accepted.sum() / counts.rounds.sum()
        return {"ms_per_round": round(statistics.median(times), 4), "tokens_per_round": round(float(tokens), 3)}

    def counts(self) -> Any:
        return jax.device_get(self.busy.pool.sequences.counts)

    def serve(self) -> dict[str, Any]:
        """What serving all requests took, and a digest of the answers."""
        engine = self.engine()
        requests = [engine.submit(prompt, SamplingParams(max_tokens=count)) for prompt, count in self.requests]
        started = time.perf_counter()
        engine.run()
        seconds = time.perf_counter() - started
        if failed := [request for request in requests if request.error is not None]:
            raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0].error}")
        answers = [list(request.tokens) for request in requests]
        tokens = sum(map(len, answers))
        return {
            "seconds": round(seconds, 3),
            "prompt_tokens": sum(len(prompt) for prompt, _ in self.requests),
            "answer_tokens": tokens,
            "answer_tokens_per_second": round(tokens / seconds),
            "answers_sha256": hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16],
        }


def measure(job: Job, subject: Subject) -> tuple[list[dict[str, Any]], str]:
    """The entry of a job, and a line that says it."""
    layers = len(subject.busy.pool.sequences.cache.layers)
    entry = {**dataclasses.asdict(job), "layers": layers, **subject.rounds(), **subject.serve()}
    entry["compile_seconds"] = round(subject.compile_seconds, 1)
    line = "{ms_per_round} ms per round, {tokens_per_round} tokens per round, {answer_tokens_per_second} tokens per second"
    return [entry], line.format(**entry)


def plan(options: argparse.Namespace) -> list[Job]:
    drafts = {"demo": (0, DRAFTS)}
    return [
        Job(family, implementation, count, options.slots, options.requests)
        for family in options.models
        for implementation in options.implementations
        for count in drafts.get(family, (0,))
    ]


def main() -> int:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("serving.json"), help="results")
    parser.add_argument("--models", type=names, default=["demo", "qwen3_5", "kimi_linear", "nemotron_h"])
    parser.add_argument("--implementations", type=names, default=["pallas", "xla"])
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--processes", type=int, default=10)
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    entries = measure_all(plan(options), Subject, measure, options.processes, apart=True)
    texts = {entry["answers_sha256"] for entry in entries if entry["family"] == "demo" and "error" not in entry}
    note = f"wall clock; random weights but for the demo model, whose runs gave {len(texts)} different answers"
    write(options.out, [note], entries)
    return int(len(texts) > 1 or not entries or any("error" in entry for entry in entries))


if __name__ == "__main__":
    raise SystemExit(main())
