"""Kimi Delta Attention, as in Kimi-Linear, Kimi-K3 and GLM-5.3-Flash.

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))
    f       = W_fb W_fa x + dt_bias                              per head and key channel
    alpha   = exp(-exp(A_log) softplus(f)), or exp(lower_bound sigmoid(exp(A_log) f)) where the gate is bounded
    beta    = sigmoid(W_b x)
    S_t     = S_{t-1} alpha + beta (v - S_{t-1} alpha k) k^T      with k / |k|; alpha scales key channels
    o_t     = S_t q / sqrt(K)                                     with q / |q|
    y_t     = W_o [rms_norm(o_t) w sigmoid(W_gb W_ga x)]

Source: Kimi Linear (arXiv 2510.26692). The bounded gate is another formula, not a clamp of the first.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers.cache import MixerCache, advance, check_cache, init_mixer_cache
from replayssm_jax.mixers.parts import ShortConv, check_hidden, l2_factor, linear, live_mask, rms_norm
from replayssm_jax.per_device import gathered, parts
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.sharding import Sharding
from replayssm_jax.state import Recurrence, ReplayPolicy, Tokens
from replayssm_jax.trees import check_positive_int

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDeltaAttentionConfig:
    """Sizes of a Kimi Delta Attention mixer.

    Args:
        hidden_size: width of x and y.
        num_heads: H; queries, keys and values have as many heads.
        head_dim: K and V, and the rank of the two low-rank gates.
        conv_width: taps of the short convolutions.
        norm_eps: of the output norm.
        gate_lower_bound: least log decay of a bounded gate (-5 in Kimi-K3 and GLM-5.3-Flash), None for the unbounded gate.

    Raises:
        TypeError, ValueError: a size is no int of at least 1, or gate_lower_bound is not negative.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-5
    gate_lower_bound: float | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "conv_width"):
            check_positive_int(name, getattr(self, name))
        if self.gate_lower_bound is not None and not self.gate_lower_bound < 0:
            raise ValueError(f"gate_lower_bound must be negative (it bounds a log decay), got {self.gate_lower_bound}")

    @property
    def recurrence(self) -> Recurrence:
        return Recurrence(
            num_value_heads=self.num_heads,
            num_key_heads=self.num_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            delta_rule=True,
            gate="channel",
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class KimiDeltaAttention(nnx.Module):
    """A Kimi Delta Attention mixer: ``cache, y = mixer(cache, x, pointer)``. Arguments as ``GatedDeltaNet``."""

    def __init__(
        self, config: KimiDeltaAttentionConfig, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.sharding: Sharding | None = None
        hidden, width, heads = config.hidden_size, config.width, config.num_heads
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width, **types) for _ in range(3))
        self.conv1d = ShortConv(3 * width, config.conv_width, bias=False, param_dtype=param_dtype, rngs=rngs)
        self.f_a_proj = linear(hidden, config.head_dim, **types)
        self.f_b_proj = linear(config.head_dim, width, **types)
        self.b_proj = linear(hidden, heads, **types)
        self.g_a_proj = linear(hidden, config.head_dim, **types)
        self.g_b_proj = linear(config.head_dim, width, **types)
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)))
        self.dt_bias = nnx.Param(jnp.zeros(width, jnp.float32))
        self.o_norm = nnx.Param(jnp.ones(config.head_dim, param_dtype))
        self.o_proj = linear(width, hidden, **types)

    @property
    def recurrence(self) -> Recurrence:
        """Of this mixer's caches: the config's, split over the mesh if there is one."""
        return self.config.recurrence if self.sharding is None else self.sharding.split(self.config.recurrence)

    def init_cache(self, num_slots: int, policy: ReplayPolicy | None = None) -> MixerCache:
        """A cache of fresh slots; a policy of None is the default one with records in this mixer's dtype."""
        c = self.config
        return init_mixer_cache(self.recurrence, policy, num_slots, c.conv_width, 3 * c.width, self.dtype)

    def __call__(
        self,
        cache: MixerCache,
        x: Array,
        pointer: ReplayPointer,
        *,
        slots: Array | None = None,
        lengths: Array | None = None,
        prefill: bool = False,
        implementation: str | None = None,
    ) -> tuple[MixerCache, Array]:
        """A token, T drafts or (with ``prefill``) a prompt of each row. See ``GatedDeltaNet.__call__``."""
        check_hidden(x, self.config.hidden_size)
        check_cache(cache, self.recurrence, self.config.conv_width, 3 * self.config.width, self.dtype)
        x = x.astype(self.dtype)
        projected = [gathered(self.sharding, project(x)) for project in (self.q_proj, self.k_proj, self.v_proj)]
        qkv = gathered(self.sharding, jnp.concatenate(projected, axis=-1))
        conv, qkv = self.conv1d(cache.conv, qkv, pointer, slots, lengths)
        tokens = self._tokens(x, qkv)
        cache, out = advance(cache, conv, tokens, pointer, slots, lengths, prefill, implementation, self.sharding)
        gate = self.g_b_proj(self.g_a_proj(x)).reshape(out.shape).astype(jnp.float32)
        gated = rms_norm(out, self.config.norm_eps) * self.o_norm[...].astype(jnp.float32) * jax.nn.sigmoid(gate)
        y = self.o_proj(gated.reshape(*x.shape[:2], -1).astype(self.dtype))
        return cache, jnp.where(live_mask(x, pointer, slots, lengths)[..., None], y, 0)

    def _tokens(self, x: Array, qkv: Array) -> Tokens:
        c = self.config
        q, k, v = (part.reshape(*x.shape[:2], c.num_heads, c.head_dim) for part in parts(self.sharding, qkv, 3))
        f = self.f_b_proj(self.f_a_proj(x)).astype(jnp.float32) + self.dt_bias[...]
        return Tokens(
            q=q,
            k=k,
            v=v,
            log_decay=log_gate(f.reshape(q.shape), self.A_log[...], c.gate_lower_bound),
            beta=jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32)),
            q_scale=l2_factor(q) * c.head_dim**-0.5,
            k_scale=l2_factor(k),
        )


def log_gate(f: Array, A_log: Array, lower_bound: float | None) -> Array:
    """Log decay per key channel.

    Args:
        f: the gate's input, bias included. [B, T, H, K] float32
        A_log: [H] float32
        lower_bound: of a bounded gate, or None.

    Returns:
        [B, T, H, K] float32, in (lower_bound, 0) or (-inf, 0).
    """
    scale = jnp.exp(A_log)[:, None]
    if lower_bound is None:
        return -scale * jax.nn.softplus(f)
    return lower_bound * jax.nn.sigmoid(scale * f)
