"""Layers between the mixers: norms, the gated MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers.parts import linear, rms_norm

Array = jax.Array


class CenteredRMSNorm(nnx.Module):
    """x / rms(x) * (1 + weight) over the last axis, in float32: Qwen's norm, whose weights are kept around zero."""

    def __init__(self, features: int, eps: float, *, param_dtype: Any):
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros(features, param_dtype))

    def __call__(self, x: Array) -> Array:
        return (rms_norm(x, self.eps) * (1.0 + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, features: int, eps: float, *, dtype: Any, param_dtype: Any):
        self.eps, self.dtype = eps, jnp.dtype(dtype)
        self.weight = nnx.Param(jnp.ones(features, param_dtype))

    def __call__(self, x: Array) -> Array:
        return (rms_norm(x, self.eps) * self.weight[...].astype(jnp.float32)).astype(self.dtype)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate_proj = linear(hidden, intermediate, **types)
        self.up_proj = linear(hidden, intermediate, **types)
        self.down_proj = linear(intermediate, hidden, **types)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class SquaredReluMLP(nnx.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        types: dict[str, Any] = {"bias": bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.up_proj = linear(hidden, intermediate, **types)
        self.down_proj = linear(intermediate, hidden, **types)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jnp.square(jax.nn.relu(self.up_proj(x))))
