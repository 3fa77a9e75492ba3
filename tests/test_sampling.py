"""Sampling: greedy, nucleus, and draws that do not depend on the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax.decoding.sampling import row_keys, sample
from replayssm_jax.decoding.text import ByteTokenizer, load_tokenizer, pad_prompts

LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))


def draws(count: int, **options) -> np.ndarray:
    keys = row_keys(0, jnp.zeros(count, jnp.int32), jnp.arange(count))
    return np.asarray(sample(jnp.broadcast_to(LOGITS, (count, 4)), keys, **options))


def test_greedy_takes_the_most_likely_token():
    assert (draws(5, temperature=0.0) == 0).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-38])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature):
    logits = jnp.array([[1.0, 3.0, 2.0]])
    token = sample(logits, row_keys(0, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)), temperature=temperature)
    assert token[0] == 1


def test_draws_follow_the_distribution():
    counts = np.bincount(draws(4000, temperature=1.0), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_nucleus_keeps_the_fewest_tokens_that_reach_top_p():
    assert set(draws(400, temperature=1.0, top_p=0.79)) == {0, 1}
    assert set(draws(400, temperature=1.0, top_p=0.81)) == {0, 1, 2}
    assert set(draws(50, temperature=1.0, top_p=1e-6)) == {0}


def test_a_rows_draw_depends_on_its_request_and_position_alone():
    logits = jax.random.normal(jax.random.key(1), (3, 50))
    requests, position = jnp.array([4, 9, 2]), jnp.array([7, 7, 8])
    together = sample(logits, row_keys(3, requests, position), temperature=1.0)
    alone = sample(logits[1:2], row_keys(3, requests[1:2], position[1:2]), temperature=1.0)
    assert together[1] == alone[0]


@pytest.mark.parametrize(
    ("options", "name"), [({"temperature": -1.0}, "temperature"), ({"temperature": 1.0, "top_p": 0.0}, "top_p")]
)
def test_options_out_of_range_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        draws(1, **options)


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
