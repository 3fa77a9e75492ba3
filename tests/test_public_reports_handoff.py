"""Public bug reports about prompts, slot reuse and handoff, each turned into the test that would have caught it."""

import dataclasses

import jax
import numpy as np
import pytest

import replayssm_jax as rs
from tests.cases import case_named, make_tokens
from tests.compare import same_bits
from tests.lockstep import Lockstep, jitted, slot_of

both_records = pytest.mark.parametrize("family", ["gdn", "gla"])


def _pool(family: str) -> Lockstep:
    return Lockstep(case_named(family), num_slots=8)


def _tokens(pair: Lockstep, rng, count: int, rows: int = 4) -> rs.Tokens:
    return make_tokens(pair.case, rng, rows, count)


@both_records
@pytest.mark.parametrize("door", ["prefill", "step"])
def test_a_prompt_of_one_token_starts_from_zeros_in_a_used_slot(family, door, rng):
    """Row 18, https://github.com/vllm-project/vllm/pull/32118"""
    pair = _pool(family)
    pair.disown(2)
    pair.reset([2])
    getattr(pair, door)(_tokens(pair, rng, 1), [0, 2, 1, 3], [1, 1, 0, 1])
    pair.check()


@both_records
def test_a_slot_full_of_nan_is_fresh_after_reset(family, rng):
    """Row 19, https://github.com/vllm-project/vllm/pull/51483, https://github.com/vllm-project/vllm/issues/51562"""
    pair = _pool(family)
    for slot in range(4):
        pair.disown(slot)
    pair.reset([1, 3, -1, 8])
    assert (pair.state.checkpoint[[1, 3]] == 0).all()
    for _ in range(6):
        out = pair.verify(_tokens(pair, rng, 4), [3, 1, -1, 8], [4, 2, 4, 4])
        pair.commit([3, 2, 0, 0], [3, 1, -1, 8])
        assert np.isfinite(out).all()
    pair.flush([1, 3, -1, 8], [True] * 4)
    assert np.isfinite(pair.state.checkpoint[[1, 3]]).all()
    pair.check()


@both_records
def test_fresh_and_continued_prompts_in_one_batch(family, rng):
    """Row 20, https://github.com/vllm-project/tpu-inference/pull/2431"""
    pair = _pool(family)
    pair.disown(3)
    pair.prefill(_tokens(pair, rng, 5), [1, 0, -1, 8], [5, 2, 0, 0])
    pair.step(_tokens(pair, rng, 1), [0, 1, 2, -1])
    pair.reset([3])
    pair.prefill(_tokens(pair, rng, 5), [3, 1, 2, 0], [4, 5, 1, 3])  # fresh, continued, in mid-window, continued
    pair.check()


@both_records
def test_a_prompt_as_long_as_a_verify_is_still_a_prompt(family, rng):
    """Row 21, https://github.com/vllm-project/vllm/pull/47123, https://github.com/vllm-project/vllm-ascend/pull/12255"""
    pair = _pool(family)
    for lengths in ([1, 2, 3, 4], [5, 4, 5, 1]):  # max_draft is 4
        pair.prefill(_tokens(pair, rng, 5), range(4), lengths)
        pair.check()
        pair.verify(_tokens(pair, rng, 4), range(4), [4, 1, 2, 4])
        pair.commit([2, 1, 0, 4], range(4))
        pair.check()
        pair.reset([0, 2])


@both_records
def test_no_token_is_lost_between_prompt_first_step_and_first_drafts(family, rng):
    """Row 23, https://github.com/vllm-project/vllm/pull/49847"""
    pair, solo = _pool(family), _pool(family)
    prompt = _tokens(pair, rng, 5)
    solo.prefill(prompt, range(4), [5, 5, 5, 5])
    pair.prefill(prompt, range(4), [4, 4, 4, 4])
    pair.step(jax.tree.map(lambda x: x[:, 4:], prompt), range(4))
    np.testing.assert_array_equal((pair.state.pointer.length + pair.state.pointer.origin)[:4], 5)
    drafts = _tokens(pair, rng, 4)
    np.testing.assert_allclose(*(p.verify(drafts, range(4), [4] * 4) for p in (pair, solo)), rtol=1e-4, atol=1e-5)
    pair.check()


@both_records
def test_a_recycled_slot_has_its_pointer_reset(family, rng):
    """Row 24, a fork's reset was skipped where the count was None."""
    pair = _pool(family)
    pair.verify(_tokens(pair, rng, 4), range(4), [4, 4, 4, 4])
    pair.commit([3, 4, 2, 1], range(4))
    pair.flush([0, 1, -1, -1], [True] * 4)
    pair.reset([1, 2, -1, -1])
    np.testing.assert_array_equal(pair.state.pointer.length[:4], [0, 0, 0, 1])
    np.testing.assert_array_equal(pair.state.pointer.origin[:4], [3, 0, 0, 0])
    pair.check()
    pair.step(_tokens(pair, rng, 1), range(4))
    pair.check()


