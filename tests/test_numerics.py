"""Exactness over long runs, gates at both ends of what a float holds, and checkpoints of half precision."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax.prefill import chunked
from replayssm_jax.recurrence import recurrent
from tests import oracle
from tests.cases import FAMILIES, IMPLEMENTATIONS, Case, case_named, make_tokens
from tests.compare import relative_error, same_bits
from tests.lockstep import FAST_COMPILE, Lockstep, decode, jitted

every_family = pytest.mark.parametrize("family", [case.id for case in FAMILIES])
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
# of the reference the family with the most to it; all four in `make long`
every_pair = pytest.mark.parametrize(
    ("family", "implementation"),
    [
        pytest.param(case.id, name, marks=[pytest.mark.long] * (name == "reference" and case.id != "kda"))
        for case in FAMILIES
        for name in IMPLEMENTATIONS
    ],
)


def _long_case(family: str, **changes) -> Case:
    """Gates slow enough that a state remembers dozens of flushes."""
    return case_named(family, heads=(2, 1), dims=(12, 16), max_draft=1, activations="bfloat16", decay="slow", **changes)


def _pieces(tokens: rs.Tokens, size: int):
    return (jax.tree.map(lambda x, i=i: x[:, i : i + size], tokens) for i in range(0, tokens.q.shape[1], size))


# without the delta rule a head's gate and channels' ones are folded alike
@pytest.mark.optimised
@pytest.mark.parametrize("family", ["gdn", "kda", "mamba2", pytest.param("gla", marks=pytest.mark.long)])
def test_4096_bf16_steps_stay_on_the_recurrence_and_the_error_is_flat(family, rng):
    case = _long_case(family)
    state = rs.init_state(case.recurrence, case.policy, 1)
    exact = np.zeros(case.recurrence.state_dims)
    plain = jnp.zeros((1, *case.recurrence.state_dims))
    errors, plain_errors = [], []
    for tokens in _pieces(make_tokens(case, rng, 1, 4096), 512):
        state, out = decode(state, tokens)
        exact, exact_out = oracle.run(case.recurrence, exact, tokens)
        plain, _, _ = jax.jit(recurrent, static_argnums=0)(case.recurrence, plain, tokens, jnp.ones((1, 512), bool))
        present = jitted("materialize")(state)
        errors.append(relative_error(present[0], exact))
        plain_errors.append(relative_error(plain[0], exact))
    assert state.pointer.origin[0] > 4000
    assert relative_error(present, plain) < 1e-5
    assert max(errors) < 2e-6
    assert max(errors) < 2 * max(plain_errors)
    assert max(errors[4:]) < 2 * max(errors[:4])
    rounded = exact_out.astype(jnp.bfloat16)
    assert np.mean(np.asarray(out)[:, 0] == rounded) > 0.99
    assert relative_error(out[:, 0], exact_out) < 3e-3


def _through_every_door(case: Case, implementation: str, tokens: rs.Tokens) -> None:
    """The same 64 tokens as one chunk, token by token and as drafts; all states and outputs are compared."""
    pair = Lockstep(case, implementation)
    pair.prefill(tokens, [2], [64])
    for token in _pieces(tokens, 1):
        pair.step(token, [0])
    for drafts in _pieces(tokens, case.max_draft):
        pair.verify(drafts, [1], [case.max_draft])
        pair.commit([case.max_draft], [1])
    pair.check()
    pair.prefill(tokens, [1], [64])
    pair.check()


@every_pair
def test_gates_of_minus_30_per_token(family, implementation, rng):
    """exp(30 * 64) overflows; a head or channel that forgets stands next to one that remembers."""
    case = case_named(family)
    tokens = make_tokens(case, rng, 1, 64)
    log_decay = np.full_like(tokens.log_decay, -30)
    log_decay[..., ::2] = -0.01
    _through_every_door(case, implementation, dataclasses.replace(tokens, log_decay=log_decay))


@every_pair
def test_a_shut_gate_leaves_its_neighbours_their_digits(family, implementation, rng):
    """Gates of -1e4 among gates of -1e-3: a difference of running sums would keep three digits of the small ones."""
    case = case_named(family)
    tokens = make_tokens(case, rng, 1, 64)
    log_decay = np.full_like(tokens.log_decay, -1e-3)
    log_decay[:, 3::11] = -1e4
    _through_every_door(case, implementation, dataclasses.replace(tokens, log_decay=log_decay))


@every_pair
def test_a_gate_of_zero_forgets_everything(family, implementation, rng):
    """log_decay = -inf, and values whose exponential is no longer a normal number."""
    case = case_named(family)
    tokens = make_tokens(case, rng, 1, 64)
    log_decay = np.array(tokens.log_decay)
    log_decay[:, 5::9], log_decay[:, 7::13] = -np.inf, -104.0
    _through_every_door(case, implementation, dataclasses.replace(tokens, log_decay=log_decay))


@pytest.mark.parametrize("family", ["kda", "mamba2"])
def test_the_chunk_size_changes_a_prompt_by_rounding_only(family, rng):
    case = case_named(family)
    tokens, lengths = make_tokens(case, rng, 2, 40), jnp.array([40, 33])
    states, outs = [], []
    for chunk_size in (1, 17, 64):
        door = jax.jit(functools.partial(rs.prefill, chunk_size=chunk_size), compiler_options=FAST_COMPILE)
        state, out = door(rs.init_state(case.recurrence, case.policy, 2), tokens, None, lengths)
        states.append(state.checkpoint)
        outs.append(out)
    assert max(relative_error(x, states[0]) for x in states) < 2e-6
    assert max(relative_error(x, outs[0]) for x in outs) < 2e-6


@pytest.mark.parametrize("family", ["kda", pytest.param("mamba2", marks=pytest.mark.long)])
def test_double_precision_elsewhere_changes_nothing_here(family, rng):
    """A program that turns jax_enable_x64 on for its own sake gets the same float32 pool, bit for bit."""
    case = case_named(family)
    prompt, drafts = make_tokens(case, rng, 2, 20), make_tokens(case, rng, 2, 4)
    results = []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            fresh = rs.init_state(case.recurrence, case.policy, 3)
            state, first = jitted("prefill")(fresh, prompt, np.array([2, 0]), np.array([20, 7]))
            state, second = jitted("verify")(state, drafts, np.array([0, 2]), np.array([4, 1]))
            pointer = jitted("commit")(state.pointer, np.array([3, 1]), np.array([0, 2]))
            state = dataclasses.replace(state, pointer=pointer)
            results.append((jitted("flush")(state), jitted("materialize")(state), first, second))
    chex.assert_trees_all_equal_dtypes(*results)
    assert same_bits(*results)


@pytest.mark.parametrize("family", ["kda", "mamba2"])
def test_gradients_of_chunks_are_those_of_the_recurrence(family, rng):
    """Training goes through the chunked form; strong gates make no NaN of a gradient."""
    case = case_named(family)
    tokens = make_tokens(case, rng, 1, 20)
    log_decay = np.array(tokens.log_decay)
    log_decay[:, 4::6] = -200.0
    tokens = dataclasses.replace(tokens, log_decay=log_decay)
    start = rng.standard_normal((1, *case.recurrence.state_dims)).astype(np.float32)
    aim = rng.standard_normal((1, 20, *case.recurrence.state_dims[:2])).astype(np.float32)

    def by_chunks(state, tokens):
        state, out = chunked(case.recurrence, state, tokens, 8)
        return jnp.sum(out * aim) + jnp.sum(state**2)

    def one_by_one(state, tokens):
        state, _, out = recurrent(case.recurrence, state, tokens, jnp.ones((1, 20), bool))
        return jnp.sum(out * aim) + jnp.sum(state**2)

    got, want = (
        jax.jit(jax.grad(f, argnums=(0, 1)), compiler_options=FAST_COMPILE)(start, tokens) for f in (by_chunks, one_by_one)
    )
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_a_half_precision_checkpoint_beats_rounding_at_every_step(family, checkpoint, rng):
    case = _long_case(family, checkpoint=checkpoint)
    state = rs.init_state(case.recurrence, case.policy, 1)
    exact = every_step = np.zeros(case.recurrence.state_dims)
    for tokens in _pieces(make_tokens(case, rng, 1, 2048), 512):
        state, _ = decode(state, tokens)
        exact, _ = oracle.run(case.recurrence, exact, tokens)
        for i in range(512):
            every_step, _ = oracle.advance(case.recurrence, every_step, oracle.token_at(tokens, 0, i))
            every_step = every_step.astype(checkpoint).astype(np.float64)
    error = relative_error(jitted("materialize")(state)[0], exact)
    assert error < relative_error(every_step, exact) / 2
    assert error < case.state_tolerance


def _one_value(value: float, checkpoint: str, count: int) -> rs.ReplayState:
    """A fresh layer of one head after ``count`` tokens that add ``value`` to the first column of its state; then a flush."""
    case = case_named("gla", heads=(1, 1), dims=(2, 4), checkpoint=checkpoint)
    one = np.ones((1, count, 1, 4), np.float32) * np.eye(4, dtype=np.float32)[0]
    tokens = rs.Tokens(
        q=one,
        k=one,
        v=np.full((1, count, 1, 2), value, np.float32),
        log_decay=np.zeros((1, count, 1, 4), np.float32),
        beta=np.ones((1, count, 1), np.float32),
    )
    state, _ = jitted("verify")(rs.init_state(case.recurrence, case.policy, 1), tokens)
    pointer = jitted("commit")(state.pointer, np.int32(count))
    return jitted("flush")(dataclasses.replace(state, pointer=pointer))


@pytest.mark.parametrize(("value", "checkpoint", "largest"), [(3e4, "float16", 65504.0), (3.4e38, "bfloat16", 3.3895314e38)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_half_precision_checkpoint_saturates(value, checkpoint, largest, sign):
    column = np.asarray(_one_value(sign * value, checkpoint, 4).checkpoint[0, 0, :, 0]).astype(np.float64)
    np.testing.assert_allclose(column, sign * largest, rtol=1e-6)


@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16", "float16"])
def test_a_checkpoint_keeps_nan(checkpoint):
    """A request that went wrong says so; saturation does not turn it into a large number."""
    assert np.isnan(_one_value(np.nan, checkpoint, 2).checkpoint[0, 0, :, 0].astype(np.float32)).all()


@every_implementation
@pytest.mark.parametrize("family", ["gdn", "gla"])
def test_outputs_after_a_flush_come_from_the_checkpoint_as_it_is_stored(family, implementation, rng):
    """A due row answers from its rounded checkpoint, so a pool restored from it goes on in the same way."""
    pair = Lockstep(case_named(family, checkpoint="bfloat16"), implementation)
    for _ in range(3):
        pair.verify(make_tokens(pair.case, rng, 1, 4), [1], [4])
        pair.commit([4], [1])
    drafts = make_tokens(pair.case, rng, 1, 4)
    out = pair.verify(drafts, [1], [4])
    assert pair.state.pointer.length[1] == 0
    _, want = oracle.run(pair.case.recurrence, pair.state.checkpoint[1].astype(np.float64), drafts)
    assert relative_error(out[0], want) < 5e-6


@every_implementation
def test_a_flush_without_records_keeps_every_bit(implementation):
    """Adding nothing to a negative zero would make it a positive one."""
    pair = Lockstep(case_named("gdn"), implementation)
    pair.state.checkpoint[:] = -0.0
    before = pair.state.checkpoint.copy()
    pair.flush(range(4), [True] * 4)
    assert same_bits(before, pair.state.checkpoint)


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float16"])
def test_a_checkpoint_rounds_once_per_flush_and_to_nearest(checkpoint):
    """Four additions below half a unit in the last place of what is there: together they count."""
    unit = float(jnp.finfo(checkpoint).eps)
    state = _one_value(0.375 * unit, checkpoint, 4)
    assert float(state.checkpoint[0, 0, 0, 0]) == 1.5 * unit
