"""The backend on the GPU with read-out copies and raw records, against that in jnp; NaN in everything that must not be read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax import ReplayState, Tokens, replay_pallas, replay_xla
from replayssm_jax.pointer import after_verify
from tests.cases import Case
from tests.compare import relative_error, same_bits
from tests.kernel_runs import NUM_SLOTS, make_call
from tests.lockstep import FAST_COMPILE, whole_checkpoint
from tests.refresh_runs import FOLD_ROUNDING, encode, make_state

# one rounding of a result; the kernel's may go the other way than that of the backend in jnp
OUTPUT_ROUNDING = {"float32": 0.0, "float16": 1e-3, "bfloat16": 6e-3}

_jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
_expected_verify, _expected_flush = _jit(replay_xla.verify), _jit(replay_xla.flush)


def make_read_call(case: Case, rng: np.random.Generator, tokens: int) -> tuple[ReplayState, Tokens, np.ndarray, np.ndarray]:
    """``make_call`` with raw records and the copy of the checkpoint that the policy asks for."""
    return make_call(dataclasses.replace(case, max_draft=max(tokens, case.max_draft)), rng, tokens, make_state)


def assert_read_is_right(case: Case, rng: np.random.Generator, tokens: int, tolerance: float, interpret=None) -> None:
    """Outputs, checkpoints, copies and rings of one verify; everything it must leave alone bit for bit.

    Outputs are compared with those from the kernel's own checkpoint, of which a copy may round a last bit to another code.
    """
    state, drafts, slots, lengths = call = make_read_call(case, rng, tokens)
    after, out = _jit(functools.partial(replay_pallas.verify, interpret=interpret))(*call)
    want, _ = _expected_verify(*call)
    folded = dataclasses.replace(after, buffer=state.buffer, pointer=after_verify(state.pointer, slots, lengths))
    _, want_out = _expected_verify(folded, drafts, slots, lengths)

    live = (slots >= 0) & (slots < NUM_SLOTS) & (lengths > 0)
    due = live & np.isin(slots, np.flatnonzero(state.pointer.due))
    assert due.any()
    assert (live & ~due).any()
    assert out.dtype == drafts.v.dtype
    seen = live[:, None] & (np.arange(tokens) < lengths[:, None])
    assert (np.asarray(out)[~seen] == 0).all(), "an output past a row's tokens is not zero"
    for b in np.flatnonzero(live):
        error = relative_error(out[b], want_out[b])
        assert error <= tolerance + OUTPUT_ROUNDING[case.activations], f"row {b} (due: {due[b]}): {error}"
    assert same_bits(after.buffer, want.buffer), "raw inputs are recorded as they come, and nothing else"
    _assert_folded(state, after, want, np.sort(slots[due]), tolerance)


def assert_read_flush_is_right(state: ReplayState, where: np.ndarray, tolerance: float, interpret=None) -> ReplayState:
    """A flush of the slots in ``where`` [N] bool; rings and all other slots bit for bit. Returns the state after it."""
    after = _jit(functools.partial(replay_pallas.flush, slots=None, interpret=interpret))(state, where=where)
    want = _expected_flush(state, None, where)
    assert same_bits(after.buffer, state.buffer), "a flush wrote to the ring"
    _assert_folded(state, after, want, np.flatnonzero(where & (np.asarray(state.pointer.length) > 0)), tolerance)
    return after


def _assert_folded(state: ReplayState, after: ReplayState, want: ReplayState, touched: np.ndarray, tolerance: float) -> None:
    """Checkpoints of the slots ``touched`` as expected, the others untouched, the copy that of its checkpoint everywhere."""
    policy = state.policy
    rounding = FOLD_ROUNDING[policy.checkpoint_dtype.name] * (2 if policy.rounding == "stochastic" else 1)
    for slot in touched:
        error = relative_error(whole_checkpoint(after)[slot], whole_checkpoint(want)[slot])
        assert error <= tolerance + rounding, f"checkpoint of slot {slot}: {error}"
        assert not same_bits(after.checkpoint[slot], state.checkpoint[slot]), f"slot {slot} was not folded"
    others = np.setdiff1d(np.arange(state.num_slots), touched)
    pools = (jax.tree.map(lambda pool: pool[others], (x.checkpoint, x.readout)) for x in (state, after))
    assert same_bits(*pools), "a slot changed that had no part in this"
    if policy.readout != "checkpoint":
        assert same_bits(after.readout, encode(policy.readout, whole_checkpoint(after))), (
            "the copy is not that of its checkpoint"
        )
    assert jnp.isfinite(whole_checkpoint(after).astype(jnp.float32)).all()
