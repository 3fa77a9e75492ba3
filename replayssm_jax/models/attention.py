"""Full attention beside the recurrent layers. Its cache is addressed by position, so a rejected draft is overwritten."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from replayssm_jax.mixers.parts import linear
from replayssm_jax.models.layers import CenteredRMSNorm
from replayssm_jax.pointer import ReplayPointer
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
        value: [N, S, heads, head_dim]
    """

    key: Array
    value: Array

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
    cache: AttentionCache, q: Array, k: Array, v: Array, pointer: ReplayPointer, slots: Array | None, lengths: Array | None
) -> tuple[AttentionCache, Array]:
    """Writes keys and values of T tokens at the rows' positions and attends causally to everything up to each of them.

    Args:
        cache: of this layer.
        q: [B, T, heads, head_dim], rotated
        k, v: [B, T, kv_heads, head_dim]
        pointer: before these tokens.
        slots, lengths: as in ``replayssm_jax.verify``.

    Returns:
        The cache and the attention's outputs [B, T, heads, head_dim]; dead tokens give garbage.
        Tokens past the cache's end are not written: keep ``pointer.position + T <= max_length``.
    """
    num_slots = cache.key.shape[0]
    slots = check_slots(slots, num_slots, q.shape[0])
    lengths = check_counts(lengths, q.shape[0], q.shape[1], "lengths")
    read, position = gather_index(slots, num_slots), pointer.position[gather_index(slots, num_slots)]
    token = jnp.arange(q.shape[1])
    live = in_range(slots, num_slots)[:, None] & (token < lengths[:, None])
    target = jnp.where(live, slots[:, None], num_slots), position[:, None] + token
    cache = AttentionCache(
        key=cache.key.at[target].set(k.astype(cache.key.dtype), mode="drop"),
        value=cache.value.at[target].set(v.astype(cache.value.dtype), mode="drop"),
    )
    keys, values = cache.key[read], cache.value[read]
    # a masked score does not make a NaN value harmless: what lies past the row's last token is cut off by value
    past_end = jnp.arange(cache.max_length) >= (position + lengths)[:, None]
    values = jnp.where(past_end[..., None, None], 0, values)

    def attend(q: Array, token: Array) -> Array:
        visible = jnp.arange(cache.max_length) <= position[:, None, None] + token[:, None]  # [B, T, S]
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(q, keys, values, mask=visible[:, None])

    if q.shape[1] <= _QUERY_BLOCK:
        return cache, attend(q, token)
    blocks = -(-q.shape[1] // _QUERY_BLOCK)
    padded = jnp.pad(q, [(0, 0), (0, blocks * _QUERY_BLOCK - q.shape[1]), (0, 0), (0, 0)])
    split = jnp.swapaxes(padded.reshape(q.shape[0], blocks, _QUERY_BLOCK, *q.shape[2:]), 0, 1)
    starts = jnp.arange(blocks) * _QUERY_BLOCK
    out = lax.map(lambda block: attend(block[0], block[1] + jnp.arange(_QUERY_BLOCK)), (split, starts))
    return cache, jnp.swapaxes(out, 0, 1).reshape(padded.shape)[:, : q.shape[1]]


def rotate(x: Array, position: Array, theta: float, rotary_dim: int) -> Array:
    """Rotary embedding of the first ``rotary_dim`` features, halves rotated against each other; the rest passes.

    Args:
        x: [B, T, heads, head_dim]
        position: [B, T] int32
        theta: base of the wavelengths.
        rotary_dim: even.
    """
    frequency = theta ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angle = position[..., None, None].astype(jnp.float32) * frequency  # [B, T, 1, rotary_dim / 2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second, rest = jnp.split(x.astype(jnp.float32), [rotary_dim // 2, rotary_dim], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


class GatedAttention(nnx.Module):
    """Grouped-query attention with normed queries and keys, partial rotary positions and a sigmoid output gate (Qwen3.5)."""

    def __init__(
        self,
        hidden: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        rope_theta: float,
        eps: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rotary_dim, self.rope_theta, self.dtype = rotary_dim, rope_theta, jnp.dtype(dtype)
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_proj = linear(hidden, 2 * num_heads * head_dim, **types)  # per head: query, gate
        self.k_proj = linear(hidden, num_kv_heads * head_dim, **types)
        self.v_proj = linear(hidden, num_kv_heads * head_dim, **types)
        self.q_norm = CenteredRMSNorm(head_dim, eps, param_dtype=param_dtype)
        self.k_norm = CenteredRMSNorm(head_dim, eps, param_dtype=param_dtype)
        self.o_proj = linear(num_heads * head_dim, hidden, **types)

    def init_cache(self, num_slots: int, max_length: int) -> AttentionCache:
        return init_attention_cache(num_slots, max_length, self.num_kv_heads, self.head_dim, self.dtype)

    def __call__(
        self,
        cache: AttentionCache,
        x: Array,
        pointer: ReplayPointer,
        *,
        slots: Array | None = None,
        lengths: Array | None = None,
    ) -> tuple[AttentionCache, Array]:
        """T tokens of each row, a prompt or drafts alike. x [B, T, hidden] -> the cache and [B, T, hidden]."""
        rows, count = x.shape[:2]
        q, gate = jnp.split(self.q_proj(x).reshape(rows, count, self.num_heads, -1), 2, axis=-1)
        k = self.k_proj(x).reshape(rows, count, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(rows, count, self.num_kv_heads, self.head_dim)
        read = gather_index(check_slots(slots, pointer.num_slots, rows), pointer.num_slots)
        position = pointer.position[read][:, None] + jnp.arange(count)
        q = rotate(self.q_norm(q), position, self.rope_theta, self.rotary_dim)
        k = rotate(self.k_norm(k), position, self.rope_theta, self.rotary_dim)
        cache, out = attend_cached(cache, q, k, v, pointer, slots, lengths)
        out = out * jax.nn.sigmoid(gate)
        return cache, self.o_proj(out.reshape(rows, count, -1))
