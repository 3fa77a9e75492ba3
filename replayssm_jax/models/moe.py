"""Mixtures of experts, routed as published. Tokens are sorted by expert, so each expert multiplies its own tokens only."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from replayssm_jax.mixers.parts import linear
from replayssm_jax.per_device import over_model
from replayssm_jax.sharding import Sharding

Array = jax.Array


def softmax_top_k(logits: Array, k: int, *, renormalise: bool) -> tuple[Array, Array]:
    """Qwen's routing: the k largest softmax probabilities.

    Args:
        logits: [tokens, E] float32
        k: experts per token.
        renormalise: whether the k weights are made to sum to 1.

    Returns:
        Weights [tokens, k] float32 and experts [tokens, k] int32.
    """
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), k)
    if renormalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidRouting:
    """How ``sigmoid_top_k`` routes.

    Args:
        experts_per_token: k
        num_groups, top_groups: only experts of the ``top_groups`` groups whose two best sum highest can be chosen.
        renormalise: whether the k scores are made to sum to 1 first.
        scale: of the weights.
    """

    experts_per_token: int
    num_groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0


def sigmoid_top_k(logits: Array, correction: Array, routing: SigmoidRouting) -> tuple[Array, Array]:
    """DeepSeek-style routing (Kimi, Nemotron): experts chosen by score plus correction bias, weighted by score alone.

    Args:
        logits: [tokens, E] float32
        correction: bias of the choice. [E] float32
        routing: see there.

    Returns:
        Weights [tokens, k] float32 and experts [tokens, k] int32.
    """
    scores = jax.nn.sigmoid(logits)
    choice = scores + correction
    if routing.num_groups > 1:
        grouped = choice.reshape(choice.shape[0], routing.num_groups, -1)
        best_two = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
        _, kept = lax.top_k(best_two, routing.top_groups)
        allowed = jnp.any(jax.nn.one_hot(kept, routing.num_groups, dtype=bool), axis=1)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = lax.top_k(choice, routing.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if routing.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * routing.scale, experts


class Experts(nnx.Module):
    """E small MLPs: down(silu(gate(x)) * up(x)), or down(relu(up(x))^2) where they are not gated."""

    def __init__(
        self, num_experts: int, features: int, intermediate: int, *, gated: bool, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
    ):
        self.num_experts, self.dtype = num_experts, jnp.dtype(dtype)
        self.sharding: Sharding | None = None

        def matrices(rows: int, columns: int) -> nnx.Param:
            shape = (num_experts, rows, columns)
            return nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * rows**-0.5)

        self.gate_proj = matrices(features, intermediate) if gated else None
        self.up_proj = matrices(features, intermediate)
        self.down_proj = matrices(intermediate, features)

    def __call__(self, x: Array, weights: Array, experts: Array) -> Array:
        """The weighted sum of each token's experts. x [tokens, D], weights and experts [tokens, k] -> [tokens, D]"""
        gate = None if self.gate_proj is None else self.gate_proj[...].astype(self.dtype)
        up, down = (matrices[...].astype(self.dtype) for matrices in (self.up_proj, self.down_proj))
        if self.sharding is None:
            return weighted_experts(x, weights, experts, gate, up, down).astype(x.dtype)
        return self._over_devices(self.sharding, x, weights, experts, gate, up, down).astype(x.dtype)

    def _over_devices(self, sharding: Sharding, x: Array, weights: Array, experts: Array, *matrices: Any) -> Array:
        """Every device of the model axis sums its own experts, or all of them where the axis does not divide them."""
        split = self.num_experts % sharding.model_size == 0
        own = self.num_experts // sharding.model_size

        def local(x: Array, weights: Array, experts: Array, *matrices: Any) -> Array:
            if not split:
                return weighted_experts(x, weights, experts, *matrices)
            first = lax.axis_index(sharding.model) * own
            mine = (experts >= first) & (experts < first + own)
            partial = weighted_experts(x, weights, jnp.where(mine, experts - first, own), *matrices)
            return partial if sharding.model_size == 1 else lax.psum(partial, sharding.model)

        lie = P(sharding.model) if split else P()
        run = over_model(sharding, local, in_specs=(P(), P(), P(), lie, lie, lie), out_specs=P())
        return run(x, weights, experts, *matrices)


