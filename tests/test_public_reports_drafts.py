"""Public bug reports about drafts, acceptance and rollback, each turned into the test that would have caught it."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import replayssm_jax as rs
from tests.cases import case_named, make_tokens
from tests.compare import same_bits
from tests.lockstep import Lockstep, jitted, ring_rows

both_records = pytest.mark.parametrize("family", ["gdn", "gla"])
ALL = range(4)


def _pool(family: str, **changes) -> Lockstep:
    return Lockstep(case_named(family, **changes), num_slots=8)


def _tokens(pair: Lockstep, rng, count: int = 4) -> rs.Tokens:
    return make_tokens(pair.case, rng, 4, count)


@both_records
def test_steps_without_drafts_between_drafts_continue_the_accepted_stream(family, rng):
    """Row 35, https://github.com/vllm-project/vllm/pull/52942, .../pull/40738, https://github.com/vllm-project/vllm/issues/39273"""
    pair = _pool(family)
    for _ in range(12):
        lengths = rng.integers(1, 5, 4)
        pair.verify(_tokens(pair, rng), ALL, lengths)
        pair.commit(rng.integers(0, lengths + 1), ALL)
        pair.check()
        pair.step(_tokens(pair, rng, 1), ALL)
        pair.check()
        pair.verify(_tokens(pair, rng), ALL, [1, 1, 1, 1])  # a verify of the bonus token alone
        pair.commit([1, 1, 1, 1], ALL)
        pair.check()


@both_records
def test_rejecting_everything_but_the_bonus_token_ten_times(family, rng):
    """Row 37, https://github.com/kekzl/imp/pull/1503: rejected drafts and everything behind them are NaN before each call."""
    pair = _pool(family)
    for _ in range(10):
        pair.verify(_tokens(pair, rng), ALL, [4, 4, 4, 4])
        pair.commit([1, 1, 0, 1], ALL)
        pair.check()
    np.testing.assert_array_equal((pair.state.pointer.length + pair.state.pointer.origin)[:4], [10, 10, 0, 10])


