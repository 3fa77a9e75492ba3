"""Mixtures of experts route as published and multiply each expert with its own tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from replayssm_jax.models.moe import Experts, SigmoidRouting, sigmoid_top_k, softmax_top_k

TYPES = {"dtype": jnp.float32, "param_dtype": jnp.float32}


def naive_experts(experts: Experts, x: np.ndarray, weights: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    up, down = (np.asarray(p[...], np.float64) for p in (experts.up_proj, experts.down_proj))
    gate = None if experts.gate_proj is None else np.asarray(experts.gate_proj[...], np.float64)
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        for weight, e in zip(weights[token], chosen[token], strict=True):
            hidden = np.maximum(row @ up[e], 0) ** 2
            if gate is not None:
                g = row @ gate[e]
                hidden = g / (1 + np.exp(-g)) * (row @ up[e])
            out[token] += weight * (hidden @ down[e])
    return out


@pytest.mark.parametrize("tokens", [1, 37], ids=["one_token", "many_tokens"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "squared_relu"])
def test_experts_equal_a_loop_over_tokens_with_experts_nobody_chose(tokens, gated):
    rng = np.random.default_rng()
    experts = Experts(6, 24, 20, gated=gated, rngs=nnx.Rngs(0), **TYPES)
    x = rng.normal(size=(tokens, 24)).astype(np.float32)
    chosen = np.stack([rng.permutation(4)[:2] for _ in range(tokens)])  # experts 4 and 5 get nothing
    weights = rng.random((tokens, 2)).astype(np.float32)
    got = jax.jit(experts)(jnp.asarray(x), jnp.asarray(weights), jnp.asarray(chosen))
    expected = naive_experts(experts, x, weights, chosen)
    assert np.linalg.norm(got - expected) < 2e-6 * np.linalg.norm(expected)


def test_softmax_routing_takes_the_largest_and_renormalises():
    logits = jnp.array([[0.0, 2.0, 1.0, -1.0]])
    weights, chosen = softmax_top_k(logits, 2, renormalise=True)
    np.testing.assert_array_equal(chosen, [[1, 2]])
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)
    weights, _ = softmax_top_k(logits, 2, renormalise=False)
    assert weights.sum() < 1


def test_correction_bias_changes_the_choice_and_not_the_weights():
    logits, bias = jnp.array([[1.0, 0.5, 0.0]]), jnp.array([0.0, 0.0, 5.0])
    weights, chosen = sigmoid_top_k(logits, bias, SigmoidRouting(experts_per_token=2, scale=2.5))
    np.testing.assert_array_equal(np.sort(chosen), [[0, 2]])
    scores = 1 / (1 + np.exp(-np.array([1.0, 0.0])))
    np.testing.assert_allclose(np.sort(weights[0]), np.sort(2.5 * scores / scores.sum()), rtol=1e-6)


def test_only_experts_of_the_best_groups_are_chosen():
    # group 0 holds the single best expert, group 1 the best pair
    logits = jnp.array([[3.0, -9.0, 2.0, 2.0]])
    routing = SigmoidRouting(experts_per_token=2, num_groups=2, top_groups=1)
    _, chosen = sigmoid_top_k(logits, jnp.zeros(4), routing)
    np.testing.assert_array_equal(np.sort(chosen), [[2, 3]])
