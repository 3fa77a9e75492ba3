"""Choosing the next tokens from logits: what a request asks for, and the distribution that it makes of the model's.

    logits -> repetition penalty -> / temperature -> top-k -> top-p -> min-p -> draw

Each restriction acts on what the one before has left and renormalised. The draw for a token is keyed by its request's seed and
its position alone, so a request's tokens do not depend on its batch, its slot or when it ran.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replayssm_jax.trees import check_positive_int, register

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draws from the so many most likely tokens only, 0 for all.
        top_p: draws from the fewest most likely tokens whose probabilities reach this sum, in (0, 1].
        min_p: leaves out tokens less likely than this times the most likely one, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or the answer holds,
            in [1e-30, 1e30].
        seed: of the draws, in [0, 2**32).
        stop_tokens: tokens that end the answer; the one that does is its last token, and no part of its text.
        stop: strings that end the answer; its text ends before the first of them. Needs a tokenizer.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range; the message names it.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive_int("max_tokens", self.max_tokens)
        for name, low, high in (("top_k", 0, 2**31), ("seed", 0, 2**32)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if not low <= value < high:
                raise ValueError(f"{name} must be in [{low}, {high}), got {value}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not (self.temperature >= 0 and _in_float32(self.temperature) < math.inf):
            raise ValueError(f"temperature must be at least 0 and finite in float32, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 1e-30 <= self.repetition_penalty <= 1e30:  # or products with logits would leave float32
            raise ValueError(f"repetition_penalty must be in [1e-30, 1e30], got {self.repetition_penalty}")
        self._check_stops()

    def _check_stops(self) -> None:
        for name, kind in (("stop_tokens", int), ("stop", str)):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"{name} must be a tuple of {kind.__name__}, got {value!r}")
            if wrong := [x for x in value if isinstance(x, bool) or not isinstance(x, kind)]:
                raise TypeError(f"{name} must hold {kind.__name__} only, got {wrong[0]!r}")
            object.__setattr__(self, name, tuple(value))
        if wrong := [x for x in self.stop_tokens if not 0 <= x < 2**31]:
            raise ValueError(f"stop_tokens must be in [0, 2**31), got {wrong[0]}")
        if "" in self.stop:
            raise ValueError("stop must not hold the empty string, which ends every answer before it begins")


def _in_float32(value: float) -> float:
    """As the compiled steps see it: infinite past the range of float32."""
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    except OverflowError:
        return math.inf


_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register(_FIELDS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The numbers of ``SamplingParams`` for every row, as arrays: rows that ask for different things share one program.

    Attributes:
        temperature, top_p, min_p, repetition_penalty: [N] float32
        top_k: [N] int32
        seed: [N] uint32
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    seed: Array

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Sampling:
        """One row for each, still on the host."""
        dtypes: dict[str, Any] = {"top_k": np.int32, "seed": np.uint32}
        columns: dict[str, Any] = {name: [getattr(p, name) for p in params] for name in _FIELDS}
        rows: Any = {name: np.array(column, dtypes.get(name, np.float32)) for name, column in columns.items()}
        return cls(**rows)


def adjust(logits: Array, sampling: Sampling) -> Array:
    """The logits of what each row draws from: temperature, top-k, top-p and min-p applied, excluded tokens at -inf.

    Args:
        logits: [N, T, V] float32, penalised already (``penalize``)
        sampling: of the N rows.

    Returns:
        [N, T, V] float32; a greedy row keeps its most likely token alone. Invariant under a shift of the logits.
    """
    size = logits.shape[-1]
    greedy = (sampling.temperature == 0)[:, None, None]
    # relative to the best: a tiny temperature must not turn infinity minus infinity into NaN
    best = jnp.max(logits, axis=-1, keepdims=True)
    scaled = (logits - best) / jnp.where(greedy, 1.0, sampling.temperature[:, None, None])
    only_best = jnp.arange(size) == jnp.argmax(logits, axis=-1, keepdims=True)
    restricts = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    limited = lax.cond(jnp.any(restricts), lambda: _restrict(scaled, sampling), lambda: scaled)
    return jnp.where(greedy, jnp.where(only_best, 0.0, -jnp.inf), limited)


def _restrict(logits: Array, sampling: Sampling) -> Array:
    """Top-k, top-p and min-p of [N, T, V]; of equal logits the first ones count as more likely."""
    size = logits.shape[-1]
    top_k, top_p, min_p = (x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p))
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranked = jnp.where((top_k > 0) & (jnp.arange(size) >= top_k), -jnp.inf, ranked)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # the most likely token stays, also where float32 takes top_p for 0
    ranked = jnp.where((top_p < 1) & (before >= top_p) & (jnp.arange(size) > 0), -jnp.inf, ranked)
    # relative to the most likely token, which renormalising does not change
    ranked = jnp.where(probability < min_p * probability[..., :1], -jnp.inf, ranked)
    back = jnp.argsort(order, axis=-1, stable=True)
    return jnp.take_along_axis(ranked, back, axis=-1)


def penalize(logits: Array, penalty: Array, text: Array, length: Array, drafts: Array) -> Array:
    """The repetition penalty: logits of tokens that have occurred are divided by it if positive, multiplied if not.

    Args:
        logits: after the last token of the text and after each draft. [N, T, V] float32
        penalty: [N] float32, 1 for none
        text: prompt and answer so far, garbage past ``length``. [N, S] int32
        length: [N] int32
        drafts: T - 1 tokens behind the text; those before a position have occurred there. [N, T - 1] int32
    """
    num_rows, _, size = logits.shape
    rows = jnp.arange(num_rows)[:, None]
    live = jnp.arange(text.shape[1]) < length[:, None]
    occurred = jnp.zeros((num_rows, size), bool).at[rows, jnp.where(live, text, size)].set(True, mode="drop")
    new = jax.nn.one_hot(drafts, size, dtype=bool)  # [N, T - 1, V]
    after = lax.associative_scan(jnp.logical_or, jnp.concatenate([occurred[:, None], new], axis=1), axis=1)
    factor = penalty[:, None, None]
    return jnp.where(after, jnp.where(logits > 0, logits / factor, logits * factor), logits)


def sample(logits: Array, sampling: Sampling, position: Array) -> Array:
    """One token per row, for decode loops of one's own.

    Args:
        logits: [N, V] float32
        sampling: of the rows; a repetition penalty is ``penalize``'s business.
        position: of the tokens in their rows' texts. [N] int32

    Returns:
        [N] int32
    """
    return draw(adjust(logits[:, None], sampling)[:, 0], token_keys(sampling.seed, position))


def draw(logits: Array, keys: Array) -> Array:
    """One token from each distribution. logits [..., V] float32, keys [...] typed. [...] int32"""
    noise = _map_keys(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32), keys)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


# What a key is used for, folded in last.
TOKEN, ACCEPT, DRAFT = range(3)


def token_keys(seed: Array, position: Array, use: int = TOKEN) -> Array:
    """Keys for the tokens at ``position`` [N, ...] of requests with ``seed`` [N] uint32. [N, ...] typed keys"""

    def key(seed: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), use)

    per_row = jax.vmap(key, (None, 0)) if position.ndim == 2 else key
    return jax.vmap(per_row)(seed, position)


def _map_keys(function: Any, keys: Array) -> Array:
    for _ in range(keys.ndim):
        function = jax.vmap(function)
    return function(keys)
