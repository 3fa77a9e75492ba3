"""The rows of one call: slot, real tokens, ring positions. Shared by every backend written in jnp."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from replayssm_jax.blocked import Block
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.readout import PLANE, decode, encode, join_planes, lower_plane
from replayssm_jax.recurrence import scaled
from replayssm_jax.rounding import round_checkpoint
from replayssm_jax.slots import gather_index, in_range, scatter_index
from replayssm_jax.state import Recurrence, ReplayBuffer, ReplayState, Tokens

Array = jax.Array


class Rows(NamedTuple):
    """What a call needs to know about its rows. Rows without tokens, padding among them, are dead: they write nothing."""

    read: Array | None  # [B] slot to read, always in range; None where row b reads slot b, which spares a gather
    write: Array  # [B] slot to write, N where the row is dead
    live: Array  # [B, T] real tokens
    length: Array  # [B] committed records
    origin: Array  # [B] tokens folded so far
    request: Array  # [B]


def locate(pointer: ReplayPointer, slots: Array | None, lengths: Array, num_tokens: int) -> Rows:
    """Looks rows up in the pointer. ``slots`` [B] int32 or None for row b in slot b, ``lengths`` [B] int32, checked already."""
    read = None if slots is None else gather_index(slots, pointer.num_slots)
    slots = jnp.arange(lengths.shape[0]) if slots is None else slots
    real = in_range(slots, pointer.num_slots)
    rows = Rows(
        read=read,
        write=scatter_index(slots, pointer.num_slots, keep=lengths > 0),
        live=real[:, None] & (jnp.arange(num_tokens) < lengths[:, None]),
        length=lengths,
        origin=lengths,
        request=lengths,
    )
    return rows._replace(**{name: take_rows(getattr(pointer, name), rows) for name in ("length", "origin", "request")})


def live_tokens(tokens: Tokens, live: Array) -> Tokens:
    """Tokens with every dead entry zero (no decay, no write), whatever lay there."""

    def mask(x: Array) -> Array:
        return jnp.where(live.reshape(live.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    return jax.tree.map(mask, tokens)


def take_rows(pool: Array, rows: Rows) -> Array:
    """The rows' entries of a pool [N, ...] -> [B, ...]."""
    if rows.read is None:
        return pool[: rows.write.shape[0]]
    return pool.at[rows.read].get(mode="promise_in_bounds")


def take_ring(buffer: ReplayBuffer, rows: Rows, window: int) -> tuple[ReplayBuffer, ReplayBuffer]:
    """The rows' rings in order of age, and the buffer itself, to be written only after they have been read.

    Returns:
        A buffer whose entries are [B, ..., L, ...] with logical record j in row j, and the pool. The barrier between the two
        is what lets XLA append in place: without it the pool would be copied for fear of a later read.
    """
    ring = (rows.origin[:, None] + jnp.arange(window)) % window  # [B, L] physical row of logical record j

    def take(pool: Array) -> Array:
        index = ring.reshape(-1, 1, window, *(1,) * (pool.ndim - 3))
        return jnp.take_along_axis(take_rows(pool, rows), index, axis=2)

    return jax.lax.optimization_barrier((jax.tree.map(take, buffer), buffer))


def first_records(ring: ReplayBuffer, count: Array) -> Block:
    """The first ``count`` [B] records of each row of a ring in order of age, as float32; the other entries are zero."""
    window = ring.key.shape[2]
    alive = jnp.arange(window) < count[:, None]

    def mask(x: Array) -> Array:
        dead = jnp.zeros((), x.dtype)
        return jnp.where(alive.reshape(-1, 1, window, *(1,) * (x.ndim - 3)), x, dead).astype(jnp.float32)

    key, update, log_decay = mask(ring.key), mask(ring.update), mask(ring.log_decay)
    weight = None if ring.weight is None else mask(ring.weight)
    if ring.factor is not None:
        return Block(scaled(key, mask(ring.factor)), update, log_decay, beta=weight)
    return Block(key, update if weight is None else update * weight[..., None], log_decay)


def committed_records(buffer: ReplayBuffer, rows: Rows, window: int, count: Array) -> Block:
    """The first ``count`` [B] records of each row in order of age, as float32; the rest of the L entries are zero."""
    return first_records(take_ring(buffer, rows, window)[0], count)


