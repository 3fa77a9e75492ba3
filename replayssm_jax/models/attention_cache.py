"""What attention keeps per slot, and attending to it. Addressed by position, so a rejected draft is overwritten."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from replayssm_jax.per_device import over_model
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.sharding import Sharding
from replayssm_jax.slots import check_counts, check_slots, gather_index, in_range
from replayssm_jax.trees import check_positive_int, register

Array = jax.Array

# Queries of a prompt that attend at a time: bounds the scores at this many times the cache's length.
_QUERY_BLOCK = 256


@register(("key", "value"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCache:
    """Keys and values by slot and position. S is the longest sequence a slot can hold.

    Attributes:
        key: [N, S, heads, head_dim]
        value: the same, or None where the keys are the values too (latent attention). [N, S, heads, head_dim]
    """

    key: Array
    value: Array | None

    @property
    def max_length(self) -> int:
        return self.key.shape[1]

    def reset(self, slots: Array) -> AttentionCache:
        """Nothing to do: positions at or behind the pointer are never read."""
        del slots
        return self


def init_attention_cache(num_slots: int, max_length: int, heads: int, head_dim: int, dtype: Any) -> AttentionCache:
    """An empty cache for ``num_slots`` sequences of up to ``max_length`` tokens."""
    check_positive_int("num_slots", num_slots)
    check_positive_int("max_length", max_length)
    shape = (num_slots, max_length, heads, head_dim)
    return AttentionCache(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))


def attend_cached(
    cache: AttentionCache,
    q: Array,
    k: Array,
    v: Array | None,
    pointer: ReplayPointer,
    slots: Array | None,
    lengths: Array | None,
    scale: float | None = None,
    sharding: Sharding | None = None,
) -> tuple[AttentionCache, Array]:
    """Writes keys and values of T tokens at the rows' positions and attends causally to everything up to each of them.

    Args:
        cache: of this layer.
        q: [B, T, heads, head_dim], rotated
        k: [B, T, kv_heads, head_dim]
        v: the same, or None where the cache keeps no values.
        pointer: before these tokens.
        slots, lengths: as in ``replayssm_jax.verify``.
        scale: of the scores, None for head_dim ** -0.5.
        sharding: a mesh whose devices attend with their own heads each.

    Returns:
        The cache and the attention's outputs [B, T, heads, head_dim]; dead tokens give garbage.
        Tokens past the cache's end are not written: keep ``pointer.position + T <= max_length``.
    """
    if sharding is None:
        return _attend_cached(cache, q, k, v, pointer, slots, lengths, scale)
    heads = cache.key.shape[2]
    times = heads // k.shape[2]
    k, v = jnp.repeat(k, times, axis=2), None if v is None else jnp.repeat(v, times, axis=2)
    split = P(None, None, sharding.model) if heads % sharding.model_size == 0 else P()
    run = over_model(
        sharding,
        functools.partial(_attend_cached, scale=scale),
        in_specs=(split, split, split, split, P(), P(), P()),
        out_specs=(split, split),
    )
    return run(cache, q, k, v, pointer, slots, lengths)


def cached_heads(num_heads: int, kv_heads: int, sharding: Sharding | None) -> int:
    """Heads that a cache keeps: kv_heads, on a mesh repeated until its model axis divides them (if it divides num_heads)."""
    if sharding is None or num_heads % sharding.model_size:
        return kv_heads
    return math.lcm(kv_heads, sharding.model_size)


def _attend_cached(
    cache: AttentionCache,
    q: Array,
    k: Array,
    v: Array | None,
    pointer: ReplayPointer,
    slots: Array | None,
    lengths: Array | None,
    scale: float | None,
) -> tuple[AttentionCache, Array]:
    num_slots, in_order = cache.key.shape[0], slots is None
    slots = check_slots(slots, num_slots, q.shape[0])
    lengths = check_counts(lengths, q.shape[0], q.shape[1], "lengths")
    read, position = gather_index(slots, num_slots), pointer.position[gather_index(slots, num_slots)]
    token = jnp.arange(q.shape[1])
    live = in_range(slots, num_slots)[:, None] & (token < lengths[:, None])
    target = jnp.where(live, slots[:, None], num_slots), position[:, None] + token

    def write(pool: Array, values: Array) -> Array:
        return pool.at[target].set(values.astype(pool.dtype), mode="drop")

    cache = AttentionCache(key=write(cache.key, k), value=None if cache.value is None or v is None else write(cache.value, v))

    def take(pool: Array) -> Array:
        return pool[: len(slots)] if in_order else pool[read]  # rows in the order of their slots spare a gather

    keys = take(cache.key)
    values = keys if cache.value is None else take(cache.value)
    # a masked score does not make a NaN value harmless: what lies past the row's last token is cut off by value
    past_end = jnp.arange(cache.max_length) >= (position + lengths)[:, None]
    values = jnp.where(past_end[..., None, None], 0, values)

    def attend(q: Array, token: Array) -> Array:
        visible = jnp.arange(cache.max_length) <= position[:, None, None] + token[:, None]  # [B, T, S]
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(q, keys, values, mask=visible[:, None], scale=scale)

    if q.shape[1] <= _QUERY_BLOCK:
        return cache, attend(q, token)
    blocks = -(-q.shape[1] // _QUERY_BLOCK)
    padded = jnp.pad(q, [(0, 0), (0, blocks * _QUERY_BLOCK - q.shape[1]), (0, 0), (0, 0)])
    split = jnp.swapaxes(padded.reshape(q.shape[0], blocks, _QUERY_BLOCK, *q.shape[2:]), 0, 1)
    starts = jnp.arange(blocks) * _QUERY_BLOCK
    out = lax.map(lambda block: attend(block[0], block[1] + jnp.arange(_QUERY_BLOCK)), (split, starts))
    return cache, jnp.swapaxes(out, 0, 1).reshape(padded.shape)[:, : q.shape[1]]
