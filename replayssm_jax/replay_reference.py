"""The replay contract served by the law itself: replays every record and token one by one. The oracle of the fast backends."""

import dataclasses

import jax
import jax.numpy as jnp

from replayssm_jax import rows as rows_lib
from replayssm_jax.blocked import Block
from replayssm_jax.recurrence import recurrent, recurrent_token
from replayssm_jax.rows import Rows
from replayssm_jax.state import Recurrence, ReplayState, Tokens

Array = jax.Array


def supports(state: ReplayState, tokens: Tokens | None = None) -> str | None:
    """Why this backend cannot serve a request, or None. It serves all."""
    del state, tokens
    return None


def verify(state: ReplayState, tokens: Tokens, slots: Array | None, lengths: Array) -> tuple[ReplayState, Array]:
    """Folds due rows, answers T drafts, appends their records. The pointer is left to the caller. See ``replay.verify``."""
    rows = rows_lib.locate(state.pointer, slots, lengths, tokens.q.shape[1])
    due = rows_lib.take_rows(state.pointer.due, rows) & rows.live[:, 0]
    present = _replayed(state, rows)
    state = rows_lib.store(state, rows, present, rows.origin + rows.length, due)
    # a folded row goes on from what its checkpoint, or the copy that reads use, now holds, rounding included
    read = rows_lib.read_checkpoint(state, rows)
    if state.readout is not None:
        present = _replayed(state, rows, read)
    present = jnp.where(due[:, None, None, None], read, present)

    tokens = rows_lib.live_tokens(tokens, rows.live)
    _, u, out = recurrent(state.recurrence, present, tokens, rows.live)
    buffer = rows_lib.append_records(state.recurrence, state.buffer, rows, state.policy.window, tokens, u)
    return dataclasses.replace(state, buffer=buffer), out.astype(tokens.v.dtype)


def flush(state: ReplayState, slots: Array | None, where: Array) -> ReplayState:
    """Folds the committed records of rows in ``where`` [B] bool. The pointer is left to the caller."""
    rows = rows_lib.locate(state.pointer, slots, where.astype(jnp.int32), 1)
    return rows_lib.store(state, rows, _replayed(state, rows), rows.origin + rows.length, rows.length > 0)


def prefill(state: ReplayState, tokens: Tokens, slots: Array | None, lengths: Array) -> tuple[ReplayState, Array]:
    """A prompt, token by token, ending folded. The pointer is left to the caller. See ``prefill.prefill``."""
    rows = rows_lib.locate(state.pointer, slots, lengths, tokens.q.shape[1])
    tokens = rows_lib.live_tokens(tokens, rows.live)
    present, _, out = recurrent(state.recurrence, _replayed(state, rows), tokens, rows.live)
    position = rows.origin + rows.length + rows.live.sum(axis=1, dtype=jnp.int32)
    return rows_lib.store(state, rows, present, position), out.astype(tokens.v.dtype)


def _replayed(state: ReplayState, rows: Rows, start: Array | None = None) -> Array:
    """The present state: ``start``, or the checkpoint, after every committed record, one at a time. [B, H, V, K] float32"""
    records = rows_lib.committed_records(state.buffer, rows, state.policy.window, rows.length)
    start = rows_lib.take_checkpoint(state, rows) if start is None else start

    def apply(present: Array, record: Block) -> tuple[Array, None]:
        return _apply_record(state.recurrence, present, record), None

    oldest_first = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), records)
    return jax.lax.scan(apply, start, oldest_first)[0]


def _apply_record(recurrence: Recurrence, state: Array, record: Block) -> Array:
    if record.beta is not None:
        token = Tokens(q=record.key, k=record.key, v=record.update, log_decay=record.log_decay, beta=record.beta)
        return recurrent_token(recurrence, state, token)[0]
    alpha = jnp.exp(record.log_decay)
    alpha = alpha[..., None, None] if recurrence.gate == "head" else alpha[..., None, :]
    key = jnp.repeat(record.key, recurrence.group_size, axis=1)
    return state * alpha + record.update[..., :, None] * key[..., None, :]
