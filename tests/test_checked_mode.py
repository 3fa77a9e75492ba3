"""What only the values can show: undefined in plain runs, a named error under ``checkify``, and free where nobody asks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import replayssm_jax as rs
from tests.cases import case_named, make_tokens
from tests.lockstep import FAST_COMPILE

CASE = case_named("gla", window=8, max_draft=4)
STATE = rs.init_state(CASE.recurrence, CASE.policy, 3)
TOKENS = jax.tree.map(jnp.asarray, make_tokens(CASE, np.random.default_rng(0), 2, 4))
ONE = jax.tree.map(lambda x: x[:, :1], TOKENS)
RISING = dataclasses.replace(TOKENS, log_decay=TOKENS.log_decay.at[1, 2, 0, 3].set(0.5))
FULL = dataclasses.replace(STATE.pointer, length=jnp.array([0, 7, 8], jnp.int32))
DISTINCT, TWICE, PADDED = jnp.array([2, 0]), jnp.array([1, 1]), jnp.array([-1, -1])


def _checked(call, *arguments) -> str | None:
    checked = checkify.checkify(call, errors=checkify.user_checks)
    error, _ = jax.jit(checked, compiler_options=FAST_COMPILE)(*arguments)
    return error.get()


ERRORS = {
    "verify duplicate slots": (rs.verify, (STATE, TOKENS, TWICE), "slots must name no slot twice, got [1 1]"),
    "step duplicate slots": (rs.step, (STATE, ONE, TWICE), "slots must name no slot twice, got [1 1]"),
    "prefill duplicate slots": (rs.prefill, (STATE, TOKENS, TWICE), "slots must name no slot twice, got [1 1]"),
    "flush duplicate slots": (rs.flush, (STATE, TWICE), "slots must name no slot twice, got [1 1]"),
    "commit duplicate slots": (rs.commit, (STATE.pointer, DISTINCT, TWICE), "slots must name no slot twice, got [1 1]"),
    "copy duplicate target": (rs.copy_slots, (STATE, DISTINCT, TWICE), "target must name no slot twice, got [1 1]"),
    "verify too many lengths": (rs.verify, (STATE, TOKENS, DISTINCT, jnp.array([4, 5])), "between 0 and T=4, got [4 5]"),
    "verify negative lengths": (rs.verify, (STATE, TOKENS, DISTINCT, jnp.array([-1, 4])), "between 0 and T=4, got [-1  4]"),
    "step too many lengths": (rs.step, (STATE, ONE, DISTINCT, jnp.array([2, 1])), "between 0 and T=1, got [2 1]"),
    "prefill too many lengths": (rs.prefill, (STATE, TOKENS, DISTINCT, jnp.array([9, 1])), "between 0 and T=4, got [9 1]"),
    "commit more than drafts": (rs.commit, (STATE.pointer, jnp.array([5, 0]), DISTINCT), "accepted must be between 0 and"),
    "commit fewer than none": (rs.commit, (STATE.pointer, jnp.array([0, -1]), DISTINCT), "(max_draft 4), got [ 0 -1]"),
    "commit more than the ring": (rs.commit, (FULL, jnp.array([0, 2, 0])), "(max_draft 4), got [0 2 0]"),
    "verify rising gate": (rs.verify, (STATE, RISING, DISTINCT), "tokens.log_decay must be <= 0"),
    "prefill rising gate": (rs.prefill, (STATE, RISING, DISTINCT), "tokens.log_decay must be <= 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_the_argument_and_shows_it(name):
    call, arguments, message = ERRORS[name]
    assert message in (_checked(call, *arguments) or "no error")


FINE = {
    "verify": (rs.verify, (STATE, TOKENS, DISTINCT, jnp.array([4, 0]))),
    "step": (rs.step, (STATE, ONE, DISTINCT, jnp.array([0, 1]))),
    "prefill": (rs.prefill, (STATE, TOKENS, DISTINCT)),
    "flush": (rs.flush, (STATE, DISTINCT)),
    "commit to the brim": (rs.commit, (FULL, jnp.array([4, 1, 0]))),
    "copy to and fro": (rs.copy_slots, (STATE, DISTINCT, DISTINCT[::-1])),
    "the same source twice": (rs.copy_slots, (STATE, TWICE, DISTINCT)),
    "materialize twice": (rs.materialize, (STATE, TWICE)),
    "padding twice": (rs.verify, (STATE, TOKENS, PADDED)),
    "lengths of padding": (rs.verify, (STATE, TOKENS, PADDED, jnp.array([99, -99]))),
    "accepted of padding": (rs.commit, (STATE.pointer, jnp.array([99, -99]), PADDED)),
    "padded copies": (rs.copy_slots, (STATE, DISTINCT, PADDED)),
}


@pytest.mark.parametrize("name", FINE)
def test_a_right_call_raises_nothing(name):
    call, arguments = FINE[name]
    assert _checked(call, *arguments) is None


def test_a_gate_of_a_dead_token_is_not_judged():
    """Whatever lies in padding never matters, in checked mode either."""
    assert _checked(rs.verify, STATE, RISING, DISTINCT, jnp.array([4, 2])) is None
    assert _checked(rs.prefill, STATE, RISING, jnp.array([0, -1])) is None


@pytest.mark.optimised
def test_checks_leave_no_trace_in_a_plain_run():
    """Plain and checked runs give the same bits, and the plain program calls nobody on the host."""
    plain = jax.jit(rs.verify)
    checked = jax.jit(checkify.checkify(rs.verify, errors=checkify.user_checks))
    assert "callback" not in plain.lower(STATE, TOKENS, DISTINCT).as_text()
    jax.tree.map(np.testing.assert_array_equal, plain(STATE, TOKENS, DISTINCT), checked(STATE, TOKENS, DISTINCT)[1])
