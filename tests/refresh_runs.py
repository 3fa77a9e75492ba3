"""The refresh kernel against the backend in jnp: from states in mid-window, with NaN in everything that must not be read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hopper
from replayssm_jax import ReplayState, readout, replay_pallas, replay_xla
from replayssm_jax import rows as rows_lib
from replayssm_jax.rounding import round_checkpoint
from tests.cases import Case
from tests.compare import relative_error, same_bits
from tests.kernel_runs import mid_window
from tests.lockstep import FAST_COMPILE, whole_checkpoint

# batch rows: slots out of order, one of them padding, one row without tokens, one slot (1) that nobody names
SLOTS = np.array([2, 9, 0, 3, 4], np.int32)
LENGTHS = np.array([1, 1, 3, 0, 1], np.int32)
FOLD_ROUNDING = {"float32": 0.0, "float16": 6e-4, "bfloat16": 5e-3}


def geometry_of(state: ReplayState, rows: int) -> hopper.Geometry:
    return dataclasses.replace(replay_pallas._geometry(state, None), rows=rows)


def run_refresh(state: ReplayState, slots, lengths, due_only: bool, interpret=None) -> ReplayState:
    """The state after one call of the kernel."""
    rows, refs = replay_pallas._rows(state, slots, lengths), replay_pallas._refs(state)
    replay_pallas._refresh(state, rows, refs, geometry_of(state, slots.shape[0]), due_only, interpret)
    return replay_pallas._frozen(state, refs)


def make_state(case: Case, rng: np.random.Generator, counts: list[int]) -> ReplayState:
    """A pool in mid-window with raw records, its read-out copy and request ids."""
    whole = dataclasses.replace(case, readout="bf16") if case.readout == readout.PLANE else case  # split at the end
    state = mid_window(whole, rng, counts)
    factor = state.buffer.factor
    if factor is not None:
        factor = np.full(factor.shape, np.nan, np.float32)
        for slot, count in enumerate(counts):
            rows = (int(state.pointer.origin[slot]) + np.arange(count)) % case.window
            factor[slot][:, rows] = rng.uniform(0.5, 1.5, factor[slot][:, rows].shape)
        factor = jnp.asarray(factor)
    forgotten = (rng.random(state.buffer.log_decay.shape) < 0.02) & np.isfinite(state.buffer.log_decay)
    log_decay = jnp.where(forgotten, -jnp.inf, state.buffer.log_decay)
    scale = 10.0 ** rng.integers(-2, 2, (*state.checkpoint.shape[:3], 1))  # rows of many sizes, as scales like to have them
    state = dataclasses.replace(
        state,
        checkpoint=(state.checkpoint * scale).astype(state.checkpoint.dtype),
        buffer=dataclasses.replace(state.buffer, factor=factor, log_decay=log_decay),
        pointer=dataclasses.replace(state.pointer, request=jnp.asarray(rng.integers(0, 2**31, len(counts)), jnp.int32)),
        policy=dataclasses.replace(state.policy, readout=case.readout),
    )
    return with_copy(state)


def with_copy(state: ReplayState) -> ReplayState:
    if state.policy.readout == "checkpoint":
        return state
    policy, checkpoint = state.policy, state.checkpoint
    lower = readout.lower_plane(checkpoint) if policy.readout == readout.PLANE else checkpoint
    return dataclasses.replace(state, checkpoint=lower, readout=encode(policy.readout, checkpoint))


encode = jax.jit(readout.encode, static_argnums=0, compiler_options=FAST_COMPILE)


def as_float32(state: ReplayState) -> ReplayState:
    """The same state with a checkpoint that a fold does not round, and without a copy."""
    policy = dataclasses.replace(
        state.policy, checkpoint_dtype="float32", readout="checkpoint", records="raw", rounding="nearest"
    )
    return dataclasses.replace(state, policy=policy, checkpoint=jnp.asarray(whole_checkpoint(state), jnp.float32), readout=None)


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def folded(state: ReplayState, slots, live) -> ReplayState:
    """``replay_xla`` 's fold of the rows in ``live`` [B] bool."""
    rows = rows_lib.locate(state.pointer, slots, live.astype(jnp.int32), 1)
    ring, _ = rows_lib.take_ring(state.buffer, rows, state.policy.window)
    return replay_xla._fold_rows(state, rows, ring, rows.live[:, 0] & (rows.length > 0))


