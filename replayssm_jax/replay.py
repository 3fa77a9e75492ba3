"""The public doors of ReplaySSM decoding: check, choose a backend, call it, move the pointer.

    state = init_state(recurrence, policy, num_slots)
    state, out = prefill(state, prompt)                      # any length, ends folded
    state, out = step(state, token)                          # reads the checkpoint, appends a record
    state, out = verify(state, drafts)                       # answers all drafts, commits none
    state = dataclasses.replace(state, pointer=commit(state.pointer, accepted))

All are pure and run as one compiled call each. Within a ``jax.jit`` that donates the state its arrays are updated in place;
called outside of one, every call returns a copy.
"""

import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from replayssm_jax import replay_pallas, replay_reference, replay_xla
from replayssm_jax.checks import check_implementation, check_recordable, check_rows, check_state, check_tokens
from replayssm_jax.pointer import after_flush, after_verify, commit
from replayssm_jax.slots import check_slots, debug_distinct, scatter_index
from replayssm_jax.state import ReplayState, Tokens

Array = jax.Array

# A backend is a module with verify, flush and supports. The last one that supports a request serves implementation=None.
_BACKENDS: dict[str, ModuleType] = {"reference": replay_reference, "xla": replay_xla, "pallas": replay_pallas}


def verify(
    state: ReplayState,
    tokens: Tokens,
    slots: Array | None = None,
    lengths: Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[ReplayState, Array]:
    """Outputs of T drafts per row; records them past the pointer, uncommitted.

    Rows whose ring is due (``length + 2 * max_draft > window``) fold their committed records into the checkpoint first. Every
    token sees all committed tokens and the drafts before it. ``commit`` on the returned pointer decides what is kept.

    Args:
        state: the pool.
        tokens: T drafts of B rows, T at most the policy's max_draft.
        slots: slot of each row, None for row b in slot b; values outside [0, N) are padding: output zero, nothing written.
            No slot twice (undefined; an error under ``checkify``). [B] int
        lengths: real tokens of each row, 0..T, None for T; a row of 0 leaves its slot untouched, bit for bit. [B] int
        implementation: "reference", "xla", "pallas", or None for the fastest that can. A named one runs or raises.

    Returns:
        The pool, and the outputs, zero past ``lengths``. [B, T, H, V] v's dtype

    Raises:
        TypeError, ValueError: an argument's dtype, rank or shape is wrong; the message names it.
        NotImplementedError: the named implementation cannot do this; the message says what works.
    """
    check_state(state)
    _, num_tokens = check_tokens(state, tokens)
    check_recordable(state, tokens)
    if num_tokens > state.policy.max_draft:
        raise ValueError(
            f"tokens holds T={num_tokens} drafts, more than the policy's max_draft={state.policy.max_draft}; "
            f"a prompt goes through prefill"
        )
    slots, lengths = check_rows(state, tokens, slots, lengths)
    backend = _choose_backend(implementation, state, tokens)
    after, out = _verify(backend, state, tokens, slots, lengths)
    return dataclasses.replace(after, pointer=after_verify(state.pointer, slots, lengths)), out


def step(
    state: ReplayState,
    tokens: Tokens,
    slots: Array | None = None,
    lengths: Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[ReplayState, Array]:
    """One token per row, committed: ``verify`` of T = 1, then ``commit``. With max_draft=1 it flushes every window - 1 tokens.

    Args, Returns, Raises:
        As ``verify``; tokens must hold T = 1.
    """
    check_state(state)
    _, num_tokens = check_tokens(state, tokens)
    if num_tokens != 1:
        raise ValueError(f"tokens must hold one token per row for a step, got T={num_tokens}; verify takes drafts")
    after, out = verify(state, tokens, slots, lengths, implementation=implementation)
    slots, lengths = check_rows(state, tokens, slots, lengths)
    return dataclasses.replace(after, pointer=commit(after.pointer, lengths, slots)), out


def flush(
    state: ReplayState,
    slots: Array | None = None,
    where: Array | None = None,
    *,
    implementation: str | None = None,
) -> ReplayState:
    """Folds every committed record now: for snapshots, export, a change of precision. Drafts keep their rows
    behind the pointer and can still be committed.

    Args:
        state: the pool.
        slots: slots to flush, None for all; values outside [0, N) are padding. [B] int
        where: which of them, None for all. [B] bool, or [N] bool if slots is None
        implementation: as in ``verify``.

    Returns:
        The pool with those slots' records in their checkpoints; a slot without records keeps its bits.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``verify``.
    """
    check_state(state)
    checked = check_slots(slots, state.num_slots)
    debug_distinct(checked, state.num_slots)
    where = jnp.ones(checked.shape, bool) if where is None else jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise TypeError(f"where must be bool, got {where.dtype}")
    if where.shape != checked.shape:
        raise ValueError(f"where must have one entry per row, shape {checked.shape}, got {where.shape}")
    backend = _choose_backend(implementation, state, None)
    after = _flush(backend, state, None if slots is None else checked, where)
    rows = scatter_index(checked, state.num_slots, keep=where)
    folded = jnp.zeros(state.num_slots, bool).at[rows].set(True, mode="drop")
    return dataclasses.replace(after, pointer=after_flush(state.pointer, folded))


def materialize(state: ReplayState, slots: Array | None = None) -> Array:
    """The exact present state, committed records included and drafts left out; changes nothing.

    Args:
        state: the pool.
        slots: which slots, None for all; padding gives zeros. A slot may be named twice. [B] int

    Returns:
        [B, H, V, K] float32

    Raises:
        TypeError, ValueError: slots is no vector of integers.
    """
    check_state(state)
    checked = check_slots(slots, state.num_slots)
    return _materialize(state, None if slots is None else checked, checked.shape[0])


@functools.partial(jax.jit, static_argnums=0)
def _verify(
    backend: ModuleType, state: ReplayState, tokens: Tokens, slots: Array | None, lengths: Array
) -> tuple[ReplayState, Array]:
    return backend.verify(state, tokens, slots, lengths)


@functools.partial(jax.jit, static_argnums=0)
def _flush(backend: ModuleType, state: ReplayState, slots: Array | None, where: Array) -> ReplayState:
    return backend.flush(state, slots, where)


@functools.partial(jax.jit, static_argnums=2)
def _materialize(state: ReplayState, slots: Array | None, num_rows: int) -> Array:
    return replay_xla.materialize(state, slots, num_rows)


def _choose_backend(implementation: str | None, state: ReplayState, tokens: Tokens | None) -> ModuleType:
    if implementation is not None:
        backend = _BACKENDS[check_implementation(implementation, tuple(_BACKENDS))]
        if reason := backend.supports(state, tokens):
            raise NotImplementedError(f"implementation={implementation!r}: {reason}")
        return backend
    return next(b for b in reversed(_BACKENDS.values()) if b.supports(state, tokens) is None)
