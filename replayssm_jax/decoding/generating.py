"""Prompts in, answers out: an engine for one batch, run to its end."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from replayssm_jax.decoding.drafters import Drafter
from replayssm_jax.decoding.engine import Engine
from replayssm_jax.decoding.engine_config import encode
from replayssm_jax.decoding.requests import Completion, Delta, Request
from replayssm_jax.decoding.sampling import SamplingParams
from replayssm_jax.decoding.text import Tokenizer
from replayssm_jax.models.decoder import Decoder

Prompts = Sequence[str] | Sequence[Sequence[int]]

# Slots of an engine that is made for a batch, unless the caller says otherwise.
_MOST_SLOTS = 256


def generate(
    model: Decoder,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    drafter: Drafter | None = None,
    tokenizer: Tokenizer | None = None,
    progress: bool | None = None,
    **options: Any,
) -> list[Completion]:
    """Answers to prompts of any lengths. The loop runs on the device; the host looks when a prompt has to be let in.

    Args:
        model: a decoder.
        prompts: texts, or tokens.
        params: of each prompt, or of all of them: then the i-th prompt's seed is ``params.seed + i``. None for the defaults.
        drafter: proposes drafts; None decodes token by token. It does not change the distribution that tokens are drawn
            from; where drafts are chosen, not drawn, or the request is greedy, it changes no token but by rounding.
        tokenizer: for texts and stop strings.
        progress: whether a line on stderr shows how far it is; None if stderr is a terminal.
        options: fields of ``EngineConfig``, and ``policy``. Slots and lengths are made to fit the prompts unless given.

    Returns:
        One completion per prompt, in order. A prompt that failed while it ran has ``error`` set.

    Raises:
        TypeError, ValueError: as ``Engine`` and ``Engine.submit``; nothing has run then.
    """
    engine, requests = _submit(model, prompts, params, drafter, tokenizer, options)
    shown = Progress(sum(r.params.max_tokens for r in requests), sys.stderr.isatty() if progress is None else progress)
    # a burst ends early where a slot gets free for one who waits, where text has to be searched, and to show progress
    rounds = engine.config.rounds_per_step if shown.on or any(r.params.stop for r in requests) else 2**30
    while engine.busy:
        engine.step(rounds)
        if shown.on:
            shown.update(sum(r.params.max_tokens if r.done else len(r.tokens) for r in requests))
    shown.close()
    return [request.completion() for request in requests]


def stream(
    model: Decoder,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    drafter: Drafter | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Iterator[tuple[int, Delta]]:
    """``generate``, a piece at a time: which prompt has news, and what. Arguments as there.

    Raises:
        RequestError: a prompt failed while it ran, once all others have been served.
    """
    engine, requests = _submit(model, prompts, params, drafter, tokenizer, options)
    return _stream(engine, requests)


def _stream(engine: Engine, requests: list[Request]) -> Iterator[tuple[int, Delta]]:
    places = {request.number: i for i, request in enumerate(requests)}
    while engine.busy:
        for request in engine.step():
            if (delta := request.news()) is not None:
                yield places[request.number], delta
    for request in requests:
        request.result()  # raises where it failed


def _submit(
    model: Decoder, prompts: Prompts, params: Any, drafter: Drafter | None, tokenizer: Tokenizer | None, options: dict[str, Any]
) -> tuple[Engine, list[Request]]:
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or not len(prompts):
        raise ValueError(f"prompts must be a list of at least one prompt, got {prompts!r}")
    tokens = [encode(prompt, tokenizer, model.config.vocab_size) for prompt in prompts]
    if params is None or isinstance(params, SamplingParams):
        params = [_with_seed(params or SamplingParams(), i) for i in range(len(tokens))]
    elif not isinstance(params, Sequence) or any(not isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"params must be SamplingParams, one for all or one per prompt, got {params!r}")
    elif len(params) != len(tokens):
        raise ValueError(f"params must be one for all, or one per prompt: got {len(params)} for {len(tokens)} prompts")
    longest = max(len(prompt) + p.max_tokens for prompt, p in zip(tokens, params, strict=True))
    sizes = {"num_slots": min(len(tokens), _MOST_SLOTS), "max_length": longest, "prefill_rows": min(len(tokens), 16)}
    stops = max(len(p.stop_tokens) for p in params)
    engine = Engine(model, drafter=drafter, tokenizer=tokenizer, **{**sizes, "max_stop_tokens": max(stops, 1), **options})
    return engine, [engine.submit(prompt, p) for prompt, p in zip(tokens, params, strict=True)]


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    return dataclasses.replace(params, seed=(params.seed + index) % 2**32)


class Progress:
    """One line that is written over: how much of so many tokens is there, and how fast they come.

    Args:
        total: tokens at most.
        on: whether anything is shown.
        out: where.
    """

    def __init__(self, total: int, on: bool, out: TextIO | None = None):
        self.on, self._total, self._out = on, total, sys.stderr if out is None else out
        self._started = self._shown = time.monotonic()

    def update(self, count: int) -> None:
        now = time.monotonic()
        if self.on and (now - self._shown > 0.2 or count == self._total):
            self._shown = now
            bar = "#" * (30 * count // self._total)
            rate = count / max(now - self._started, 1e-9)
            self._out.write(f"\r[{bar:<30}] {count:,} of up to {self._total:,} tokens, {rate:,.0f} per second ")
            self._out.flush()

    def close(self) -> None:
        if self.on:
            self._out.write("\n")