def append_records(
    recurrence: Recurrence, buffer: ReplayBuffer, rows: Rows, window: int, tokens: Tokens, u: Array | None
) -> ReplayBuffer:
    """Writes the live tokens' records right behind the committed ones, uncommitted.

    Args:
        recurrence: which recurrence.
        buffer: ring to write to.
        rows: where.
        window: L.
        tokens: T tokens.
        u: updates, needed where they are recorded. [B, T, H, V] float32

    Returns:
        The buffer; rows of the ring that take no live token keep their bits.
    """
    num_tokens = rows.live.shape[1]
    row = (rows.origin[:, None] + rows.length[:, None] + jnp.arange(num_tokens)) % window  # [B, T]
    slot = jnp.where(rows.live, rows.write[:, None], buffer.key.shape[0])

    def put(pool: Array, values: Array) -> Array:
        return pool.at[slot, :, row].set(values.astype(pool.dtype), mode="drop")

    one = jnp.ones(tokens.k.shape[:-1], jnp.float32)
    factor = one if tokens.k_scale is None else tokens.k_scale  # [B, T, G]
    by_head = jnp.repeat(factor, recurrence.group_size, axis=-1)  # [B, T, H]
    records: dict[str, Array] = {"key": tokens.k, "log_decay": tokens.log_decay}
    if buffer.factor is not None:
        records |= {"update": tokens.v, "weight": tokens.beta, "factor": factor}
    elif buffer.weight is not None:
        records |= {"update": tokens.v, "weight": tokens.beta * by_head}
    else:
        assert u is not None
        records["update"] = u * by_head[..., None]
    return dataclasses.replace(buffer, **{name: put(getattr(buffer, name), values) for name, values in records.items()})


def to_block(tokens: Tokens) -> tuple[Array, Block]:
    """Tokens as float32 blocks with heads before time: q [B, G, T, K], and all else, still to be solved."""
    q, k = scaled(tokens.q, tokens.q_scale), scaled(tokens.k, tokens.k_scale)

    def heads_first(x: Array) -> Array:
        return jnp.swapaxes(x, 1, 2)

    fields = (k, tokens.v.astype(jnp.float32), tokens.log_decay, tokens.beta)
    return heads_first(q), Block(*map(heads_first, fields))


def take_checkpoint(state: ReplayState, rows: Rows) -> Array:
    """The rows' checkpoints, which folds start from. [B, H, V, K] float32"""
    own = take_rows(state.checkpoint, rows)
    if state.policy.readout != PLANE:
        return own.astype(jnp.float32)
    assert state.readout is not None
    return join_planes(take_rows(state.readout.payload, rows), own)


def read_checkpoint(state: ReplayState, rows: Rows) -> Array:
    """What ordinary reads of the rows use: the checkpoint, or what its read-out copy says. [B, H, V, K] float32"""
    if state.readout is None:
        return take_checkpoint(state, rows)
    own = jax.tree.map(lambda pool: take_rows(pool, rows), state.readout)
    return decode(state.policy.readout, own, state.recurrence.key_dim)


def store(state: ReplayState, rows: Rows, present: Array, position: Array, which: Array | None = None) -> ReplayState:
    """Writes what a fold has made: the checkpoint, rounded to its dtype, and the read-out copy of that.

    Args:
        state: the pool.
        rows: where to.
        present: the new states. [B, H, V, K] float32
        position: tokens that they have seen. [B] int32
        which: rows to write, None for all that live. [B] bool

    Returns:
        The pool; its pointer is left to the caller.
    """
    first_head = 0 if state.first_head is None else state.first_head
    rounded = round_checkpoint(present, state.policy, rows.request, position, first_head)
    target = scatter_index(rows.write, state.num_slots, keep=which)
    new: tuple = (rounded, None)
    if state.readout is not None:
        # apart from the copy, so that it is compiled as it would be without one: the checkpoint's bits do not depend on it
        rounded = jax.lax.optimization_barrier(rounded)
        new = lower_plane(rounded) if state.policy.readout == PLANE else rounded, encode(state.policy.readout, rounded)
    pools = (state.checkpoint, state.readout)
    checkpoint, readout = jax.tree.map(lambda pool, values: pool.at[target].set(values, mode="drop"), pools, new)
    return dataclasses.replace(state, checkpoint=checkpoint, readout=readout)
