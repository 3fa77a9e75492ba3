"""Full attention beside the recurrent layers: cached by position, causal, blind to whatever is dead."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax import init_pointer
from replayssm_jax.models.attention import rotate
from replayssm_jax.models.attention_cache import AttentionCache, attend_cached, init_attention_cache
from tests.mixer_runs import quick_jit

HEADS, KV_HEADS, DIM = 4, 2, 8


@functools.partial(quick_jit, static_argnames="ahead")
def attend(cache, q, k, v, origin, slots, lengths, ahead=0):
    pointer = init_pointer(cache.key.shape[0], 2, 1)
    pointer = dataclasses.replace(pointer, origin=origin)
    return attend_cached(cache, q, k, v, pointer, slots, lengths)


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The last len(q) tokens of a sequence look back, in float64. q [T, heads, D], k and v [S, kv_heads, D]"""
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(DIM)
    hidden = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]
    weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def poisoned(num_slots: int, max_length: int) -> AttentionCache:
    shape = init_attention_cache(num_slots, max_length, KV_HEADS, DIM, jnp.float32).key.shape
    return AttentionCache(key=jnp.full(shape, jnp.nan), value=jnp.full(shape, jnp.nan))


@pytest.mark.parametrize("count", [3, 256, 300, 513])
def test_ragged_rows_continue_from_their_positions(count, rng):
    """Long prompts go in blocks of queries; the rest of the cache, padding rows and dead tokens are NaN."""
    slots, before, lengths = np.array([2, -1, 0, 4]), np.array([9, 0, 4, 0]), np.array([count, count, count - 2, count])
    total = 16 + count
    q, k, v = (rng.standard_normal((4, total, n, DIM)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    cache, origin = poisoned(4, total), np.array([4, 77, 9, 0], np.int32)
    key, value = np.array(cache.key), np.array(cache.value)
    new = []
    for x in (q, k, v):
        piece = np.full((4, count, *x.shape[2:]), np.nan, np.float32)
        for row in (0, 2):
            piece[row, : lengths[row]] = x[row, before[row] : before[row] + lengths[row]]
        new.append(piece)
    for row in (0, 2):
        key[slots[row], : before[row]], value[slots[row], : before[row]] = k[row, : before[row]], v[row, : before[row]]
    cache = AttentionCache(key=jnp.asarray(key), value=jnp.asarray(value))
    after, out = attend(cache, *new, origin, slots, lengths)
    for row in (0, 2):
        end = before[row] + lengths[row]
        want = softmax_attention(new[0][row, : lengths[row]], k[row, :end], v[row, :end])
        np.testing.assert_allclose(out[row, : lengths[row]], want, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(after.key[slots[row], :end], k[row, :end])
        assert np.isnan(after.key[slots[row], end:]).all()
    for slot in (1, 3):
        assert np.isnan(after.key[slot]).all()
        assert np.isnan(after.value[slot]).all()


def test_tokens_past_the_end_are_not_written():
    """Neither clamped onto the last position nor wrapped onto the first."""
    cache = init_attention_cache(1, 4, KV_HEADS, DIM, jnp.float32)
    ones = jnp.ones((1, 3, KV_HEADS, DIM))
    q = jnp.ones((1, 3, HEADS, DIM))
    after, _ = attend(cache, q, ones, ones, np.array([2], np.int32), np.array([0]), np.array([3]))
    np.testing.assert_array_equal(after.key[0, :, 0, 0], [0, 0, 1, 1])


def test_rotation_is_of_the_first_features_in_halves():
    """rotate_half on the first rotary_dim features, the rest passes; far positions keep their digits."""
    x = np.random.default_rng(0).standard_normal((2, 3, 1, 8)).astype(np.float32)
    position = np.array([[0, 1, 2], [100_000, 100_001, 7]])
    got = rotate(jnp.asarray(x), jnp.asarray(position), 10_000.0, 4)
    angle = position[..., None, None] * 10_000.0 ** (-np.arange(0, 4, 2) / 4)
    a, b = x[..., :2], x[..., 2:4]
    want = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), x[..., 4:]], -1)
    np.testing.assert_allclose(got, want, atol=5e-3)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize(("arguments", "name"), [((0, 4), "num_slots"), ((2, 0), "max_length"), ((2, 4.0), "max_length")])
def test_wrong_sizes_are_named(arguments, name):
    with pytest.raises((ValueError, TypeError), match=name):
        init_attention_cache(*arguments, KV_HEADS, DIM, jnp.float32)
