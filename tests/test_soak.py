"""A long day of an engine: 2,000 requests of all kinds on the demo model, with faults, and no memory that grows."""

import dataclasses
import gc
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax.decoding import Engine, PromptLookup, SamplingParams, State, TooLongError, generate
from replayssm_jax.decoding.text import ByteTokenizer
from replayssm_jax.models import from_pretrained

pytestmark = [pytest.mark.long, pytest.mark.optimised]

REQUESTS, SLOTS, LONGEST = 2000, 32, 8
PHRASES = [
    "And it came to pass",
    "the LORD said unto Moses, saying, ",
    "In those days ",
    "x",
    "begat sons and daughters; and he died: ",
]


@pytest.fixture(scope="module")
def demo():
    return from_pretrained(pathlib.Path(__file__).parent.parent / "examples" / "demo_model")


@pytest.fixture(scope="module")
def solo(demo):
    """Greedy answers of all texts, token by token."""
    answers = generate(demo, TEXTS, SamplingParams(max_tokens=LONGEST), tokenizer=ByteTokenizer(256))
    return {text: answer.tokens for text, answer in zip(TEXTS, answers, strict=True)}


TEXTS = [phrase[:cut] for phrase in PHRASES for cut in (1, 7, 25)]


class Day:
    """Orders at random, and what each of them should come to."""

    def __init__(self, engine: Engine, rng: np.random.Generator):
        self.engine, self.rng = engine, rng
        self.requests: list = []
        self.spoiled: set[int] = set()

    def order(self) -> None:
        text, count = TEXTS[int(self.rng.integers(len(TEXTS)))], int(self.rng.integers(1, LONGEST + 1))
        what = self.rng.random()
        if what < 0.03:
            with pytest.raises((TooLongError, ValueError)):
                self.engine.submit(*(("", None) if what < 0.015 else (text, SamplingParams(max_tokens=10_000))))
        elif what < 0.08 and self.engine.requests:
            parent = self.engine.requests[int(self.rng.integers(len(self.engine.requests)))]
            self.requests.append(self.engine.fork(parent))
        else:
            params = SamplingParams(max_tokens=count, temperature=float(what > 0.85), seed=count)
            self.requests.append(self.engine.submit(text, params, priority=int(what * 100) % 3))

    def disturb(self) -> None:
        what = self.rng.random()
        running = [request for request in self.engine.slots if request is not None]
        if not running or what > 0.3:
            return
        request = running[int(self.rng.integers(len(running)))]
        if what < 0.08:
            request.cancel()
        elif what < 0.16:
            self.engine.pause(request)
            self.engine.resume(request)
        elif what < 0.2:
            self._spoil(request)

    def _spoil(self, request) -> None:
        """A fault of the hardware: a slot's states are NaN from now on."""
        if request.followers:
            return
        slot, sequences = self.engine.slot_of(request), self.engine.pool.sequences
        layers = jax.tree.map(lambda x: x.at[slot].set(jnp.nan) if x.ndim == 4 else x, sequences.cache.layers)
        self.engine.pool.sequences = dataclasses.replace(sequences, cache=dataclasses.replace(sequences.cache, layers=layers))
        self.spoiled.add(request.number)

    def check(self, solo) -> dict[State, int]:
        counts = dict.fromkeys(State, 0)
        for request in self.requests:
            counts[request.state] += 1
            text = bytes(request.prompt).decode()
            if request.number in self.spoiled:
                assert request.state is State.FAILED, request
                assert "not finite" in request.error
            elif request.state is State.FAILED:
                # a fork of a spoiled slot has inherited its states
                assert self.spoiled, request
            else:
                assert request.state in (State.FINISHED, State.CANCELLED)
                if request.params.temperature == 0:
                    assert tuple(request.tokens) == solo[text][: len(request.tokens)]
                if request.state is State.FINISHED:
                    assert len(request.tokens) == request.params.max_tokens
        return counts


def test_two_thousand_requests(demo, solo, rng):
    engine = Engine(
        demo,
        drafter=PromptLookup(3),
        tokenizer=ByteTokenizer(256),
        num_slots=SLOTS,
        max_length=64,
        prefill_chunk=32,
        prefill_rows=16,
        rounds_per_step=3,
    )
    engine.add_prefix(PHRASES[1][:20])
    day, arrays = Day(engine, rng), []
    while len(day.requests) < REQUESTS:
        for _ in range(int(rng.integers(0, 24))):
            day.order()
        day.disturb()
        engine.step()
        if not len(engine.requests):
            gc.collect()
            arrays.append(len(jax.live_arrays()))
        elif len(engine.requests) > 3 * SLOTS:
            engine.run()
            gc.collect()
            arrays.append(len(jax.live_arrays()))
    engine.run()
    counts = day.check(solo)
    assert counts[State.FINISHED] > 0.8 * REQUESTS
    assert counts[State.CANCELLED]
    assert counts[State.FAILED]
    assert len(arrays) > 5
    assert max(arrays[2:]) <= arrays[1] + 5, "arrays pile up on the device"