@both_records
def test_a_ring_full_of_nan_and_inf_is_dead_when_nothing_counts(family, rng):
    """Row 25, https://github.com/NVIDIA/TensorRT-LLM/pull/14509"""
    pair = _pool(family)
    pair.prefill(_tokens(pair, rng, 5), range(4), [5, 5, 5, 5])
    for filling in (np.nan, np.inf, -np.inf):
        full = jax.tree.map(lambda x, filling=filling: np.full_like(x, filling), pair.state.buffer)
        state = dataclasses.replace(pair.state, buffer=full)
        slots = np.arange(4, dtype=np.int32)
        after, out = jitted("step")(state, _tokens(pair, rng, 1), slots, np.ones(4, np.int32))
        flushed = jitted("flush")(after, slots, np.ones(4, bool))
        assert np.isfinite(out).all()
        assert np.isfinite(jitted("materialize")(after)[:4]).all()
        assert np.isfinite(flushed.checkpoint[:4]).all()


@both_records
def test_a_copied_slot_takes_its_records_drafts_and_pointer_along(family, rng):
    """Row 26, https://github.com/sgl-project/sglang/pull/37837, https://github.com/sgl-project/sglang/issues/37834"""
    pair = _pool(family)
    pair.verify(_tokens(pair, rng, 4), [0, 1, -1, -1], [4, 3, 0, 0])
    pair.commit([3, 1, 0, 0], [0, 1, -1, -1])
    pair.verify(_tokens(pair, rng, 4), [0, 1, -1, -1], [4, 3, 0, 0])
    pair.copy_slots([0, 1, 0], [1, 0, 3])  # a swap and a fork, with drafts in flight
    np.testing.assert_array_equal(pair.state.pointer.length[:4], [1, 3, 0, 3])
    pair.commit([2, 3, 1, 0], [0, 1, 3, -1])
    pair.check()
    for _ in range(4):
        pair.verify(_tokens(pair, rng, 4), [3, 0, 1, 2], [4, 4, 4, 4])
        pair.commit([4, 1, 2, 3], [3, 0, 1, 2])
        pair.check()


@both_records
def test_a_row_padded_to_a_draft_counts_only_its_tokens(family, rng):
    """Row 29, https://github.com/vllm-project/vllm/pull/55178"""
    pair = _pool(family)
    tokens = _tokens(pair, rng, 4)
    pair.verify(tokens, range(4), [1, 1, 1, 4])
    pair.commit([1, 1, 1, 1], range(4))
    one = jitted("materialize")(pair.state)
    pair.check()
    pair.reset(range(4))
    pair.step(jax.tree.map(lambda x: x[:, :1], tokens), range(4))
    np.testing.assert_allclose(one, jitted("materialize")(pair.state), rtol=1e-5, atol=1e-6)


@both_records
def test_a_prompt_never_takes_in_drafts(family, rng):
    """Row 30, https://github.com/vllm-project/vllm/pull/30618"""
    pair, solo = _pool(family), _pool(family)
    drafts, prompt = _tokens(pair, rng, 4), _tokens(pair, rng, 5)
    pair.verify(drafts, range(4), [4, 4, 4, 4])  # and never committed
    pair.prefill(prompt, range(4), [5, 3, 1, 5])
    solo.prefill(prompt, range(4), [5, 3, 1, 5])
    np.testing.assert_array_equal(pair.state.checkpoint, solo.state.checkpoint)
    np.testing.assert_array_equal(pair.state.pointer.origin[:4], [5, 3, 1, 5])
    pair.check()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("family", ["kda", "mamba2"])
def test_a_prompt_of_any_length_equals_its_tokens_one_by_one(family, count, rng):
    """Row 32, https://github.com/huggingface/transformers/issues/46190 (padding of the last chunk updated the state)"""
    pair = _pool(family)
    pair.prefill(_tokens(pair, rng, count, rows=1), [2], [count])
    pair.check()
    assert pair.oracle.position[2] == count


@both_records
def test_rows_of_every_kind_in_one_batch(family, rng):
    """Row 48, https://github.com/vllm-project/vllm/pull/26807: full drafts, one token, none, padding, due and not due."""
    pair = _pool(family)
    for lengths in ([4, 1, 0, 3], [1, 4, 4, 0], [0, 3, 4, 1], [4, 4, 1, 1], [2, 0, 4, 4]):
        slots = rng.permutation([0, 1, 2, 3, -1])[:4]
        pair.verify(_tokens(pair, rng, 4), slots, lengths)
        pair.commit(lengths, slots)
        pair.prefill(_tokens(pair, rng, 5), slots[::-1], [0, 5, 0, 1])
        pair.check()


@both_records
def test_resetting_a_slot_leaves_its_neighbours_alone(family, rng):
    """Rows 18, 19 and 24, the other side of the same coin."""
    pair = _pool(family)
    pair.prefill(_tokens(pair, rng, 5), range(4), [5, 5, 5, 5])
    pair.step(_tokens(pair, rng, 1), range(4))
    before = pair.state
    pair.reset([2, 2, -1, 8])  # twice does no harm here
    for slot in (0, 1, 3):
        assert same_bits(slot_of(before, slot), slot_of(pair.state, slot))
    pair.check()
