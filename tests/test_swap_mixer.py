"""A user's own block: the mixer is one line, and the block's cache is a ``lax.scan`` carry."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from replayssm_jax import ReplayPointer, ReplayPolicy, after_prefill, after_verify, commit, init_pointer, materialize
from replayssm_jax.mixers import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KimiDeltaAttention,
    KimiDeltaAttentionConfig,
    Mamba2,
    Mamba2Config,
    MixerCache,
)
from tests.mixer_runs import quick_jit

HIDDEN, ROWS, PROMPT, TOTAL = 16, 2, 5, 16
POLICY = ReplayPolicy(window=8)

MIXERS = {
    "GatedDeltaNet": functools.partial(
        GatedDeltaNet,
        GatedDeltaNetConfig(hidden_size=HIDDEN, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8),
    ),
    "KimiDeltaAttention": functools.partial(
        KimiDeltaAttention, KimiDeltaAttentionConfig(hidden_size=HIDDEN, num_heads=2, head_dim=8)
    ),
    "Mamba2": functools.partial(Mamba2, Mamba2Config(hidden_size=HIDDEN, num_heads=4, head_dim=8, state_size=8)),
}

Cache = tuple[MixerCache, ReplayPointer]
every_mixer = pytest.mark.parametrize("name", MIXERS)


class Block(nnx.Module):
    """A residual block as a user writes it; ``mixer`` is any of the package's."""

    def __init__(self, mixer, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.mixer = mixer(rngs=rngs)  # the one line

    def init_cache(self, num_slots: int) -> Cache:
        return self.mixer.init_cache(num_slots, POLICY), init_pointer(num_slots, POLICY.window, POLICY.max_draft)

    def prompt(self, cache: Cache, x: jax.Array) -> tuple[Cache, jax.Array]:
        layer, pointer = cache
        layer, y = self.mixer(layer, self.norm(x), pointer, prefill=True)
        return (layer, after_prefill(pointer, None, jnp.full(len(x), x.shape[1]))), x + y

    def __call__(self, cache: Cache, x: jax.Array) -> tuple[Cache, jax.Array]:
        layer, pointer = cache
        layer, y = self.mixer(layer, self.norm(x)[:, None], pointer)
        return (layer, commit(after_verify(pointer), 1)), x + y[:, 0]


@functools.cache
def make(name: str) -> Block:
    return Block(MIXERS[name], rngs=nnx.Rngs(0))


def draw() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, TOTAL, HIDDEN)), jnp.float32)


def whole_prompt(block: Block, x: jax.Array) -> tuple[Cache, jax.Array]:
    return _whole_prompt(*nnx.split(block), x)


@functools.partial(quick_jit, static_argnames="graph")
def _whole_prompt(graph, weights, x):
    block = nnx.merge(graph, weights)
    return block.prompt(block.init_cache(ROWS), x)


@nnx.jit
def prompt_and_decode(block: Block, x: jax.Array) -> tuple[Cache, jax.Array]:
    cache, first = block.prompt(block.init_cache(ROWS), x[:, :PROMPT])
    cache, rest = jax.lax.scan(block, cache, jnp.swapaxes(x[:, PROMPT:], 0, 1))
    return cache, jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], axis=1)


# one mixer as in use: its programs are optimised
@pytest.mark.parametrize("name", [pytest.param("GatedDeltaNet", marks=pytest.mark.optimised), "KimiDeltaAttention", "Mamba2"])
def test_prompt_and_decode_equal_one_long_prompt(name):
    (one, one_pointer), want = whole_prompt(make(name), draw())
    (two, two_pointer), got = prompt_and_decode(make(name), draw())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(want) - draw()).max() > 0.1, "the mixer answers"
    states = materialize(two.state(two_pointer)), materialize(one.state(one_pointer))
    np.testing.assert_allclose(*states, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(one_pointer.position, two_pointer.position)
    assert two_pointer.length.any(), "some records are still in the ring"


@every_mixer
def test_decode_loop_compiles_once(name):
    """Whatever the fill of the ring: one trace, a donated cache, and the same answers as the scan."""
    chex.clear_trace_counter()  # it counts by name, and every mixer's step has the same one
    graph, weights = nnx.split(make(name))

    @functools.partial(quick_jit, donate_argnames="cache")
    @chex.assert_max_traces(n=1)
    def step(weights, cache, x):
        return nnx.merge(graph, weights)(cache, x)

    cache, outputs = make(name).init_cache(ROWS), []
    for x in jnp.swapaxes(draw(), 0, 1):
        old = cache
        cache, y = step(weights, cache, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        outputs.append(y)
    _, want = whole_prompt(make(name), draw())
    np.testing.assert_allclose(np.stack(outputs, axis=1), want, rtol=1e-5, atol=1e-5)


@every_mixer
def test_block_trains(name):
    """Gradients reach every parameter, are those of finite differences, and lead downhill."""
    graph, weights = nnx.split(make(name))
    x = draw()
    target = jnp.roll(x, 1, axis=1)

    @quick_jit
    @jax.value_and_grad
    def loss(weights):
        block = nnx.merge(graph, weights)
        return jnp.mean((block.prompt(block.init_cache(ROWS), x)[1] - target) ** 2)

    value, gradients = loss(weights)
    for path, gradient in nnx.to_flat_state(gradients):
        assert np.isfinite(gradient.get_value()).all(), path
        assert np.asarray(gradient.get_value()).any(), path
    flat, unravel = ravel_pytree(weights)
    direction = ravel_pytree(gradients)[0]
    slope = jnp.linalg.norm(direction)
    ahead, behind = (loss(unravel(flat + step * direction / slope))[0] for step in (1e-2, -1e-2))
    np.testing.assert_allclose((ahead - behind) / 2e-2, slope, rtol=2e-2)
    assert behind < value < ahead
