"""Public bug reports about gates, rounding and range, each turned into the test that would have caught it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import replayssm_jax as rs
from tests import oracle
from tests.cases import case_named, make_tokens
from tests.compare import relative_error
from tests.lockstep import Lockstep, decode, jitted


def _with_gates(tokens: rs.Tokens, gates) -> rs.Tokens:
    """The tokens with one log decay per token, the same for all heads and channels."""
    shape = (1, -1, *[1] * (tokens.log_decay.ndim - 2))
    log_decay = np.broadcast_to(np.asarray(gates, np.float32).reshape(shape), tokens.log_decay.shape)
    return dataclasses.replace(tokens, log_decay=np.array(log_decay))


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_updates_are_recorded_in_float32(family, rng):
    """Row 54, https://github.com/flashinfer-ai/flashinfer/pull/4140: bf16 updates would double the state's error."""
    case = case_named(family, max_draft=1, activations="bfloat16", decay="slow")
    state = rs.init_state(case.recurrence, case.policy, 1)
    assert state.buffer.update.dtype == jnp.float32
    tokens = make_tokens(case, rng, 1, 16 * (case.window - 1) + 7)
    state, _ = decode(state, tokens)
    assert state.pointer.origin[0] == 16 * (case.window - 1)
    exact, _ = oracle.run(case.recurrence, np.zeros(case.recurrence.state_dims), tokens)
    assert relative_error(jitted("materialize")(state)[0], exact) < 2e-6


@pytest.mark.parametrize("family", ["mamba2", "gla"])
def test_raw_values_are_recorded_as_they_came(family, rng):
    """Row 54, without the delta rule: values and their float32 weights are kept apart, so bf16 values stay exact."""
    case = case_named(family, max_draft=1, activations="bfloat16", decay="slow", beta_max=3.0)
    tokens = make_tokens(case, rng, 1, 12)
    state, _ = decode(rs.init_state(case.recurrence, case.policy, 1), tokens)
    assert state.buffer.update.dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.buffer.update[0, :, :12], np.swapaxes(tokens.v[0], 0, 1))
    np.testing.assert_array_equal(state.buffer.key[0, :, :12], np.swapaxes(tokens.k[0], 0, 1))
    np.testing.assert_array_equal(state.buffer.weight[0, :, :12], tokens.beta[0].T)


@pytest.mark.parametrize(("family", "gate"), [("gdn", -20.0), ("kda", -30.0), ("gla", -30.0), ("mamba2", -20.0)])
def test_a_window_of_strong_gates_stays_finite(family, gate, rng):
    """Row 58, https://github.com/openxla/tokamax/pull/1327, flashinfer/pull/5032, meta-pytorch/attention-gym/pull/394"""
    pair = Lockstep(case_named(family))
    tokens = _with_gates(make_tokens(pair.case, rng, 1, 64), [gate])
    pair.prefill(tokens, [0], [16])
    for start in range(0, 16, 4):
        pair.verify(jax.tree.map(lambda x, start=start: x[:, start : start + 4], tokens), [1], [4])
        pair.commit([4], [1])
    pair.check()


@pytest.mark.parametrize("gate", [-25.8, -104.0, -1e4, -np.inf])
@pytest.mark.parametrize("family", ["gdn", "kda", "mamba2", "gla"])
def test_a_shut_gate_forgets_to_exactly_the_new_update(family, gate, rng):
    """Row 59, https://github.com/pytorch/executorch/pull/21417: 0 * inf was NaN."""
    pair = Lockstep(case_named(family))
    pair.prefill(make_tokens(pair.case, rng, 1, 64), [0], [9])
    for _ in range(3):
        pair.step(make_tokens(pair.case, rng, 1, 1), [0])
    last = _with_gates(make_tokens(pair.case, rng, 1, 1), [gate])
    pair.step(last, [0])
    pair.step(last, [1])  # from zeros
    pair.check()
    used, fresh = jitted("materialize")(pair.state)[:2]
    np.testing.assert_allclose(used, fresh, rtol=1e-5, atol=0 if gate < -200 else 1e-9)
    pair.flush([0, 1], [True, True])
    pair.check()


def test_a_rising_gate_is_an_error_in_checked_mode_and_documented(rng):
    """Row 62, https://github.com/flashinfer-ai/flashinfer/issues/2490: a linear gate where its logarithm belongs."""
    case = case_named("gdn")
    tokens = make_tokens(case, rng, 2, 4)
    linear = dataclasses.replace(tokens, log_decay=np.exp(tokens.log_decay))
    verify = checkify.checkify(jax.jit(rs.verify), errors=checkify.user_checks)
    error, _ = verify(rs.init_state(case.recurrence, case.policy, 2), linear)
    with pytest.raises(checkify.JaxRuntimeError, match=r"tokens\.log_decay must be <= 0 \(it is a logarithm\)"):
        error.throw()
    assert "log of the gate, <= 0" in rs.Tokens.__doc__


def test_replay_with_a_bf16_pool_loses_less_than_rounding_every_step(rng):
    """Row 65, https://github.com/vllm-project/vllm/pull/39032, vllm/issues/13466, https://github.com/ml-explore/mlx-lm/pull/988"""
    errors = {}
    case = case_named("gdn", max_draft=1, activations="bfloat16", decay="slow")
    tokens = make_tokens(case, rng, 1, 1000)
    exact, _ = oracle.run(case.recurrence, np.zeros(case.recurrence.state_dims), tokens)
    for checkpoint, window in (("bfloat16", 16), ("bfloat16", 2), ("float32", 16)):
        policy = dataclasses.replace(case, checkpoint=checkpoint, window=window).policy
        state, _ = decode(rs.init_state(case.recurrence, policy, 1), tokens)
        errors[checkpoint, window] = relative_error(jitted("materialize")(state)[0], exact)
    assert errors["bfloat16", 16] < errors["bfloat16", 2] / 2  # window 2 writes its checkpoint at every step
    assert errors["float32", 16] < 2e-6


@pytest.mark.parametrize("count", [37, 64, 91, 100])
@pytest.mark.parametrize("family", ["gdn", "kda", "mamba2", "gla"])
def test_a_partial_chunk_decays_the_state_by_its_own_last_token(family, count, rng):
    """Row 72, https://github.com/flashinfer-ai/flashinfer/pull/4311 and pull/3156: the state, at a tolerance that shows it."""
    pair = Lockstep(case_named(family))
    tokens = make_tokens(pair.case, rng, 1, 100)
    pair.prefill(tokens, [3], [count])
    pair.check()
    pair.prefill(tokens, [3], [count])  # now from a state that this decay acts on
    pair.check()


def test_a_state_past_the_range_of_fp16_saturates_as_documented():
    """Row 74, https://github.com/unslothai/unsloth-zoo/pull/212"""
    case = case_named("mamba2", heads=(1, 1), dims=(2, 3), checkpoint="float16", max_draft=1)
    one = np.ones((1, 40, 1, 3), np.float32)
    tokens = rs.Tokens(
        q=one,
        k=one,
        v=np.broadcast_to(np.array([5e3, -5e3], np.float32), (1, 40, 1, 2)),
        log_decay=np.zeros((1, 40, 1), np.float32),
        beta=np.ones((1, 40, 1), np.float32),
    )
    state, out = decode(rs.init_state(case.recurrence, case.policy, 1), tokens)
    checkpoint = np.asarray(state.checkpoint[0, 0]).astype(np.float64)
    np.testing.assert_array_equal(checkpoint, [[65504.0] * 3, [-65504.0] * 3])
    assert np.isfinite(out).all()
    assert "saturate" in rs.ReplayPolicy.__doc__
