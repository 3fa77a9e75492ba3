"""One call of the kernels against the law: from states in mid-window, with NaN in everything that must not be read."""

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

import replayssm_jax as rs
from replayssm_jax import ReplayState, Tokens, replay_pallas, replay_reference
from tests.cases import Case, make_tokens, poison_dead
from tests.compare import relative_error, same_bits

# bar.sync between threads of one warpgroup, which interpret mode runs as one
INTERPRET = plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore")
NUM_SLOTS = 6
# batch rows: slots out of order, two of them padding, one slot (4) that nobody names
SLOTS = np.array([2, 9, 0, 3, -1, 5], np.int32)


def mid_window(case: Case, rng: np.random.Generator, counts: list[int]) -> ReplayState:
    """A pool whose slots hold ``counts`` committed records anywhere in their rings; all other ring rows are NaN."""
    state = jax.tree.map(np.array, rs.init_state(case.recurrence, case.policy, len(counts)))
    state.pointer.length[:] = counts
    state.pointer.origin[:] = rng.integers(0, 1000, len(counts))
    scales = {"key": 1 / np.sqrt(case.dims[1]), "update": 1.0, "weight": 1.0, "log_decay": 1.0}
    for name, scale in scales.items():
        if (pool := getattr(state.buffer, name)) is None:
            continue
        pool[:] = np.nan
        for slot, count in enumerate(counts):
            rows = (state.pointer.origin[slot] + np.arange(count)) % case.window
            values = scale * rng.standard_normal(pool[slot][:, rows].shape)
            pool[slot][:, rows] = -0.1 * np.abs(values) if name == "log_decay" else values
    state.checkpoint[:] = 0.1 * rng.standard_normal(state.checkpoint.shape)
    return jax.tree.map(jnp.asarray, state)


def make_call(
    case: Case, rng: np.random.Generator, tokens: int, make_state: Callable[..., ReplayState] = mid_window
) -> tuple[ReplayState, Tokens, np.ndarray, np.ndarray]:
    """State, tokens, slots, lengths: rows with an empty ring, with a few records, with a ring that is due; ragged drafts."""
    full = case.window - case.max_draft
    counts = [full, 1, min(3, full), full, min(5, full), 0]
    lengths = np.array([tokens, tokens, max(1, tokens - 1), 0, tokens, tokens], np.int32)
    live = ((SLOTS >= 0) & (SLOTS < NUM_SLOTS))[:, None] & (np.arange(tokens) < lengths[:, None])
    drafts = poison_dead(make_tokens(case, rng, len(SLOTS), tokens), live)
    return make_state(case, rng, counts), jax.tree.map(jnp.asarray, drafts), SLOTS, lengths


def assert_verify_is_right(case: Case, rng: np.random.Generator, tokens: int, tolerance: float, interpret=None) -> None:
    """Outputs, checkpoints and rings of one verify against the law; everything it must leave alone bit for bit."""
    state, drafts, slots, lengths = make_call(case, rng, tokens)
    run = jax.jit(lambda *call: replay_pallas.verify(*call, interpret=interpret))
    after, out = run(state, drafts, slots, lengths)
    want, want_out = jax.jit(replay_reference.verify)(state, drafts, slots, lengths)

    assert out.dtype == drafts.v.dtype
    rounding = {"float32": 0.0, "float16": 1e-3, "bfloat16": 6e-3}
    rounded = tolerance + rounding[case.activations] + {"float32": 0.0, "float16": 5e-4, "bfloat16": 4e-3}[case.checkpoint]
    assert relative_error(out, want_out) <= rounded
    live = (slots >= 0) & (slots < NUM_SLOTS) & (lengths > 0)
    assert (np.asarray(out)[~live] == 0).all(), "outputs of padding are not zero"
    assert (np.asarray(out)[live & (lengths < tokens), -1] == 0).all(), "outputs past a row's length are not zero"
    state_tolerance = {"float32": tolerance, "float16": 1e-3, "bfloat16": 8e-3}[case.checkpoint]
    assert relative_error(after.checkpoint, want.checkpoint) <= state_tolerance
    # what is computed from a checkpoint that was rounded once more, and perhaps the other way, carries that rounding
    assert_buffers_close(after, want, max(tolerance, state_tolerance if case.checkpoint != "float32" else 0.0))
    untouched = sorted(set(range(NUM_SLOTS)) - set(slots[live].tolist()))
    for slot in untouched:
        before_and_after = (jax.tree.map(lambda pool, slot=slot: pool[slot], tree) for tree in (state, after))
        assert same_bits(*before_and_after), f"slot {slot} changed and had no part in this"
    kept = [s for s in slots[live] if int(state.pointer.length[s]) + 2 * case.max_draft <= case.window]
    assert same_bits(state.checkpoint[np.array(kept)], after.checkpoint[np.array(kept)]), "checkpoint written early"


def assert_buffers_close(after: ReplayState, want: ReplayState, tolerance: float) -> None:
    """Raw inputs recorded bit for bit, what was computed within the tolerance, NaN where it was."""
    assert same_bits(after.buffer.key, want.buffer.key), "keys"
    assert same_bits(after.buffer.log_decay, want.buffer.log_decay), "log decays"
    for name in ("update", "weight"):
        got, expected = getattr(after.buffer, name), getattr(want.buffer, name)
        if expected is None:
            continue
        got, expected = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
        assert (np.isnan(got) == np.isnan(expected)).all(), f"{name}: other rows than the drafts' were written"
        assert relative_error(np.nan_to_num(got), np.nan_to_num(expected)) <= tolerance, name


def assert_flush_is_right(case: Case, rng: np.random.Generator, tolerance: float, interpret=None) -> None:
    """A flush of some rows against the law; rings and all other checkpoints bit for bit."""
    state, _, slots, _ = make_call(case, rng, 1)
    where = np.array([True, True, False, True, True, True])
    after = jax.jit(lambda *call: replay_pallas.flush(*call, interpret=interpret))(state, slots, where)
    want = jax.jit(replay_reference.flush)(state, slots, where)
    state_tolerance = {"float32": tolerance, "float16": 1e-3, "bfloat16": 8e-3}[case.checkpoint]
    assert relative_error(after.checkpoint, want.checkpoint) <= state_tolerance
    assert same_bits(after.buffer, state.buffer), "a flush wrote to the ring"
    for slot in (0, 1, 4, 5):  # not asked for, or without records
        assert same_bits(state.checkpoint[slot], after.checkpoint[slot]), f"slot {slot} changed"


def verify_tolerance(case: Case) -> float:
    """Relative error of a verify before its results are rounded: of two bfloat16 terms, or where there is room of three."""
    three = case.activations == "float32" and not (case.gate == "channel" and case.dims[1] > 128)
    return 2e-6 if three else 2e-5


def with_drafts(case: Case, tokens: int) -> Case:
    return dataclasses.replace(case, max_draft=tokens)
