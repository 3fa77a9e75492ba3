"""Full attention beside the recurrent layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from replayssm_jax.mixers.parts import linear
from replayssm_jax.models.attention_cache import AttentionCache, attend_cached, cached_heads, init_attention_cache
from replayssm_jax.models.layers import CenteredRMSNorm, RMSNorm
from replayssm_jax.per_device import gathered
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.sharding import Sharding
from replayssm_jax.slots import check_slots, gather_index

Array = jax.Array

_LATENT_EPS = 1e-6  # of the norms of latents, whatever the model's own epsilon


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


def split_heads(sharding: Sharding | None, x: Array, heads: int) -> Array:
    """[B, T, heads * head_dim] -> [B, T, heads, head_dim], whole on every device where heads do not divide among them."""
    if sharding is not None and heads % sharding.model_size:
        x = gathered(sharding, x)
    return x.reshape(*x.shape[:2], heads, -1)


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
        self.sharding: Sharding | None = None
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_proj = linear(hidden, 2 * num_heads * head_dim, **types)  # per head: query, gate
        self.k_proj = linear(hidden, num_kv_heads * head_dim, **types)
        self.v_proj = linear(hidden, num_kv_heads * head_dim, **types)
        self.q_norm = CenteredRMSNorm(head_dim, eps, param_dtype=param_dtype)
        self.k_norm = CenteredRMSNorm(head_dim, eps, param_dtype=param_dtype)
        self.o_proj = linear(num_heads * head_dim, hidden, **types)

    def init_cache(self, num_slots: int, max_length: int) -> AttentionCache:
        heads = cached_heads(self.num_heads, self.num_kv_heads, self.sharding)
        return init_attention_cache(num_slots, max_length, heads, self.head_dim, self.dtype)

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
        k = split_heads(self.sharding, self.k_proj(x), self.num_kv_heads)
        v = split_heads(self.sharding, self.v_proj(x), self.num_kv_heads)
        read = gather_index(check_slots(slots, pointer.num_slots, rows), pointer.num_slots)
        position = pointer.position[read][:, None] + jnp.arange(count)
        q = rotate(self.q_norm(q), position, self.rope_theta, self.rotary_dim)
        k = rotate(self.k_norm(k), position, self.rope_theta, self.rotary_dim)
        cache, out = attend_cached(cache, q, k, v, pointer, slots, lengths, sharding=self.sharding)
        out = out * jax.nn.sigmoid(gate)
        return cache, self.o_proj(out.reshape(rows, count, -1))


class PlainAttention(nnx.Module):
    """Grouped-query attention without positions (Nemotron)."""

    def __init__(
        self,
        hidden: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.dtype = jnp.dtype(dtype)
        self.sharding: Sharding | None = None
        types: dict[str, Any] = {"bias": bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_proj = linear(hidden, num_heads * head_dim, **types)
        self.k_proj = linear(hidden, num_kv_heads * head_dim, **types)
        self.v_proj = linear(hidden, num_kv_heads * head_dim, **types)
        self.o_proj = linear(num_heads * head_dim, hidden, **types)

    def init_cache(self, num_slots: int, max_length: int) -> AttentionCache:
        heads = cached_heads(self.num_heads, self.num_kv_heads, self.sharding)
        return init_attention_cache(num_slots, max_length, heads, self.head_dim, self.dtype)

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
        q = self.q_proj(x).reshape(rows, count, self.num_heads, self.head_dim)
        k = split_heads(self.sharding, self.k_proj(x), self.num_kv_heads)
        v = split_heads(self.sharding, self.v_proj(x), self.num_kv_heads)
        cache, out = attend_cached(cache, q, k, v, pointer, slots, lengths, sharding=self.sharding)
        return cache, self.o_proj(out.reshape(rows, count, -1))


class LatentAttention(nnx.Module):
    """Multi-head latent attention without positions (Kimi-Linear), in its absorbed form.

    A token is cached as one latent of kv_rank + shared_dim features. With W_uk and W_uv the halves of ``kv_b_proj``,

        score_h = [W_uk_h^T q_h | q'_h] . [latent | k']          out_h = W_uv_h (sum of latents, attention-weighted)

    so queries attend to the latents themselves and no key or value per head is ever formed.

    Args:
        hidden: width of x.
        num_heads: query heads.
        head_dim: features of a query that meet a key of its own head (qk_nope_head_dim).
        shared_dim: features that meet the key shared by all heads (qk_rope_head_dim; nothing is rotated).
        value_dim: features of a head's output.
        kv_rank, q_rank: widths of the latents; q_rank None for a full-rank query.
        bias: of the latent and output projections.
    """

    def __init__(
        self,
        hidden: int,
        *,
        num_heads: int,
        head_dim: int,
        shared_dim: int,
        value_dim: int,
        kv_rank: int,
        q_rank: int | None,
        bias: bool,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.head_dim, self.shared_dim = num_heads, head_dim, shared_dim
        self.value_dim, self.kv_rank, self.dtype = value_dim, kv_rank, jnp.dtype(dtype)
        self.sharding: Sharding | None = None
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        width = num_heads * (head_dim + shared_dim)
        if q_rank is None:
            self.q_proj = linear(hidden, width, rngs=rngs, **types)
        else:
            self.q_a_proj = linear(hidden, q_rank, bias=bias, rngs=rngs, **types)
            self.q_a_layernorm = RMSNorm(q_rank, _LATENT_EPS, **types)
            self.q_b_proj = linear(q_rank, width, rngs=rngs, **types)
        self.q_rank = q_rank
        self.kv_a_proj_with_mqa = linear(hidden, kv_rank + shared_dim, bias=bias, rngs=rngs, **types)
        self.kv_a_layernorm = RMSNorm(kv_rank, _LATENT_EPS, **types)
        self.kv_b_proj = linear(kv_rank, num_heads * (head_dim + value_dim), rngs=rngs, **types)
        self.o_proj = linear(num_heads * value_dim, hidden, bias=bias, rngs=rngs, **types)

    def init_cache(self, num_slots: int, max_length: int) -> AttentionCache:
        heads = cached_heads(self.num_heads, 1, self.sharding)
        cache = init_attention_cache(num_slots, max_length, heads, self.kv_rank + self.shared_dim, self.dtype)
        return dataclasses.replace(cache, value=None)

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
        q = self.q_proj(x) if self.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_shared = jnp.split(q.reshape(rows, count, self.num_heads, -1), [self.head_dim], axis=-1)
        latent, k_shared = jnp.split(self.kv_a_proj_with_mqa(x), [self.kv_rank], axis=-1)
        token = jnp.concatenate([self.kv_a_layernorm(latent), k_shared], axis=-1)[:, :, None]
        up = self.kv_b_proj.kernel[...].astype(self.dtype).reshape(self.kv_rank, self.num_heads, -1)
        up_key, up_value = jnp.split(up, [self.head_dim], axis=-1)
        q = jnp.einsum("bthd,rhd->bthr", q, up_key, precision=lax.Precision.HIGHEST)
        q = jnp.concatenate([q, q_shared], axis=-1)
        scale = (self.head_dim + self.shared_dim) ** -0.5
        cache, out = attend_cached(cache, q, token, None, pointer, slots, lengths, scale, self.sharding)
        out = jnp.einsum("bthr,rhd->bthd", out[..., : self.kv_rank], up_value, precision=lax.Precision.HIGHEST)
        return cache, self.o_proj(out.reshape(rows, count, -1))


ATTENTIONS = (GatedAttention, PlainAttention, LatentAttention)
