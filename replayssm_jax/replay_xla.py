"""The replay algorithm in jnp: runs wherever XLA does, and is always the last backend.

One jitted call serves ragged rows, per-row pointers and padding; a flush happens under ``lax.cond`` on the device, so a step
in which no row is due reads the checkpoint and writes none of it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from replayssm_jax import rows as rows_lib
from replayssm_jax.blocked import fold, run_block
from replayssm_jax.readout import Readout
from replayssm_jax.rows import Rows
from replayssm_jax.state import ReplayBuffer, ReplayState, Tokens

Array = jax.Array


def supports(state: ReplayState, tokens: Tokens | None = None) -> str | None:
    """Why this backend cannot serve a request, or None. It serves all."""
    del state, tokens
    return None


def verify(state: ReplayState, tokens: Tokens, slots: Array | None, lengths: Array) -> tuple[ReplayState, Array]:
    """Folds due rows, answers T drafts, appends their records. The pointer is left to the caller. See ``replay.verify``."""
    policy, pointer = state.policy, state.pointer
    rows = rows_lib.locate(pointer, slots, lengths, tokens.q.shape[1])
    due = rows_lib.take_rows(state.pointer.due, rows) & rows.live[:, 0]
    ring, buffer = rows_lib.take_ring(state.buffer, rows, policy.window)
    state = _fold_rows(state, rows, ring, due)

    past = rows_lib.first_records(ring, jnp.where(due, 0, rows.length))
    tokens = rows_lib.live_tokens(tokens, rows.live)
    out, u = run_block(state.recurrence, rows_lib.read_checkpoint(state, rows), past, *rows_lib.to_block(tokens))
    out, u = jnp.swapaxes(out, 1, 2), jnp.swapaxes(u, 1, 2)
    buffer = rows_lib.append_records(state.recurrence, buffer, rows, policy.window, tokens, u)
    out = jnp.where(rows.live[..., None, None], out, 0).astype(tokens.v.dtype)
    return dataclasses.replace(state, buffer=buffer), out


def flush(state: ReplayState, slots: Array | None, where: Array) -> ReplayState:
    """Folds the committed records of rows in ``where`` [B] bool. The pointer is left to the caller."""
    rows = rows_lib.locate(state.pointer, slots, where.astype(jnp.int32), 1)
    ring, buffer = rows_lib.take_ring(state.buffer, rows, state.policy.window)
    state = _fold_rows(state, rows, ring, rows.live[:, 0] & (rows.length > 0))
    return dataclasses.replace(state, buffer=buffer)


def materialize(state: ReplayState, slots: Array | None, num_rows: int) -> Array:
    """The present state of each row, zeros for padding. [B, H, V, K] float32"""
    rows = rows_lib.locate(state.pointer, slots, jnp.ones(num_rows, jnp.int32), 1)
    past = rows_lib.committed_records(state.buffer, rows, state.policy.window, rows.length)
    present = fold(state.recurrence, rows_lib.take_checkpoint(state, rows), past)
    return jnp.where(rows.live[:, :1, None, None], present, 0)


def _fold_rows(state: ReplayState, rows: Rows, ring: ReplayBuffer, which: Array) -> ReplayState:
    """The pool with the committed records of rows in ``which`` [B] bool folded in; ``ring`` in order of age."""

    def folded(pools: tuple[Array, Readout | None]) -> tuple[Array, Readout | None]:
        before = dataclasses.replace(state, checkpoint=pools[0], readout=pools[1])
        past = rows_lib.first_records(ring, rows.length)
        present = fold(state.recurrence, rows_lib.take_checkpoint(before, rows), past)
        after = rows_lib.store(before, rows, present, rows.origin + rows.length, which)
        return after.checkpoint, after.readout

    pools = (state.checkpoint, state.readout)
    checkpoint, readout = jax.lax.cond(jnp.any(which), folded, lambda pools: pools, pools)
    return dataclasses.replace(state, checkpoint=checkpoint, readout=readout)