def weighted_experts(x: Array, weights: Array, experts: Array, gate: Array | None, up: Array, down: Array) -> Array:
    """The weighted sum of each token's experts, each of which multiplies its own tokens only.

    Args:
        x: [tokens, D]
        weights: [tokens, k] float32
        experts: E counts for nothing: an expert of another device. [tokens, k] int32, 0 .. E
        gate: None where experts are not gated. [E, D, F]
        up: [E, D, F]
        down: [E, F, D]

    Returns:
        [tokens, D] float32
    """
    tokens, k = experts.shape
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=up.shape[0])  # the rest lies behind the last expert's tokens
    product = functools.partial(lax.ragged_dot, group_sizes=sizes, precision=lax.Precision.HIGHEST)
    rows = x[order // k]
    hidden = product(rows, up)
    hidden = jnp.square(jax.nn.relu(hidden)) if gate is None else jax.nn.silu(product(rows, gate)) * hidden
    out = product(hidden, down)
    unsorted = jnp.zeros_like(out).at[order].set(out).reshape(tokens, k, -1)
    unsorted = jnp.where((experts < up.shape[0])[..., None], unsorted, 0)
    # the sum over experts is float32: weights are, and bfloat16 addends would lose the small ones
    return jnp.sum(unsorted.astype(jnp.float32) * weights[..., None], axis=1)


class Router(nnx.Module):
    """Expert scores of each token, in float32; ``correction`` is the published bias of the choice, where there is one."""

    def __init__(self, features: int, num_experts: int, *, correction: bool, param_dtype: Any, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (features, num_experts), param_dtype) * features**-0.5)
        self.correction = nnx.Param(jnp.zeros(num_experts, jnp.float32)) if correction else None

    def __call__(self, x: Array) -> Array:
        """[tokens, D] -> logits [tokens, E] float32"""
        weight = self.weight[...].astype(jnp.float32)
        return jnp.dot(x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST)


class SoftmaxMoE(nnx.Module):
    """Qwen's mixture: softmax routing, and a shared expert behind a sigmoid gate."""

    def __init__(
        self,
        hidden: int,
        *,
        num_experts: int,
        experts_per_token: int,
        intermediate: int,
        renormalise: bool,
        shared_expert: Any,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.experts_per_token, self.renormalise = experts_per_token, renormalise
        self.gate = Router(hidden, num_experts, correction=False, param_dtype=param_dtype, rngs=rngs)
        self.experts = Experts(num_experts, hidden, intermediate, gated=True, **types)
        self.shared_expert = shared_expert
        self.shared_expert_gate = linear(hidden, 1, **types)

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]"""
        flat = x.reshape(-1, x.shape[-1])
        routed = softmax_top_k(self.gate(flat), self.experts_per_token, renormalise=self.renormalise)
        shared = jax.nn.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return (self.experts(flat, *routed) + shared).reshape(x.shape)


class SigmoidMoE(nnx.Module):
    """Kimi's and Nemotron's mixture: sigmoid routing with a correction bias, a shared expert, optionally a latent space.

    Args:
        hidden: width of x.
        num_experts, intermediate: of the routed experts.
        gated: whether experts have a gate projection.
        latent: width of the space the routed experts work in, None for ``hidden`` itself.
        routing: of ``sigmoid_top_k``.
        shared_expert: module added to the routed sum, or None.
        bias: of the projections into and out of the latent space.
    """

    def __init__(
        self,
        hidden: int,
        *,
        num_experts: int,
        intermediate: int,
        gated: bool,
        latent: int | None,
        routing: SigmoidRouting,
        shared_expert: Any,
        bias: bool = False,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.routing = routing
        self.gate = Router(hidden, num_experts, correction=True, param_dtype=param_dtype, rngs=rngs)
        self.experts = Experts(num_experts, latent or hidden, intermediate, gated=gated, **types)
        self.shared_experts = shared_expert
        self.fc1_latent_proj = None if latent is None else linear(hidden, latent, bias=bias, **types)
        self.fc2_latent_proj = None if latent is None else linear(latent, hidden, bias=bias, **types)

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]"""
        flat = x.reshape(-1, x.shape[-1])
        correction = self.gate.correction
        assert correction is not None
        routed = sigmoid_top_k(self.gate(flat), correction[...], self.routing)
        inner = flat if self.fc1_latent_proj is None else self.fc1_latent_proj(flat)
        out = self.experts(inner, *routed)
        out = out if self.fc2_latent_proj is None else self.fc2_latent_proj(out)
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        return out.reshape(x.shape)
