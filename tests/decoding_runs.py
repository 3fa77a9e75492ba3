"""What the tests of the decode loop share: golden models, their recorded answers, solo runs, drafters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replayssm_jax.decoding import Drafter, Engine, MultiTokenPrediction, PromptLookup, SamplingParams, SmallModel, State
from replayssm_jax.models import Decoder, from_pretrained
from replayssm_jax.models.qwen3_5_mtp import Qwen3_5MTP
from tests.golden_data import ROOT, load

MODELS = ("qwen3_5", "qwen3_next", "kimi_linear", "mamba2", "nemotron_h")
VOCAB = 128
SIZES = {"num_slots": 3, "max_length": 128, "prefill_chunk": 16, "prefill_rows": 2, "rounds_per_step": 4, "max_stop_tokens": 2}


@functools.cache
def model(family: str) -> Decoder:
    return from_pretrained(ROOT / family)


def recorded(family: str) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """A golden's prompts, and the tokens that its publisher's implementation went on with, greedily."""
    golden = load(family, "golden")
    return golden["prompt"].tolist(), [tuple(row) for row in golden["tokens"].tolist()]


@functools.cache
def drafter(name: str, family: str) -> Drafter:
    """Drafters that are right at times, always, hardly ever, and never."""
    if name == "lookup":
        return PromptLookup(3, max_ngram=3, min_ngram=1)
    if name == "itself":
        return SmallModel(model(family), 3)
    if name == "smaller":
        return SmallModel(model("mamba2"), 2)
    if name == "mtp":
        return MultiTokenPrediction(Qwen3_5MTP(model(family).config, rngs=nnx.Rngs(1)), 2)
    return Drafter()


def engine(family: str = "qwen3_5", drafts: str = "lookup", **options) -> Engine:
    """Always of the same sizes, so that few programs are compiled."""
    return Engine(model(family), drafter=drafter(drafts, family), **{**SIZES, **options})


def answers(family: str, drafts: str, texts, params) -> list[tuple[int, ...]]:
    """Of requests that are submitted together. params: of each, or of all."""
    runs = engine(family, drafts)
    params = [params] * len(texts) if isinstance(params, SamplingParams) else params
    requests = [runs.submit(text, p) for text, p in zip(texts, params, strict=True)]
    runs.run()
    assert all(request.error is None for request in requests)
    return [tuple(request.tokens) for request in requests]


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int, family: str = "qwen3_5") -> tuple[int, ...]:
    """The greedy answer of a request that has an engine for itself, token by token."""
    return answers(family, "plain", [prompt], SamplingParams(max_tokens=max_tokens))[0]


def prompts(rng: np.random.Generator, count: int, longest: int = 40) -> list[tuple[int, ...]]:
    """Random prompts; some are a token, some repeat themselves."""
    made = []
    for _ in range(count):
        size = int(rng.integers(1, longest + 1))
        tokens = rng.integers(0, VOCAB, size)
        if rng.random() < 0.4:
            tokens = np.resize(tokens[: int(rng.integers(1, 6))], size)
        made.append(tuple(tokens.tolist()))
    return made


def check(requests) -> None:
    """Every request has finished with its solo answer."""
    for request in requests:
        assert request.state is State.FINISHED, request
        assert tuple(request.tokens) == solo(request.prompt, request.params.max_tokens), request


def poisoned(runs, slots=slice(None)) -> None:
    """Whatever lies in these slots is NaN now, counters aside."""

    def poison(x):
        return x.at[slots].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    cache = dataclasses.replace(runs.pool.sequences.cache, layers=jax.tree.map(poison, runs.pool.sequences.cache.layers))
    runs.pool.sequences = dataclasses.replace(runs.pool.sequences, cache=cache)