@both_records
@pytest.mark.parametrize("accepted", [1, 4])
def test_accepted_counts_the_bonus_token(family, accepted, rng):
    """Row 38, https://github.com/ekryski/mlx-swift-lm/pull/143"""
    pair, solo = _pool(family), _pool(family)
    for _ in range(5):
        tokens = _tokens(pair, rng)
        pair.verify(tokens, ALL, [4, 4, 4, 4])
        pair.commit([accepted] * 4, ALL)
        for i in range(accepted):
            solo.step(jax.tree.map(lambda x, i=i: x[:, i : i + 1], tokens), ALL)
    pair.check()
    states = [jitted("materialize")(p.state) for p in (pair, solo)]
    np.testing.assert_allclose(*states, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal((pair.state.pointer.length + pair.state.pointer.origin)[:4], 5 * accepted)


@both_records
def test_a_pool_saved_and_restored_in_mid_window_goes_on_bit_for_bit(family, rng):
    """Row 40, https://github.com/JakeATX/llamAmpere/pull/8: ring, pointer and drafts in flight are part of what is saved."""
    pair = _pool(family, activations="bfloat16")
    pair.verify(_tokens(pair, rng), ALL, [4, 4, 4, 2])
    pair.commit([4, 3, 1, 2], ALL)
    pair.verify(_tokens(pair, rng), ALL, [4, 4, 4, 2])
    leaves, structure = jax.tree.flatten(pair.state)
    file = io.BytesIO()
    np.savez(file, *[x.view(np.uint8) for x in leaves])
    file.seek(0)
    with np.load(file) as saved:
        restored = [saved[f"arr_{i}"].view(x.dtype) for i, x in enumerate(leaves)]
    states = [pair.state, jax.tree.unflatten(structure, restored)]
    tokens, slots = _tokens(pair, rng), np.arange(4, dtype=np.int32)
    results = []
    for state in states:
        pointer = jitted("commit")(state.pointer, np.array([2, 0, 4, 1], np.int32), slots)
        results.append(jitted("verify")(dataclasses.replace(state, pointer=pointer), tokens, slots, np.full(4, 4, np.int32)))
    assert same_bits(*results)


def test_rollbacks_past_what_there_is_are_named_errors(rng):
    """Row 41, https://github.com/ggml-org/llama.cpp/pull/28007, https://github.com/ggml-org/llama.cpp/issues/28425"""
    pair = _pool("gdn")
    with pytest.raises(ValueError, match="T=5 drafts, more than the policy's max_draft=4"):
        rs.verify(pair.state, _tokens(pair, rng, 5))
    commit = checkify.checkify(jax.jit(rs.commit), errors=checkify.user_checks)
    pointer = jax.tree.map(jnp.asarray, pair.state.pointer)
    for accepted in ([0, 5, 0, 0], [0, 0, 0, -1]):
        error, _ = commit(pointer, jnp.array(accepted))
        with pytest.raises(checkify.JaxRuntimeError, match="accepted must be between 0 and the tokens verified"):
            error.throw()


@both_records
def test_every_fill_of_the_ring_with_every_number_of_drafts(family, rng):
    """Row 42, a fork's window ran past its ring and left outputs unwritten: all T outputs are there at every fill."""
    pair = _pool(family)
    most = pair.case.window - pair.case.max_draft
    for fill in range(most + 1):
        pair.flush(ALL, [True] * 4)
        for accepted in [4] * (fill // 4) + [fill % 4]:
            if accepted:
                pair.verify(_tokens(pair, rng), ALL, [4, 4, 4, 4])
                pair.commit([accepted] * 4, ALL)
        assert (pair.state.pointer.length[:4] == fill).all()
        out = pair.verify(_tokens(pair, rng), ALL, [1, 2, 3, 4])
        np.testing.assert_array_equal(np.any(out != 0, axis=(2, 3)), np.tri(4, dtype=bool))
        pair.commit([1, 2, 3, 4], ALL)
        pair.check()


def test_commit_returns_the_moved_pointer_and_leaves_the_old_one(rng):
    """Row 44, https://github.com/flashinfer-ai/flashinfer/pull/4081: a cursor that was a temporary lost its commit."""
    pair = _pool("gla")
    pair.verify(_tokens(pair, rng), ALL, [4, 4, 4, 4])
    old = jax.tree.map(np.array, pair.state.pointer)
    new = jitted("commit")(pair.state.pointer, np.array([4, 0, 2, 1], np.int32), np.array([3, 2, 9, 0], np.int32))
    np.testing.assert_array_equal(new.length - old.length, [1, 0, 0, 4, 0, 0, 0, 0])
    assert same_bits(old, pair.state.pointer)
    assert same_bits(old.origin, new.origin)


@both_records
def test_a_verify_leaves_what_others_still_read(family, rng):
    """Row 45, https://github.com/sgl-project/sglang/pull/39219: V of many tiles; what is read keeps its bits."""
    pair = _pool(family, dims=(80, 8))
    pair.prefill(_tokens(pair, rng, 3), ALL, [3, 3, 3, 3])
    pair.verify(_tokens(pair, rng), ALL, [4, 4, 4, 4])
    pair.commit([4, 4, 3, 2], ALL)
    tokens, before = _tokens(pair, rng), pair.state
    kept = jax.tree.map(np.copy, (tokens, before))
    pair.verify(tokens, ALL, [4, 4, 4, 4])
    assert same_bits(kept[0], tokens)
    assert same_bits(kept[1].checkpoint, pair.state.checkpoint)
    for slot in ALL:
        rows = ring_rows(before, slot, 0, int(before.pointer.length[slot]))
        assert same_bits(*([x[slot][:, rows] for x in jax.tree.leaves(s.buffer)] for s in (before, pair.state)))
    pair.commit([4, 0, 1, 2], ALL)
    pair.check()


@both_records
def test_a_half_precision_state_follows_the_accepted_stream(family, rng):
    """Row 51, https://github.com/vllm-project/vllm/pull/49887: within fp16's tolerance of the recurrence, over many rounds."""
    pair = _pool(family, checkpoint="float16", activations="float16", decay="slow")
    for _ in range(20):
        pair.verify(_tokens(pair, rng), ALL, [4, 4, 4, 4])
        pair.commit(rng.integers(0, 5, 4), ALL)
    pair.check()
    assert (pair.state.pointer.origin[:4] > 0).all()
