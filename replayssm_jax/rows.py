"""The rows of one call: slot, real tokens, ring positions. Shared by every backend written in jnp."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from replayssm_jax.blocked import Block
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.recurrence import scaled
from replayssm_jax.slots import gather_index, in_range, scatter_index
from replayssm_jax.state import Recurrence, ReplayBuffer, ReplayPolicy, Tokens

Array = jax.Array


class Rows(NamedTuple):
    """What a call needs to know about its rows. Rows without tokens, padding among them, are dead: they write nothing."""

    read: Array | None  # [B] slot to read, always in range; None where row b reads slot b, which spares a gather
    write: Array  # [B] slot to write, N where the row is dead
    live: Array  # [B, T] real tokens
    length: Array  # [B] committed records
    origin: Array  # [B]


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
    )
    return rows._replace(length=take_rows(pointer.length, rows), origin=take_rows(pointer.origin, rows))


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

    update = mask(ring.update)
    if ring.weight is not None:
        update = update * mask(ring.weight)[..., None]
    return Block(key=mask(ring.key), update=update, log_decay=mask(ring.log_decay))


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
        u: updates, needed with the delta rule. [B, T, H, V] float32

    Returns:
        The buffer; rows of the ring that take no live token keep their bits.
    """
    num_tokens = rows.live.shape[1]
    row = (rows.origin[:, None] + rows.length[:, None] + jnp.arange(num_tokens)) % window  # [B, T]
    slot = jnp.where(rows.live, rows.write[:, None], buffer.key.shape[0])

    def put(pool: Array, values: Array) -> Array:
        return pool.at[slot, :, row].set(values.astype(pool.dtype), mode="drop")

    factor = jnp.ones((), jnp.float32)
    if tokens.k_scale is not None:
        factor = jnp.repeat(tokens.k_scale, recurrence.group_size, axis=-1)  # [B, T, H]
    if recurrence.delta_rule:
        assert u is not None
        update, weight = u * factor[..., None], None
    else:
        update, weight = tokens.v, tokens.beta * factor
    return ReplayBuffer(
        key=put(buffer.key, tokens.k),
        update=put(buffer.update, update),
        weight=None if buffer.weight is None or weight is None else put(buffer.weight, weight),
        log_decay=put(buffer.log_decay, tokens.log_decay),
    )


def to_block(tokens: Tokens) -> tuple[Array, Block, Array]:
    """Tokens as float32 blocks with heads before time: q [B, G, T, K], keys with values and log decays, beta [B, H, T]."""
    q, k = scaled(tokens.q, tokens.q_scale), scaled(tokens.k, tokens.k_scale)

    def heads_first(x: Array) -> Array:
        return jnp.swapaxes(x, 1, 2)

    block = Block(heads_first(k), heads_first(tokens.v.astype(jnp.float32)), heads_first(tokens.log_decay))
    return heads_first(q), block, heads_first(tokens.beta)


def round_checkpoint(state: Array, policy: ReplayPolicy) -> Array:
    """A float32 state rounded to the checkpoint's dtype, the one rounding of a flush; saturates, keeps NaN."""
    if policy.checkpoint_dtype == jnp.float32:
        return state
    limit = float(jnp.finfo(policy.checkpoint_dtype).max)
    return jnp.clip(state, -limit, limit).astype(policy.checkpoint_dtype)
