"""A mixer within a Linen model, through Flax's own bridge: its weights are the model's, its cache the caller's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from replayssm_jax import after_prefill, after_verify, commit, init_pointer
from tests.mixer_runs import quick_jit
from tests.test_swap_mixer import HIDDEN, MIXERS, POLICY, PROMPT, ROWS, draw

# The bridge asks no mixer what it is: one here, the others in `make long`.
every_mixer = pytest.mark.parametrize(
    "name", [name if name == "GatedDeltaNet" else pytest.param(name, marks=pytest.mark.long) for name in MIXERS]
)


class Block(linen.Module):
    """A Linen user's residual block around one of the package's mixers."""

    name_of_mixer: str

    def setup(self):
        mixer = MIXERS[self.name_of_mixer]  # a class and its config
        self.mixer = nnx.bridge.ToLinen(mixer.func, args=mixer.args)
        self.norm, self.out = linen.RMSNorm(), linen.Dense(HIDDEN)

    def __call__(self, cache, x, pointer, prefill=False):
        cache, y = self.mixer(cache, self.norm(x), pointer, prefill=prefill)
        return cache, x + self.out(y)


def start(name):
    """The block, its variables, and a fresh cache and pointer."""
    block = Block(name)
    cache = MIXERS[name](rngs=nnx.Rngs(0)).init_cache(ROWS, POLICY)
    pointer = init_pointer(ROWS, POLICY.window, POLICY.max_draft)
    return block, quick_jit(block.init)(jax.random.key(1), cache, draw()[:, :1], pointer), cache, pointer


@functools.partial(quick_jit, static_argnames=("run", "prompt"))
def decode(run, prompt, weights, cache, pointer, x):
    """The first ``prompt`` tokens at once, the others one by one; run(weights, cache, x, pointer, prefill=...)."""
    cache, first = run(weights, cache, x[:, :prompt], pointer, prefill=True)
    pointer = after_prefill(pointer, None, jnp.full(ROWS, prompt))

    def step(carry, x):
        cache, pointer = carry
        cache, y = run(weights, cache, x[:, None], pointer)
        return (cache, commit(after_verify(pointer), 1)), y[:, 0]

    _, rest = jax.lax.scan(step, (cache, pointer), jnp.swapaxes(x[:, prompt:], 0, 1))
    return jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], axis=1)


@every_mixer
def test_mixer_decodes_within_a_linen_model(name):
    """As the same weights do without Linen."""
    block, variables, cache, pointer = start(name)
    got = decode(block.apply, PROMPT, variables, cache, pointer, draw())
    mixer = MIXERS[name](rngs=nnx.Rngs(0))
    weights = nnx.state(mixer, nnx.Param)
    nnx.replace_by_pure_dict(weights, dict(variables["params"]["mixer"]))
    nnx.update(mixer, weights)

    def plain(params, cache, x, pointer, prefill=False):
        norm, out = linen.RMSNorm(), linen.Dense(HIDDEN)
        cache, y = mixer(cache, norm.apply({"params": params["norm"]}, x), pointer, prefill=prefill)
        return cache, x + out.apply({"params": params["out"]}, y)

    np.testing.assert_allclose(got, decode(plain, PROMPT, variables["params"], cache, pointer, draw()), rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(got) - draw()).max() > 0.1, "the mixer answers"


@every_mixer
def test_linen_owns_every_weight_of_the_mixer(name):
    """Gradients reach all of them through Linen's own parameters, and nothing else is kept."""
    block, variables, cache, pointer = start(name)
    assert set(variables) == {"params"}
    count = sum(x.size for x in jax.tree.leaves(nnx.state(MIXERS[name](rngs=nnx.Rngs(0)), nnx.Param)))
    assert sum(x.size for x in jax.tree.leaves(variables["params"]["mixer"])) == count

    @quick_jit
    @jax.grad
    def gradient(params):
        return jnp.mean(jnp.square(block.apply({"params": params}, cache, draw(), pointer, prefill=True)[1]))

    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(variables["params"])["mixer"]):
        assert np.isfinite(leaf).all(), path
        assert np.asarray(leaf).any(), path
