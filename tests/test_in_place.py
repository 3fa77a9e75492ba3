"""Donated pools are updated where they lie: the compiled step copies no checkpoint and no ring, and it is compiled once."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from tests.cases import IMPLEMENTATIONS, case_named, make_tokens

pytestmark = pytest.mark.optimised

SLOTS, ROWS = 96, 3  # a pool far larger than what a call touches, so that only a copy of it can be that large
FAST = [name for name in IMPLEMENTATIONS if name != "reference"]  # the oracle owes nobody its memory


def _verify_and_commit(state, tokens, slots, implementation):
    state, out = rs.verify(state, tokens, slots, implementation=implementation)
    accepted = jnp.argmax(out[:, :, 0, 0], axis=1)  # known on the device only, as in speculative decoding
    return dataclasses.replace(state, pointer=rs.commit(state.pointer, accepted, slots)), out


def _in_scan(state, tokens, slots, implementation):
    def body(state, _):
        return rs.step(state, jax.tree.map(lambda x: x[:, :1], tokens), slots, implementation=implementation)

    return jax.lax.scan(body, state, None, length=5)


def _in_while_loop(state, tokens, slots, implementation):
    def body(carry):
        state, _, count = carry
        return (*_verify_and_commit(state, tokens, slots, implementation), count + 1)

    return jax.lax.while_loop(lambda carry: carry[2] < 5, body, (state, jnp.zeros_like(tokens.v), 0))


CALLS = {
    "step": lambda s, t, slots, i: rs.step(s, jax.tree.map(lambda x: x[:, :1], t), slots, implementation=i),
    "verify and commit": _verify_and_commit,
    "flush": lambda s, t, slots, i: (rs.flush(s, slots, slots > 1, implementation=i), t),
    "step in a scan": _in_scan,
    "verify in a while loop": _in_while_loop,
    "prefill": lambda s, t, slots, i: rs.prefill(s, t, slots),
    "reset and copy": lambda s, t, slots, i: (rs.copy_slots(rs.reset(s, slots), slots + 3, slots), t),
}


def _example(case):
    tokens = jax.tree.map(jnp.asarray, make_tokens(case, np.random.default_rng(0), ROWS, case.max_draft))
    return rs.init_state(case.recurrence, case.policy, SLOTS), tokens, jnp.array([7, 0, 95])


def _bytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@functools.cache
def _compiled(case, name: str, implementation: str):
    jitted = jax.jit(CALLS[name], static_argnums=3, donate_argnums=0)
    try:
        return jitted.lower(*_example(case), implementation).compile()
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def _copies(compiled, arrays) -> str:
    """Instructions of the optimised program that copy an array of one of these shapes, a few of them."""
    shapes = {x.shape for x in jax.tree.leaves(arrays)}
    copy = re.compile(r"= \(?\w+\[([\d,]+)\]\S* (?:copy|copy-start)\(")
    found = ((copy.search(line), line.strip()) for line in compiled.as_text().splitlines())
    return "\n".join([line for match, line in found if match and tuple(map(int, match[1].split(","))) in shapes][:6])


# One case for each form of a record and of a gate; wide heads, so that no other array has a pool's shape.
WIDE = [case_named("gdn", dims=(24, 40)), case_named("gla", dims=(24, 40), checkpoint="float16")]
every_call = pytest.mark.parametrize("name", CALLS)
every_case = pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
every_fast = pytest.mark.parametrize("implementation", FAST)


@every_fast
@every_call
@every_case
def test_no_checkpoint_is_copied(case, name, implementation):
    """And every pool's output is its input's memory."""
    state, _, _ = _example(case)
    compiled = _compiled(case, name, implementation)
    assert _copies(compiled, state.checkpoint) == ""
    memory = compiled.memory_analysis()
    assert memory is None or memory.alias_size_in_bytes >= _bytes(state)


@every_fast
@every_call
@every_case
def test_no_ring_is_copied(case, name, implementation):
    """Neither by a copy instruction nor into temporary memory: a call needs room for its rows, not for the pool."""
    state, _, _ = _example(case)
    compiled = _compiled(case, name, implementation)
    assert _copies(compiled, state.buffer) == ""
    memory = compiled.memory_analysis()
    assert memory is None or memory.temp_size_in_bytes < _bytes(state) / 4


@pytest.mark.parametrize("name", ["step", "reset and copy"])
@pytest.mark.parametrize("readout", ["bf16_plane", "nvfp4"])
def test_no_read_out_copy_is_copied(readout, name):
    case = case_named("gdn", dims=(24, 40), readout=readout)
    state, _, _ = _example(case)
    compiled = _compiled(case, name, "xla")
    assert _copies(compiled, (state.checkpoint, state.readout)) == ""
    assert compiled.memory_analysis().temp_size_in_bytes < _bytes(state) / 4


@every_case
def test_a_step_without_a_flush_does_no_folding(case):
    """The fold is a branch that the device takes when a row is due, and its host never looks."""
    text = _compiled(case, "step", "xla").as_text()
    assert " conditional(" in text
    assert "callback" not in text


@every_case
def test_every_row_in_its_own_slot_copies_no_checkpoint(case):
    """With slots=None the batch is the pool, and the checkpoint still stays where it is."""
    state = rs.init_state(case.recurrence, case.policy, SLOTS)
    tokens = make_tokens(case, np.random.default_rng(0), SLOTS, case.max_draft)
    compiled = jax.jit(rs.verify, donate_argnums=0).lower(state, tokens).compile()
    assert _copies(compiled, state.checkpoint) == ""
    compiled = jax.jit(rs.flush, donate_argnums=0).lower(state).compile()
    assert _copies(compiled, state.checkpoint) == ""


def test_the_search_finds_a_copy():
    """The same step without donation must keep its input, so it copies; the tests above would see that."""
    state, tokens, slots = _example(WIDE[0])
    compiled = jax.jit(CALLS["step"], static_argnums=3).lower(state, tokens, slots, "xla").compile()
    assert "copy" in _copies(compiled, state.checkpoint)
    assert "copy" in _copies(compiled, state.buffer)


def test_the_callers_memory_is_the_results_memory():
    case = WIDE[0]
    state, tokens, slots = _example(case)
    decode = jax.jit(CALLS["verify and commit"], static_argnums=3, donate_argnums=0)
    before = [x.unsafe_buffer_pointer() for x in (state.checkpoint, *jax.tree.leaves(state.buffer))]
    after, _ = decode(state, tokens, slots, None)
    assert state.checkpoint.is_deleted()
    assert before == [x.unsafe_buffer_pointer() for x in (after.checkpoint, *jax.tree.leaves(after.buffer))]


def test_a_decode_loop_compiles_once(rng):
    """Whatever slots, lengths, padding, pointers and acceptance do: the program is one."""
    case = case_named("gdn")
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def decode(state, tokens, slots, lengths, accepted):
        state, out = rs.verify(state, tokens, slots, lengths)
        return dataclasses.replace(state, pointer=rs.commit(state.pointer, accepted, slots)), out

    state = rs.init_state(case.recurrence, case.policy, 4)
    for _ in range(3 * case.window):
        lengths = rng.integers(0, case.max_draft + 1, ROWS)
        slots = rng.permutation([0, 1, 2, 3, -1, 4, 11])[:ROWS]
        tokens = make_tokens(case, rng, ROWS, case.max_draft)
        state, _ = decode(state, tokens, slots, lengths, rng.integers(0, lengths + 1))
    assert int(state.pointer.position.sum()) > 2 * case.window
