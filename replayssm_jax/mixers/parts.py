"""Parts that the mixers share: projections, the short causal convolution with its history, norms."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.slots import check_counts, check_slots, gather_index, in_range

Array = jax.Array

_L2_EPS = 1e-6  # inside the square root, so a zero key stays zero


def linear(
    in_features: int, out_features: int, *, bias: bool = False, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
) -> nnx.Linear:
    """A projection whose float32 products are float32 (no TF32)."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=bias,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=lax.Precision.HIGHEST,
        rngs=rngs,
    )


def live_mask(x: Array, pointer: ReplayPointer, slots: Array | None, lengths: Array | None) -> Array:
    """Which tokens of x [B, T, ...] are real: in a real slot and before the row's length. [B, T] bool"""
    slots = check_slots(slots, pointer.num_slots, x.shape[0])
    lengths = check_counts(lengths, x.shape[0], x.shape[1], "lengths")
    return in_range(slots, pointer.num_slots)[:, None] & (jnp.arange(x.shape[1]) < lengths[:, None])


def check_hidden(x: Array, hidden_size: int) -> None:
    """Raises unless x is activations [B, T, hidden_size]."""
    if jnp.ndim(x) != 3 or x.shape[-1] != hidden_size or x.shape[1] < 1:
        raise ValueError(f"x must be [B, T, {hidden_size}] with T of at least 1, got shape {jnp.shape(x)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating-point activations, got {x.dtype}")


class ShortConv(nnx.Module):
    """Depthwise causal convolution and SiLU, y_t = silu(bias + sum_i w_i x_{t - width + 1 + i}), along a pointer.

    Its history is a ring addressed by position: the tokens before position p are read where they were written, so accepting or
    rejecting drafts needs no shift, a prompt shorter than the window needs no case, and a fresh slot needs no clearing
    (positions below zero read as zeros).
    """

    def __init__(self, channels: int, width: int, *, bias: bool, param_dtype: Any, rngs: nnx.Rngs):
        self.channels, self.width = channels, width
        bound = width**-0.5
        self.weight = nnx.Param(jax.random.uniform(rngs.params(), (width, channels), param_dtype, -bound, bound))
        self.bias = nnx.Param(jnp.zeros(channels, param_dtype)) if bias else None

    def __call__(
        self, history: Array, x: Array, pointer: ReplayPointer, slots: Array | None, lengths: Array | None
    ) -> tuple[Array, Array]:
        """Convolves T tokens of each row and records them behind the pointer.

        Args:
            history: [N, R, C]
            x: raw inputs. [B, T, C] history's dtype
            pointer: before these tokens.
            slots, lengths: as in ``verify``.

        Returns:
            The history, and the outputs [B, T, C] in x's dtype; dead tokens give garbage.
        """
        num_slots, ring, _ = history.shape
        before = self.width - 1
        slots = check_slots(slots, num_slots, x.shape[0])
        lengths = check_counts(lengths, x.shape[0], x.shape[1], "lengths")
        read = gather_index(slots, num_slots)
        position = pointer.position[read][:, None]

        past = position - before + jnp.arange(before)  # [B, width - 1]
        seen = jnp.where((past >= 0)[..., None], history[read[:, None], past % ring], 0)
        inputs = jnp.concatenate([seen, x], axis=1).astype(jnp.float32)
        weight = self.weight[...].astype(jnp.float32)
        out = sum(inputs[:, i : i + x.shape[1]] * weight[i] for i in range(self.width))
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)

        # only the last R tokens of a prompt can still be asked for
        last = min(ring, x.shape[1])
        token = lengths[:, None] - last + jnp.arange(last)  # [B, last]
        live = in_range(slots, num_slots)[:, None] & (token >= 0)
        newest = jnp.take_along_axis(x, jnp.maximum(token, 0)[..., None], axis=1)
        history = history.at[jnp.where(live, read[:, None], num_slots), (position + token) % ring].set(newest, mode="drop")
        return history, jax.nn.silu(out).astype(x.dtype)


def l2_factor(x: Array) -> Array:
    """1 / |x| over the last axis, float32; with it a normalised key is a raw key and a factor, and nothing is rounded."""
    return lax.rsqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1) + _L2_EPS)


def rms_norm(x: Array, eps: float) -> Array:
    """x / rms(x) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
