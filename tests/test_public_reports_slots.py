"""Public bug reports about slots, padding and shapes, each turned into the test that would have caught it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from tests.cases import case_named, make_tokens
from tests.compare import same_bits
from tests.lockstep import Lockstep, jitted, slot_of

SLOTS = 8
both_records = pytest.mark.parametrize("family", ["gdn", "gla"])


def _busy_pool(family: str, rng) -> Lockstep:
    """Eight slots in the middle of their windows."""
    pair = Lockstep(case_named(family), num_slots=SLOTS)
    for slots in ([0, 1, 2, 3], [4, 5, 6, 7]):
        pair.verify(make_tokens(pair.case, rng, 4, 4), slots, [4, 3, 4, 2])
        pair.commit([4, 3, 2, 2], slots)
    return pair


def _drafts(pair: Lockstep, rng) -> rs.Tokens:
    return make_tokens(pair.case, rng, 4, 4)


@both_records
@pytest.mark.parametrize("null", [-1, SLOTS, np.iinfo(np.int32).max])
def test_padding_between_live_rows_touches_nothing(family, null, rng):
    """Row 1, https://github.com/vllm-project/vllm/pull/39064"""
    pair = _busy_pool(family, rng)
    before = pair.state
    out = pair.verify(_drafts(pair, rng), [3, null, 5, null], [4, 4, 4, 4])
    assert (out[[1, 3]] == 0).all()
    for slot in set(range(SLOTS)) - {3, 5}:
        assert same_bits(slot_of(before, slot), slot_of(pair.state, slot))


@both_records
def test_slot_zero_is_a_slot_like_any_other(family, rng):
    """Row 2, https://github.com/weicj/vLLM-2080Ti-Definitive/pull/93"""
    pair = Lockstep(case_named(family), num_slots=SLOTS)
    for _ in range(6):
        one = make_tokens(pair.case, rng, 1, 4)
        tokens = jax.tree.map(lambda x: np.repeat(x, 4, axis=0), one)
        out = pair.verify(tokens, [0, -1, 7, SLOTS], [4, 4, 4, 4])
        np.testing.assert_array_equal(out[0], out[2])
        pair.commit([3, 3, 3, 3], [0, -1, 7, SLOTS])
        pair.check()
    assert same_bits(slot_of(pair.state, 0), slot_of(pair.state, 7))


@both_records
def test_an_index_past_the_end_is_not_clamped_onto_the_last_slot(family, rng):
    """Row 4, https://github.com/vllm-project/tpu-inference/pull/2752"""
    pair = _busy_pool(family, rng)
    before = slot_of(pair.state, SLOTS - 1)
    padded = [0, 1, SLOTS, SLOTS]
    pair.verify(_drafts(pair, rng), padded, [4, 4, 4, 4])
    pair.commit([4, 4, 4, 4], padded)
    pair.flush(padded, [True] * 4)
    pair.reset(padded)
    pair.copy_slots([0, 1, 2], [4, SLOTS, 5])
    assert same_bits(before, slot_of(pair.state, SLOTS - 1))


@both_records
def test_minus_one_does_not_wrap_onto_the_last_slot(family, rng):
    """Row 5, https://github.com/AI-Hypercomputer/accelerator-agents/pull/100"""
    pair = _busy_pool(family, rng)
    before = slot_of(pair.state, SLOTS - 1)
    padded = [0, -1, 2, -SLOTS]
    pair.verify(_drafts(pair, rng), padded, [4, 4, 4, 4])
    pair.commit([4, 4, 4, 4], padded)
    pair.flush(padded, [True] * 4)
    pair.reset(padded)
    pair.copy_slots([0, 1, 2], [4, -1, -SLOTS])
    assert same_bits(before, slot_of(pair.state, SLOTS - 1))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_any_number_of_rows_and_a_pool_of_one(rows, rng):
    """Row 6, https://github.com/vllm-project/tpu-inference/pull/3453, https://github.com/vllm-project/tpu-inference/issues/3356"""
    pair = Lockstep(case_named("gdn"), num_slots=rows)
    for _ in range(12):
        pair.step(make_tokens(pair.case, rng, rows, 1), range(rows))
    pair.check()