def folded_slots(state: ReplayState, slots, lengths, due_only: bool) -> np.ndarray:
    """Batch rows that a refresh has to fold. [B] bool"""
    slots, counts = np.asarray(slots), np.asarray(state.pointer.length)
    real = (slots >= 0) & (slots < state.num_slots) & (np.asarray(lengths) > 0)
    count = np.where(real, counts[np.where(real, slots, 0)], 0)
    policy = state.policy
    return (count > 0) & ((count + 2 * policy.max_draft > policy.window) | (not due_only))


def assert_refresh_is_right(
    state: ReplayState, slots, lengths, due_only: bool, tolerance: float, interpret=None
) -> ReplayState:
    """Checkpoints within the tolerance of the backend in jnp; copies of them, and all that is nobody's, bit for bit."""
    policy = state.policy
    run = jax.jit(functools.partial(run_refresh, due_only=due_only, interpret=interpret), compiler_options=FAST_COMPILE)
    after = run(state, slots, lengths)
    live = folded_slots(state, slots, lengths, due_only)
    assert live.any()
    want = folded(as_float32(state), slots, live)
    touched = np.sort(np.asarray(slots)[live])
    untouched = np.setdiff1d(np.arange(state.num_slots), touched)

    dtype = policy.checkpoint_dtype.name
    finite = np.isfinite(np.asarray(want.checkpoint, np.float32))
    limit = float(jnp.finfo(policy.checkpoint_dtype).max)
    expected = np.clip(np.where(finite, want.checkpoint, 0), -limit, limit)
    got = np.where(finite, np.asarray(whole_checkpoint(after), np.float32), 0)
    error = relative_error(got[touched], expected[touched])
    assert error <= tolerance + FOLD_ROUNDING[dtype] * (2 if policy.rounding == "stochastic" else 1), f"checkpoint: {error}"
    assert same_bits(after.buffer, state.buffer), "a refresh wrote to the ring"
    before_and_after = ((x.checkpoint[untouched], jax.tree.map(lambda y: y[untouched], x.readout)) for x in (state, after))
    assert same_bits(*before_and_after), "a slot changed that had no part in this"
    if policy.readout != "checkpoint":
        copy = encode(policy.readout, whole_checkpoint(after))
        for field in dataclasses.fields(copy):
            got, expected = getattr(after.readout, field.name), getattr(copy, field.name)
            if expected is not None:
                wrong = np.asarray(got)[touched].astype(np.float64) != np.asarray(expected)[touched]
                assert not wrong.any(), f"{field.name}: {wrong.mean():.2%} differ, first at {np.argwhere(wrong)[0]}"
    return after


def assert_chance_is_right(state: ReplayState, slots, lengths, after: ReplayState, interpret=None) -> None:
    """``after``, a refresh of ``state`` with stochastic rounding, has the rounded checkpoint of one in float32, bit for bit."""
    exact = run_refresh(as_float32(state), slots, lengths, False, interpret)
    which = np.asarray(slots)[folded_slots(state, slots, lengths, False)]
    pointer = jax.tree.map(lambda x: x[which], state.pointer)
    position = pointer.origin + pointer.length
    first_head = 0 if state.first_head is None else state.first_head
    want = round_checkpoint(exact.checkpoint[which], state.policy, pointer.request, position, first_head)
    assert same_bits(after.checkpoint[which], want)
    assert not same_bits(want, exact.checkpoint[which].astype(want.dtype)), "chance had no part in it"
