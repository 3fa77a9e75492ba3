"""The rule that keeps or rejects drafts leaves the model's distribution as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax.decoding import speculative
from replayssm_jax.decoding.sampling import DRAFT, draw, token_keys

choose = jax.jit(speculative.choose)

ROWS, VOCAB = 60_000, 5
P = np.array([[0.4, 0.3, 0.2, 0.1, 0.0], [0.1, 0.1, 0.1, 0.2, 0.5], [0.25, 0.0, 0.25, 0.25, 0.25]])
Q = np.array([[0.1, 0.3, 0.2, 0.2, 0.2], [0.6, 0.1, 0.1, 0.1, 0.1]])


def logs(probabilities: np.ndarray) -> jax.Array:
    with np.errstate(divide="ignore"):
        return jnp.broadcast_to(jnp.asarray(np.log(probabilities), jnp.float32), (ROWS, *probabilities.shape))


def _chosen(drawn: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """60,000 rows with two drafts each: the drafts, the tokens and how many drafts are kept."""
    seed, position = jnp.arange(ROWS, dtype=jnp.uint32), jnp.full(ROWS, 3)
    if drawn:
        drafts = draw(logs(Q), token_keys(seed, position[:, None] + jnp.arange(2), DRAFT))
    else:
        drafts = jnp.broadcast_to(jnp.array([1, 4]), (ROWS, 2))
    counts = jnp.full(ROWS, 2)
    tokens, kept = choose(logs(P), drafts, counts, logs(Q) if drawn else None, seed, position)
    return np.asarray(drafts), np.asarray(tokens), np.asarray(kept)


def frequencies(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=VOCAB) / len(tokens)


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen drafts", "drawn drafts"])
def test_tokens_are_distributed_as_the_models(drawn):
    """Each token that a round emits, given that it emits it: five standard deviations of its frequency are allowed."""
    _, tokens, kept = _chosen(drawn)
    for place in range(3):
        emitted = tokens[kept >= place, place]
        assert len(emitted) > 2000
        allowed = 5 * np.sqrt(P[place] * (1 - P[place]) / len(emitted))
        assert (np.abs(frequencies(emitted) - P[place]) <= allowed).all(), (place, frequencies(emitted))


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen drafts", "drawn drafts"])
def test_drafts_are_kept_as_often_as_can_be(drawn):
    """With probability sum min(p, q): of a chosen draft, p of it."""
    drafts, tokens, kept = _chosen(drawn)
    rate = np.minimum(P[:2], Q).sum(axis=1) if drawn else P[[0, 1], [1, 4]]
    assert abs((kept >= 1).mean() - rate[0]) < 0.01
    assert abs((kept[kept >= 1] == 2).mean() - rate[1]) < 0.015
    assert (tokens[kept >= 1, 0] == drafts[kept >= 1, 0]).all()


def test_one_token_is_independent_of_the_next():
    _, tokens, kept = _chosen(True)
    pairs = tokens[kept >= 1][:, :2]
    for first in range(VOCAB):
        second = pairs[pairs[:, 0] == first, 1]
        if len(second) > 1000:
            allowed = 5 * np.sqrt(P[1] * (1 - P[1]) / len(second))
            assert (np.abs(frequencies(second) - P[1]) <= allowed).all()


def test_rows_without_drafts_draw_as_plain_rows_do():
    seed, position = jnp.arange(8, dtype=jnp.uint32), jnp.arange(8)
    targets, drafts = logs(P)[:8], jnp.zeros((8, 2), jnp.int32)
    tokens, kept = choose(targets, drafts, jnp.zeros(8, jnp.int32), logs(Q)[:8], seed, position)
    plain = draw(targets[:, 0], token_keys(seed, position))
    assert not kept.any()
    np.testing.assert_array_equal(tokens[:, 0], plain)


def test_greedy_rows_keep_the_most_likely_drafts_and_no_others():
    best = jnp.where(jnp.arange(VOCAB) == jnp.array([[2], [3], [4]]), 0.0, -jnp.inf)[None]
    for proposals in (None, jnp.zeros((1, 2, VOCAB))):
        for drafts, right in (([2, 3], 2), ([2, 1], 1), ([0, 3], 0)):
            tokens, kept = choose(
                best, jnp.array([drafts]), jnp.array([2]), proposals, jnp.array([5], jnp.uint32), jnp.array([0])
            )
            assert kept[0] == right
            assert tokens[0, : right + 1].tolist() == [2, 3, 4][: right + 1]


def test_a_drafter_that_says_nan_is_never_kept_and_does_no_harm():
    seed, position = jnp.arange(ROWS, dtype=jnp.uint32), jnp.zeros(ROWS, jnp.int32)
    proposals = jnp.full((ROWS, 2, VOCAB), jnp.nan)
    tokens, kept = choose(logs(P), jnp.ones((ROWS, 2), jnp.int32), jnp.full(ROWS, 2), proposals, seed, position)
    assert not kept.any()
    np.testing.assert_allclose(frequencies(np.asarray(tokens)[:, 0]), P[0], atol=0.012)
