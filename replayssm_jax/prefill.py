"""Prompts of any length, chunk by chunk, from a slot's present state to a folded checkpoint.

Each chunk is one block of ``blocked.run_block`` (WY form with the delta rule, segment sums without), so a prompt of T tokens
takes O(T) work and O(T) memory; nothing of size T x T exists.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from replayssm_jax import replay_pallas, replay_reference
from replayssm_jax import rows as rows_lib
from replayssm_jax.blocked import Block, fold, run_block
from replayssm_jax.checks import check_implementation, check_rows, check_state, check_tokens
from replayssm_jax.pointer import after_prefill
from replayssm_jax.state import Recurrence, ReplayState, Tokens
from replayssm_jax.trees import check_positive_int

Array = jax.Array


def prefill(
    state: ReplayState,
    tokens: Tokens,
    slots: Array | None = None,
    lengths: Array | None = None,
    *,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[ReplayState, Array]:
    """Consumes a prompt, or the next piece of one, from each slot's present state.

    A fresh slot starts from zeros; a slot with records has them folded first. Afterwards the rows' checkpoints hold everything
    and their rings are empty. A slot that is reused must be ``reset`` before.

    Args:
        state: the pool.
        tokens: T tokens of B rows, any T.
        slots: slot of each row, None for row b in slot b; values outside [0, N) are padding. [B] int
        lengths: real tokens of each row, None for all T; a row of 0 leaves its slot untouched. [B] int
        chunk_size: tokens of one block; changes results by rounding only.
        implementation: None or "xla" for chunks, "reference" for one token at a time. "pallas" has kernels for decoding
            alone: where it can run, its prompts go through "xla".

    Returns:
        The pool, and the outputs, zero past ``lengths``. [B, T, H, V] v's dtype

    Raises:
        TypeError, ValueError: an argument's dtype, rank or shape is wrong; the message names it.
        NotImplementedError: no such implementation of prefill; the message says which work.
    """
    check_state(state)
    check_positive_int("chunk_size", chunk_size)
    check_tokens(state, tokens)
    slots, lengths = check_rows(state, tokens, slots, lengths)
    if implementation == "pallas":
        if reason := replay_pallas.missing_gpu():
            raise NotImplementedError(f"implementation='pallas': {reason}")
        implementation = "xla"
    if check_implementation(implementation, ("reference", "xla")) == "reference":
        after, out = jax.jit(replay_reference.prefill)(state, tokens, slots, lengths)
    else:
        after, out = _prefill_chunks(state, tokens, slots, lengths, chunk_size)
    return dataclasses.replace(after, pointer=after_prefill(state.pointer, slots, lengths)), out


@functools.partial(jax.jit, static_argnums=4)
def _prefill_chunks(
    state: ReplayState, tokens: Tokens, slots: Array | None, lengths: Array, chunk_size: int
) -> tuple[ReplayState, Array]:
    rows = rows_lib.locate(state.pointer, slots, lengths, tokens.q.shape[1])
    past = rows_lib.committed_records(state.buffer, rows, state.policy.window, rows.length)
    present = fold(state.recurrence, rows_lib.take_checkpoint(state, rows), past)
    tokens = rows_lib.live_tokens(tokens, rows.live)
    present, out = chunked(state.recurrence, present, tokens, chunk_size)
    out = jnp.where(rows.live[..., None, None], out, 0).astype(tokens.v.dtype)
    position = rows.origin + rows.length + rows.live.sum(axis=1, dtype=jnp.int32)
    return rows_lib.store(state, rows, present, position), out


def chunked(recurrence: Recurrence, state: Array, tokens: Tokens, chunk_size: int) -> tuple[Array, Array]:
    """The recurrence over T tokens of every row, all of them real, in chunks. Differentiable.

    Args:
        recurrence: which recurrence.
        state: [B, H, V, K] float32
        tokens: T tokens of B rows.
        chunk_size: tokens of one block.

    Returns:
        The state after them [B, H, V, K] and the outputs [B, T, H, V], both float32.
    """
    num_rows, num_tokens = tokens.q.shape[:2]
    size = min(chunk_size, num_tokens)
    num_chunks = -(-num_tokens // size)

    def split(x: Array) -> Array:  # [B, T, ...] -> [chunks, B, size, ...]; padding has no decay and writes nothing
        pad = [(0, 0), (0, num_chunks * size - num_tokens)] + [(0, 0)] * (x.ndim - 2)
        return jnp.swapaxes(jnp.pad(x, pad).reshape(num_rows, num_chunks, size, *x.shape[2:]), 0, 1)

    def chunk(state: Array, tokens: Tokens) -> tuple[Array, Array]:
        q, block = rows_lib.to_block(tokens)
        out, u = run_block(recurrence, state, None, q, block)
        return fold(recurrence, state, Block(block.key, u, block.log_decay)), out

    state, out = jax.lax.scan(chunk, state, jax.tree.map(split, tokens))  # out [chunks, B, H, size, V]
    out = jnp.transpose(out, (1, 0, 3, 2, 4)).reshape(num_rows, num_chunks * size, *out.shape[2:3], out.shape[4])
    return state, out[:, :num_tokens]
