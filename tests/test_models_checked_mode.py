"""Under checkify a model names what only run time can show: unknown tokens and sequences past the cache's end."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import checkify

from replayssm_jax.models import from_pretrained

FOLDER = pathlib.Path(__file__).parent / "goldens" / "nemotron_h"


@functools.cache
def checked():
    model = from_pretrained(FOLDER)
    graph, weights = nnx.split(model)

    def prefill(weights, cache, tokens, lengths):
        return nnx.merge(graph, weights).prefill(cache, tokens, lengths)

    run = jax.jit(checkify.checkify(prefill, errors=checkify.user_checks))
    cache = model.init_cache(2, 8)
    return lambda tokens, lengths: run(weights, cache, jnp.asarray(tokens), jnp.asarray(lengths))[0].get()


@pytest.mark.parametrize("token", [128, -1])
def test_a_token_outside_the_vocabulary(token):
    assert "tokens must be in [0, 128)" in checked()([[1, 2, token, 3], [1, 2, 3, 4]], [4, 4])
    assert checked()([[1, 2, 3, token], [1, 2, 3, 4]], [3, 4]) is None, "padding may hold anything"


def test_a_sequence_past_max_length():
    tokens = [[1] * 9] * 2
    assert "max_length=8" in checked()(tokens, [9, 1])
    assert checked()(tokens, [8, 1]) is None