@both_records
def test_a_row_without_tokens_keeps_its_slot(family, rng):
    """Row 10, https://github.com/vllm-project/vllm/pull/37728"""
    pair = _busy_pool(family, rng)
    before = slot_of(pair.state, 6)
    out = pair.verify(_drafts(pair, rng), [2, 6, 0, 1], [4, 0, 2, 1])
    pair.commit([1, 0, 1, 1], [2, 6, 0, 1])
    assert (out[1] == 0).all()
    assert same_bits(before, slot_of(pair.state, 6))
    pair.check()


@both_records
def test_nan_in_padding_rows_comes_out_as_zero_and_goes_nowhere(family, rng):
    """Row 11, https://github.com/sgl-project/sglang/pull/30974"""
    pair = _busy_pool(family, rng)
    tokens = _drafts(pair, rng)
    spoiled = jax.tree.map(lambda x: np.where(np.arange(4).reshape(-1, *[1] * (x.ndim - 1)) % 2, np.float32(np.nan), x), tokens)
    slots = np.array([3, -1, 5, SLOTS], np.int32)
    state, out = jitted("verify")(pair.state, spoiled, slots, np.full(4, 4, np.int32))
    assert (out[[1, 3]] == 0).all()
    clean_state, clean = jitted("verify")(pair.state, tokens, slots, np.full(4, 4, np.int32))
    assert same_bits((state, out), (clean_state, clean))
    assert np.isfinite(out).all()
    assert np.isfinite(jitted("materialize")(state)).all()


@both_records
def test_nan_in_dead_ring_rows_is_never_read(family, rng):
    """Row 12, https://github.com/vllm-project/vllm/issues/40047"""
    pair = _busy_pool(family, rng)
    for _ in range(5):
        pair.poison_rings()
        assert np.isnan(pair.state.buffer.log_decay).any()
        out = pair.verify(_drafts(pair, rng), [1, -1, 7, 4], [4, 4, 1, 3])
        pair.commit([2, 4, 0, 3], [1, -1, 7, 4])
        assert np.isfinite(out).all()
        pair.check()
    pair.flush([1, 7, 4, 0], [True] * 4)
    assert np.isfinite(pair.state.checkpoint).all()


@both_records
def test_a_parked_request_keeps_its_bits_while_others_run(family, rng):
    """Row 13, https://github.com/NVIDIA/TensorRT-LLM/pull/13278"""
    pair = _busy_pool(family, rng)
    before = slot_of(pair.state, 5)
    for _ in range(8):
        pair.verify(_drafts(pair, rng), [6, -1, 0, 4], [4, 4, 2, 3])
        pair.commit([3, 0, 2, 1], [6, -1, 0, 4])
    pair.flush([6, 0, 4, -1], [True] * 4)
    assert same_bits(before, slot_of(pair.state, 5))
    pair.check()


@both_records
def test_a_strided_pool_and_strided_tokens_are_taken_for_what_they_show(family, rng):
    """Row 15, https://github.com/flashinfer-ai/flashinfer/pull/3490"""
    pair = _busy_pool(family, rng)
    tokens, slots = _drafts(pair, rng), np.array([3, 1, 7, 0], np.int32)
    strided = jax.tree.map(lambda x: np.repeat(x, 2, axis=0)[::2], (pair.state, tokens))
    assert not strided[0].checkpoint.flags.contiguous
    want = jitted("verify")(pair.state, tokens, slots, np.full(4, 4, np.int32))
    got = jitted("verify")(*strided, slots, np.full(4, 4, np.int32))
    assert same_bits(want, got)
    assert not same_bits(got[0].buffer, pair.state.buffer)


