"""The pointer rule by itself: when a verify folds, where drafts may lie, and that acceptance is one addition."""

import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax import ReplayPointer, after_prefill, after_verify, commit, init_pointer, reset_pointer
from tests.cases import case_named, make_tokens
from tests.compare import same_bits
from tests.lockstep import Lockstep

POLICIES = [(16, 1), (16, 4), (16, 8), (32, 5), (2, 1), (5, 2), (6, 3)]


def _pointer(length, origin, window: int, max_draft: int) -> ReplayPointer:
    return ReplayPointer(
        length=jnp.int32(length),
        origin=jnp.int32(origin),
        request=jnp.zeros(np.shape(length), jnp.int32),
        window=window,
        max_draft=max_draft,
    )


@pytest.mark.parametrize(("window", "max_draft"), POLICIES)
def test_a_verify_folds_a_row_with_tokens_once_two_drafts_would_not_fit(window, max_draft):
    length = np.arange(window + 1)  # one slot for every fill
    origin = 7 * length
    before = _pointer(length, origin, window, max_draft)
    due = length > window - 2 * max_draft
    with_tokens = after_verify(before)
    np.testing.assert_array_equal(with_tokens.length, np.where(due, 0, length))
    np.testing.assert_array_equal(with_tokens.origin, np.where(due, origin + length, origin))
    assert same_bits(after_verify(before, lengths=jnp.zeros(window + 1, jnp.int32)), before)
    padding = jnp.where(jnp.arange(window + 1) % 2 == 0, -1, window + 1)
    assert same_bits(after_verify(before, slots=padding), before)


@pytest.mark.parametrize(("window", "max_draft"), POLICIES)
def test_a_draft_never_lands_on_a_row_that_is_read(window, max_draft, rng):
    pointer, position = init_pointer(3, window, max_draft), np.zeros(3, int)
    for _ in range(4 * window):
        lengths = rng.integers(0, max_draft + 1, 3)
        drafts = np.asarray(pointer.position)[:, None] + np.arange(max_draft)  # of a row that folds and one that does not
        pointer = after_verify(pointer, lengths=lengths)
        assert (np.asarray(pointer.position) == position).all(), "a verify moved a position"
        committed = np.asarray(pointer.length)
        for slot in range(3):
            read = (int(pointer.origin[slot]) + np.arange(committed[slot])) % window
            assert not set(read) & set(drafts[slot] % window)
        accepted = rng.integers(0, lengths + 1)
        pointer, position = commit(pointer, accepted), position + accepted
        assert (np.asarray(pointer.length) <= window - max_draft).all()


def test_commit_adds_and_ignores_padding():
    before = _pointer([1, 2, 3], [10, 20, 30], 16, 4)
    after = commit(before, jnp.array([4, 3, 2, 1]), jnp.array([2, -1, 0, 3]))
    np.testing.assert_array_equal(after.length, [3, 2, 7])
    np.testing.assert_array_equal(after.origin, before.origin)
    np.testing.assert_array_equal(commit(before, 2).length, [3, 4, 5])


def test_prefill_and_reset_move_only_their_slots():
    before = _pointer([1, 2, 3], [10, 20, 30], 16, 4)
    after = after_prefill(before, jnp.array([2, 0, 7]), jnp.array([100, 0, 5]))
    np.testing.assert_array_equal(after.length, [1, 2, 0])
    np.testing.assert_array_equal(after.origin, [10, 20, 133])
    emptied = reset_pointer(before, jnp.array([1, -3, 3]))
    np.testing.assert_array_equal(emptied.position, [11, 0, 33])
    assert emptied.length[1] == 0


def test_a_plain_decoder_writes_its_checkpoint_every_window_minus_one_tokens(rng):
    pair = Lockstep(case_named("gla", window=6, max_draft=1), num_slots=1)
    written = []
    for count in range(1, 30):
        before = pair.state.checkpoint
        pair.step(make_tokens(pair.case, rng, 1, 1), [0])
        if not same_bits(before, pair.state.checkpoint):
            written.append(count)
    assert written == [6, 11, 16, 21, 26]


@pytest.mark.parametrize("origin", [5, 2**31 - 100])
def test_positions_up_to_the_largest_integer(origin, rng):
    """The ring starts at ``origin % window`` for any origin; nothing overflows before the position itself would."""
    pair = Lockstep(case_named("gdn", window=5, max_draft=2), num_slots=2, origin=origin)
    for _ in range(20):
        pair.verify(make_tokens(pair.case, rng, 2, 2), [1, 0], [2, 1])
        pair.commit([2, 1], [1, 0])
        pair.check()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int32, np.int64])
def test_slots_of_any_integer_type_never_wrap_into_range(dtype):
    before = _pointer([0, 0, 0], [0, 0, 0], 16, 4)
    outside = np.array([np.iinfo(dtype).min if np.iinfo(dtype).min else 3, np.iinfo(dtype).max], dtype)
    after = commit(before, jnp.array([1, 2, 4]), np.append(outside, dtype(1)))
    np.testing.assert_array_equal(after.length, [0, 4, 0])
