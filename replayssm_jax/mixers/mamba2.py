"""Mamba-2, as in Mamba-2, Nemotron-H, Nemotron 3, Bamba and Codestral Mamba.

    z, xBC, dt = W_in u                          xBC = silu(conv(xBC) + bias) splits into x, B, C
    dt         = clip(softplus(dt + dt_bias), time_step_limit)    per head
    S_t        = exp(dt A) S_{t-1} + dt x B^T                      A = -exp(A_log)
    y_t        = S_t C + D x
    out_t      = W_o [rms_norm(y_t silu(z)) w]                     the norm over groups of channels, gate first

Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers.cache import MixerCache, advance, check_cache, init_mixer_cache
from replayssm_jax.mixers.parts import ShortConv, check_hidden, linear, live_mask, rms_norm
from replayssm_jax.per_device import parts
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.sharding import Sharding
from replayssm_jax.state import Recurrence, ReplayPolicy, Tokens
from replayssm_jax.trees import check_divides, check_positive_int

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Sizes of a Mamba-2 mixer.

    Args:
        hidden_size: width of the mixer's input and output.
        num_heads, head_dim: H and P (the state's rows, V); the inner width is H * P.
        state_size: N (the state's columns, K).
        num_groups: G, groups of heads that share B and C; divides H.
        norm_groups: groups of channels that are normalised apart: num_groups in Nemotron-H, 1 in Mamba-2 checkpoints.
        conv_width, conv_bias: of the short convolution.
        proj_bias: whether in_proj and out_proj have biases.
        norm_eps: of the gated norm.
        time_step_limit: dt is clipped to it, in prompts and steps alike.

    Raises:
        TypeError, ValueError: a size is no int of at least 1, groups do not divide, or the limits are not in order.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    norm_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norm_eps: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_heads", "head_dim", "state_size", "num_groups", "norm_groups", "conv_width")
        for name in sizes:
            check_positive_int(name, getattr(self, name))
        check_divides("num_groups", self.num_groups, "num_heads", self.num_heads)
        check_divides("norm_groups", self.norm_groups, "num_heads * head_dim", self.inner_width)
        limit = self.time_step_limit
        if not (isinstance(limit, tuple) and len(limit) == 2 and 0 <= limit[0] <= limit[1]):
            raise ValueError(f"time_step_limit must be (low, high) with 0 <= low <= high, got {limit}")

    @property
    def recurrence(self) -> Recurrence:
        return Recurrence(
            num_value_heads=self.num_heads,
            num_key_heads=self.num_groups,
            key_dim=self.state_size,
            value_dim=self.head_dim,
            delta_rule=False,
            gate="head",
        )

    @property
    def inner_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        return self.num_groups * self.state_size

    @property
    def conv_channels(self) -> int:
        return self.inner_width + 2 * self.group_width


class Mamba2(nnx.Module):
    """A Mamba-2 mixer: ``cache, y = mixer(cache, x, pointer)``. Arguments as ``GatedDeltaNet``."""

    def __init__(self, config: Mamba2Config, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.sharding: Sharding | None = None
        hidden, inner, heads = config.hidden_size, config.inner_width, config.num_heads
        types: dict[str, Any] = {"bias": config.proj_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.in_proj = linear(hidden, inner + config.conv_channels + heads, **types)
        self.conv1d = ShortConv(
            config.conv_channels, config.conv_width, bias=config.conv_bias, param_dtype=param_dtype, rngs=rngs
        )
        self.dt_bias = nnx.Param(_initial_dt_bias(rngs, heads))
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)))
        self.D = nnx.Param(jnp.ones(heads, jnp.float32))
        self.norm = nnx.Param(jnp.ones(inner, param_dtype))
        self.out_proj = linear(inner, hidden, **types)

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
        """A token, T drafts or (with ``prefill``) a prompt of each row. See ``GatedDeltaNet.__call__``."""
        c = self.config
        check_hidden(x, c.hidden_size)
        check_cache(cache, self.recurrence, c.conv_width, c.conv_channels, self.dtype)
        projected = self.in_proj(x.astype(self.dtype))
        z, xbc, dt = parts(self.sharding, projected, [c.inner_width, c.inner_width + c.conv_channels])
        conv, xbc = self.conv1d(cache.conv, xbc, pointer, slots, lengths)
        tokens = self._tokens(xbc, dt)
        cache, out = advance(cache, conv, tokens, pointer, slots, lengths, prefill, implementation, self.sharding)
        out = out.astype(jnp.float32) + self.D[...][:, None] * tokens.v.astype(jnp.float32)
        gated = out.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
        normed = rms_norm(gated.reshape(*x.shape[:2], c.norm_groups, -1), c.norm_eps).reshape(z.shape)
        y = self.out_proj((normed * self.norm[...].astype(jnp.float32)).astype(self.dtype))
        return cache, jnp.where(live_mask(x, pointer, slots, lengths)[..., None], y, 0)

    def _tokens(self, xbc: Array, dt: Array) -> Tokens:
        c = self.config
        x, B, C = parts(self.sharding, xbc, [c.inner_width, c.inner_width + c.group_width])
        dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...]), *c.time_step_limit)
        return Tokens(
            q=C.reshape(*C.shape[:2], c.num_groups, c.state_size),
            k=B.reshape(*B.shape[:2], c.num_groups, c.state_size),
            v=x.reshape(*x.shape[:2], c.num_heads, c.head_dim),
            log_decay=-jnp.exp(self.A_log[...]) * dt,
            beta=dt,
        )


def _initial_dt_bias(rngs: nnx.Rngs, heads: int) -> Array:
    """Biases whose softplus is log-uniform in 0.001 .. 0.1."""
    dt = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, math.log(1e-3), math.log(1e-1)))
    return dt + jnp.log(-jnp.expm1(-dt))
