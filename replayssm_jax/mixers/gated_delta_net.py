"""Gated DeltaNet, as in Qwen3-Next, Qwen3.5 and OLMo-Hybrid.

    q, k, v = silu(conv(W_qkv x))              one short causal convolution over all three
    alpha   = exp(-exp(A_log) softplus(W_a x + dt_bias))        per value head
    beta    = sigmoid(W_b x), or twice that
    S_t     = alpha S_{t-1} + beta (v - alpha S_{t-1} k) k^T     with k / |k|
    o_t     = S_t q / sqrt(K)                                    with q / |q|
    y_t     = W_o [rms_norm(o_t) w silu(W_z x)]

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), with the projections of the Qwen3.5 checkpoints.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers.cache import MixerCache, advance, check_cache, init_mixer_cache
from replayssm_jax.mixers.parts import ShortConv, check_hidden, l2_factor, linear, live_mask, rms_norm
from replayssm_jax.per_device import parts
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.sharding import Sharding
from replayssm_jax.state import Recurrence, ReplayPolicy, Tokens
from replayssm_jax.trees import check_divides, check_positive_int

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Sizes of a Gated DeltaNet mixer.

    Args:
        hidden_size: width of x and y.
        num_key_heads, num_value_heads: G and H; G divides H.
        key_head_dim, value_head_dim: K and V.
        conv_width: taps of the short convolution.
        norm_eps: of the output norm.
        allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1).

    Raises:
        TypeError, ValueError: a size is no int of at least 1, or the heads do not divide.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-6
    allow_negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_width"):
            check_positive_int(name, getattr(self, name))
        check_divides("num_key_heads", self.num_key_heads, "num_value_heads", self.num_value_heads)

    @property
    def recurrence(self) -> Recurrence:
        return Recurrence(
            num_value_heads=self.num_value_heads,
            num_key_heads=self.num_key_heads,
            key_dim=self.key_head_dim,
            value_dim=self.value_head_dim,
            delta_rule=True,
            gate="head",
        )

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_width + self.value_width


class GatedDeltaNet(nnx.Module):
    """A Gated DeltaNet mixer: ``cache, y = mixer(cache, x, pointer)``.

    Args:
        config: sizes.
        dtype: of activations and projections. A_log and dt_bias stay float32 whatever it is.
        param_dtype: of the weights.
        rngs: for initialisation.
    """

    def __init__(
        self, config: GatedDeltaNetConfig, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.sharding: Sharding | None = None
        hidden, heads = config.hidden_size, config.num_value_heads
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.in_proj_qkv = linear(hidden, config.conv_channels, **types)
        self.in_proj_z = linear(hidden, config.value_width, **types)
        self.in_proj_b = linear(hidden, heads, **types)
        self.in_proj_a = linear(hidden, heads, **types)
        self.conv1d = ShortConv(config.conv_channels, config.conv_width, bias=False, param_dtype=param_dtype, rngs=rngs)
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)))
        self.dt_bias = nnx.Param(jnp.ones(heads, jnp.float32))
        self.norm = nnx.Param(jnp.ones(config.value_head_dim, param_dtype))
        self.out_proj = linear(config.value_width, hidden, **types)

    @property
    def recurrence(self) -> Recurrence:
        """Of this mixer's caches: the config's, split over the mesh if there is one."""
        return self.config.recurrence if self.sharding is None else self.sharding.split(self.config.recurrence)

    def init_cache(self, num_slots: int, policy: ReplayPolicy | None = None) -> MixerCache:
        """A cache of fresh slots; a policy of None is the default one with records in this mixer's dtype."""
        c = self.config
        return init_mixer_cache(self.recurrence, policy, num_slots, c.conv_width, c.conv_channels, self.dtype)

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
        """A token, T drafts or (with ``prefill``) a prompt of each row. The pointer is read here and moved by the caller.

        Args:
            cache: this mixer's slots.
            x: [B, T, hidden_size]
            pointer: before these tokens; shared by all layers.
            slots, lengths: as in ``replayssm_jax.verify``. [B] int
            prefill: static; a prompt of any length that ends folded, instead of at most max_draft uncommitted drafts.
            implementation: as in ``replayssm_jax.verify``.

        Returns:
            The cache and y, zero past ``lengths``. [B, T, hidden_size]

        Raises:
            TypeError, ValueError, NotImplementedError: as ``replayssm_jax.verify``.
        """
        check_hidden(x, self.config.hidden_size)
        check_cache(cache, self.recurrence, self.config.conv_width, self.config.conv_channels, self.dtype)
        x = x.astype(self.dtype)
        conv, qkv = self.conv1d(cache.conv, self.in_proj_qkv(x), pointer, slots, lengths)
        tokens = self._tokens(x, qkv)
        cache, out = advance(cache, conv, tokens, pointer, slots, lengths, prefill, implementation, self.sharding)
        z = self.in_proj_z(x).reshape(out.shape).astype(jnp.float32)
        gated = rms_norm(out, self.config.norm_eps) * self.norm[...].astype(jnp.float32) * jax.nn.silu(z)
        y = self.out_proj(gated.reshape(*x.shape[:2], -1).astype(self.dtype))
        return cache, jnp.where(live_mask(x, pointer, slots, lengths)[..., None], y, 0)

    def _tokens(self, x: Array, qkv: Array) -> Tokens:
        c = self.config
        q, k, v = parts(self.sharding, qkv, [c.key_width, 2 * c.key_width])
        q = q.reshape(*x.shape[:2], c.num_key_heads, c.key_head_dim)
        k = k.reshape(*x.shape[:2], c.num_key_heads, c.key_head_dim)
        a, b = self.in_proj_a(x).astype(jnp.float32), self.in_proj_b(x).astype(jnp.float32)
        return Tokens(
            q=q,
            k=k,
            v=v.reshape(*x.shape[:2], c.num_value_heads, c.value_head_dim),
            log_decay=-jnp.exp(self.A_log[...]) * jax.nn.softplus(a + self.dt_bias[...]),
            beta=jax.nn.sigmoid(b) * (2.0 if c.allow_negative_eigenvalues else 1.0),
            q_scale=l2_factor(q) * c.key_head_dim**-0.5,
            k_scale=l2_factor(k),
        )
