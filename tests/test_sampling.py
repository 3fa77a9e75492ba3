"""Sampling: greedy, temperature and restrictions against NumPy, draws that do not depend on the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax.decoding.sampling import Sampling, SamplingParams, adjust, penalize, sample
from replayssm_jax.decoding.text import ByteTokenizer, load_tokenizer, pad_prompts

LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))


def draws(count: int, logits=LOGITS, **options) -> np.ndarray:
    sampling = Sampling.of([SamplingParams(**options)] * count)
    return np.asarray(sample(jnp.broadcast_to(logits, (count, logits.shape[-1])), sampling, jnp.arange(count)))


def test_greedy_takes_the_most_likely_token():
    assert (draws(5) == 0).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-38])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature):
    assert (draws(5, jnp.array([[1.0, 3.0, 2.0]]), temperature=temperature) == 1).all()


def test_draws_follow_the_distribution():
    counts = np.bincount(draws(4000, temperature=1.0), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_nucleus_keeps_the_fewest_tokens_that_reach_top_p():
    assert set(draws(400, temperature=1.0, top_p=0.79)) == {0, 1}
    assert set(draws(400, temperature=1.0, top_p=0.81)) == {0, 1, 2}
    assert set(draws(50, temperature=1.0, top_p=1e-6)) == {0}
    assert set(draws(400, LOGITS[:, ::-1], temperature=1.0, top_p=1e-38)) == {3}  # 0 in float32


def test_numbers_that_float32_does_not_hold_are_refused():
    for field in ("temperature", "repetition_penalty"):
        for value in (10**400, 1e39, float("nan")):
            with pytest.raises(ValueError, match=field):
                SamplingParams(**{field: value})
    with pytest.raises(ValueError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-46)


def test_top_k_and_min_p_keep_what_they_say():
    assert set(draws(400, temperature=1.0, top_k=2)) == {0, 1}
    assert set(draws(400, temperature=1.0, min_p=0.29)) == {0, 1, 2}
    assert set(draws(400, temperature=1.0, min_p=0.31)) == {0, 1}
    assert set(draws(50, temperature=5.0, top_k=1)) == {0}
    equal = jnp.zeros((1, 4))
    assert set(draws(400, equal, temperature=1.0, top_k=2)) == {0, 1}  # of equals the first ones


def test_rows_that_ask_for_different_things_are_adjusted_as_in_numpy(rng):
    """Temperature, then top-k, top-p and min-p, each on what the one before has left."""
    asked = [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        {},
    ]
    logits = rng.normal(0, 2, (len(asked), 2, 30)).astype(np.float32)
    got = jax.nn.softmax(adjust(jnp.asarray(logits), Sampling.of([SamplingParams(**a) for a in asked])), axis=-1)
    for row, options in enumerate(asked):
        for token in range(2):
            np.testing.assert_allclose(got[row, token], _distribution(logits[row, token], **options), atol=1e-6)


def _distribution(logits, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0):
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    if top_k:
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
        p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p)
        kept = order[np.cumsum(p[order]) - p[order] < top_p]
        p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def test_the_penalty_falls_on_what_has_occurred_and_on_drafts_before():
    logits = jnp.array([[[2.0, -2.0, 1.0, 3.0]] * 3, [[2.0, -2.0, 1.0, 3.0]] * 3])
    text, length = jnp.array([[1, 3, 0], [0, 3, 3]]), jnp.array([1, 0])  # the rest is garbage
    got = penalize(logits, jnp.array([2.0, 4.0]), text, length, jnp.array([[3, 0], [2, 2]]))
    np.testing.assert_allclose(got[0], [[2, -4, 1, 3], [2, -4, 1, 1.5], [1, -4, 1, 1.5]])
    np.testing.assert_allclose(got[1], [[2, -2, 1, 3], [2, -2, 0.25, 3], [2, -2, 0.25, 3]])


def test_a_rows_draw_depends_on_its_seed_and_position_alone():
    logits = jax.random.normal(jax.random.key(1), (3, 50))
    asked = [SamplingParams(temperature=1.0, seed=seed) for seed in (4, 9, 2**32 - 1)]
    position = jnp.array([7, 7, 8])
    together = sample(logits, Sampling.of(asked), position)
    alone = sample(logits[1:2], Sampling.of(asked[1:2]), position[1:2])
    assert together[1] == alone[0]


def test_bytes_stream_as_whole_characters():
    tokenizer = ByteTokenizer(256)
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("aé")] == ["a", "", "é"]
    assert stream.push(0xE2) == ""
    assert stream.close() == "\N{REPLACEMENT CHARACTER}"


def test_a_byte_outside_the_vocabulary_and_a_missing_tokenizer_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"byte 195.* 127"):
        ByteTokenizer(128).encode("é")
    with pytest.raises(ValueError, match=r"tokenizer\.json.*50000"):
        load_tokenizer(tmp_path, 50000)


def test_prompts_are_padded_behind():
    tokens, lengths = pad_prompts([[1, 2, 3], [4]])
    np.testing.assert_array_equal(tokens, [[1, 2, 3], [4, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 1])
