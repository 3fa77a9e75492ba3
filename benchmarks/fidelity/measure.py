"""Predictions of a model under a policy, by position, and how far they are from those of another policy.

**Held-out text** is fed T tokens at a time to ``verify``, and all are committed: with a window of 2 T every call folds the T
tokens before it and reads what the fold has left, so a checkpoint is rounded, and a copy refreshed, every T tokens. That is
what decoding token by token with a window of T does, in fewer calls. **Generated text** is what the float32 model has written
by itself, token by token, after a prompt of held-out text; every variant is then fed it in the same way: divergence is defined
between predictions of the same next token only.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.fidelity.variants import BASE, Variant, init_cache
from replayssm_jax import ReplayPolicy
from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.decoder import Decoder

Array = jax.Array
Piece = Callable[[Any, ModelCache, Array], tuple[ModelCache, Array]]

PROMPT = 64


def take_sequences(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """``count`` sequences of ``length`` bytes that start as far apart as can be; they overlap, and go on from the text's
    beginning, only where it is too short for all of them. [count, length] int32"""
    starts = np.arange(count) * (len(text) // count)
    return text[(starts[:, None] + np.arange(length)) % len(text)].astype(np.int32)


def compile_piece(model: Decoder, variant: Variant, sequences: int, piece: int, drafts: int) -> Piece:
    """A compiled (weights, cache, tokens [B, P] int32) -> (cache, log-probabilities of the next token [B, P, vocabulary])."""
    graph, weights = nnx.split(model)

    def run(weights: Any, cache: ModelCache, tokens: Array) -> tuple[ModelCache, Array]:
        model = nnx.merge(graph, weights)

        def body(cache: ModelCache, tokens: Array) -> tuple[ModelCache, Array]:
            cache, logits = model.verify(cache, tokens, implementation="xla")
            cache = model.commit(cache, drafts)
            return cache if variant.change is None else variant.change(cache), jax.nn.log_softmax(logits)

        by_call = jnp.swapaxes(tokens.reshape(sequences, -1, drafts), 0, 1)  # [calls, B, T]
        cache, logs = jax.lax.scan(body, cache, by_call)
        return cache, jnp.swapaxes(logs, 0, 1).reshape(sequences, piece, -1)

    cache = jax.eval_shape(lambda: init_cache(model, variant, sequences, drafts))
    tokens = jax.ShapeDtypeStruct((sequences, piece), jnp.int32)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    return jax.jit(run, donate_argnums=1).lower(shapes, cache, tokens).compile()


def predictions(
    model: Decoder, variant: Variant, run: Piece, tokens: np.ndarray, piece: int, drafts: int, use: Callable[[int, Array], Any]
) -> list[Any]:
    """Runs tokens [B, N] through a policy, piece by piece; what ``use`` makes of each one's number and log-probabilities."""
    _, weights = nnx.split(model)
    cache = init_cache(model, variant, tokens.shape[0], drafts)
    results = []
    for number, start in enumerate(range(0, tokens.shape[1], piece)):
        cache, logs = run(weights, cache, jnp.asarray(tokens[:, start : start + piece]))
        results.append(use(number, logs))
    return results


@jax.jit
def divergence(base: Array, other: Array) -> tuple[Array, Array]:
    """How far predictions are apart, from log-probabilities [B, P, vocabulary].

        KL(p || q) = sum_i p_i d_i = sum_i p_i (exp(-d_i) - 1 + d_i),  d = log p - log q

    in the second form, whose terms are all >= 0: float32 keeps the digits of divergences far below its step at 1.

    Returns:
        KL(base || other) in nats, and whether the likeliest token is another. Both [B, P]
    """
    d = base - other
    small = jnp.abs(d) < 0.02
    series = jnp.square(d) * (1 / 2 - d / 6 + jnp.square(d) / 24)
    kl = jnp.sum(jnp.exp(base) * jnp.where(small, series, jnp.expm1(-d) + d), axis=-1)
    return kl, jnp.argmax(base, axis=-1) != jnp.argmax(other, axis=-1)


def compare(
    model: Decoder, runs: dict[Variant, Piece], tokens: np.ndarray, piece: int, drafts: int, done: Callable[[str], None]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Divergence of every variant from the base by position: its name, KL [B, N], other likeliest token [B, N]."""
    base: Sequence[Array] = predictions(model, BASE, runs[BASE], tokens, piece, drafts, lambda _, logs: logs)
    jax.block_until_ready(base)
    done(BASE.name)
    for variant, run in runs.items():
        if variant is BASE:
            continue
        pairs = predictions(model, variant, run, tokens, piece, drafts, lambda number, logs: divergence(base[number], logs))
        kl, other = (np.concatenate([np.asarray(x) for x in column], axis=1) for column in zip(*pairs, strict=True))
        done(f"{variant.name}: {kl.mean():.2e}")
        yield variant.name, kl, other


def generate(model: Decoder, prompts: np.ndarray, count: int, seed: int, piece: int, done: Callable[[str], None]) -> np.ndarray:
    """Prompts [B, P] and ``count`` tokens sampled behind each, ``piece`` at a time, with a float32 checkpoint.

    Returns:
        [B, P + count] int32
    """
    graph, weights = nnx.split(model)
    policy = ReplayPolicy(window=16, record_dtype=model.dtype)

    @jax.jit
    def read(weights: Any, cache: ModelCache, prompts: Array) -> tuple[ModelCache, Array]:
        return nnx.merge(graph, weights).prefill(cache, prompts)

    @functools.partial(jax.jit, donate_argnums=1)
    def write(weights: Any, carry: tuple[ModelCache, Array], keys: Array) -> tuple[tuple[ModelCache, Array], Array]:
        model = nnx.merge(graph, weights)

        def body(carry: tuple[ModelCache, Array], key: Array) -> tuple[tuple[ModelCache, Array], Array]:
            cache, logits = carry
            token = jax.random.categorical(key, logits).astype(jnp.int32)
            cache, logits = model.verify(cache, token[:, None])
            return (model.commit(cache, 1), logits[:, 0]), token

        return jax.lax.scan(body, carry, keys)

    carry = read(weights, model.init_cache(prompts.shape[0], 1, policy), jnp.asarray(prompts))
    keys = jax.random.split(jax.random.key(seed), (-(-count // piece), piece))
    pieces = [prompts]
    for number in range(len(keys)):
        carry, tokens = write(weights, carry, keys[number])
        pieces.append(np.asarray(tokens).T)
        if (number + 1) % max(1, len(keys) // 4) == 0:
            done(f"{(number + 1) * piece:,} tokens written")
    return np.concatenate(pieces, axis=1)[:, : prompts.shape[1] + count]