@pytest.mark.parametrize(("value_heads", "key_heads"), [(8, 8), (16, 8), (8, 1), (16, 1)])
def test_every_number_of_groups(value_heads, key_heads, rng):
    """Row 17, a fork's scratch derived its number of groups from a layout that had changed."""
    pair = Lockstep(case_named("mamba2", heads=(value_heads, key_heads), dims=(4, 6)), num_slots=2)
    for _ in range(6):
        pair.verify(make_tokens(pair.case, rng, 2, 4), [1, 0], [4, 3])
        pair.commit([3, 3], [1, 0])
    pair.check()


def test_a_ring_with_another_number_of_groups_is_refused():
    """Row 17, the wrong-shaped scratch."""
    case = case_named("mamba2", heads=(8, 2))
    state = rs.init_state(case.recurrence, case.policy, 2)
    wrong = dataclasses.replace(state.buffer, key=jnp.repeat(state.buffer.key, 2, axis=1))
    with pytest.raises(ValueError, match=r"state\.buffer\.key must have shape \(2, 2, 16, 8\), got \(2, 4, 16, 8\)"):
        rs.verify(dataclasses.replace(state, buffer=wrong), make_tokens(case, np.random.default_rng(0), 2, 4))


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 4), (16, 32), (16, 64), (1, 2)])
def test_a_value_head_uses_the_key_head_of_its_group(key_heads, value_heads):
    """Row 76, https://github.com/fla-org/flash-linear-attention/issues/624 and pull/429

    Key head g writes column g only, so the column that a value head's state fills names its key head.
    """
    case = case_named("mamba2", heads=(value_heads, key_heads), dims=(2, key_heads))
    keys = np.eye(key_heads, dtype=np.float32)[None, None]
    tokens = dataclasses.replace(make_tokens(case, np.random.default_rng(0), 1, 1), k=keys, q=keys)
    state, out = jitted("step")(rs.init_state(case.recurrence, case.policy, 1), tokens)
    filled = np.abs(jitted("materialize")(state)[0]).sum(axis=1) > 0  # [H, K]
    expected = np.arange(value_heads) // (value_heads // key_heads)
    np.testing.assert_array_equal(filled, expected[:, None] == np.arange(key_heads))
    np.testing.assert_allclose(out[0, 0], tokens.beta[0, 0, :, None] * tokens.v[0, 0], rtol=1e-6)


@pytest.mark.parametrize(("family", "dims"), [("mamba2", (80, 12)), ("gdn", (24, 96)), ("kda", (5, 8)), ("gla", (1, 1))])
def test_head_dims_that_are_no_powers_of_two_or_tiny(family, dims, rng):
    """Row 78, https://github.com/fla-org/flash-linear-attention/pull/1135 and pull/556"""
    pair = Lockstep(case_named(family, heads=(2, 1), dims=dims), num_slots=2)
    pair.prefill(make_tokens(pair.case, rng, 2, 5), [1, 0], [5, 3])
    for _ in range(4):
        pair.verify(make_tokens(pair.case, rng, 2, 4), [1, 0], [4, 3])
        pair.commit([4, 2], [1, 0])
    pair.check()


@both_records
def test_a_batch_of_empty_rows_passes_the_pool_through(family, rng):
    """Row 79, https://github.com/flashinfer-ai/flashinfer/pull/3536"""
    pair = _busy_pool(family, rng)
    before = pair.state
    out = pair.verify(_drafts(pair, rng), [0, 1, 2, 3], [0, 0, 0, 0])
    assert same_bits(before, dataclasses.replace(pair.state, buffer=before.buffer))
    assert (out == 0).all()
    pair.prefill(_drafts(pair, rng), [0, 1, 2, 3], [0, 0, 0, 0])
    pair.step(make_tokens(pair.case, rng, 4, 1), [0, 1, 2, 3], [0, 0, 0, 0])
    pair.check()
