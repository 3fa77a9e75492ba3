"""State of one state-space layer under ReplaySSM: a checkpoint, a ring of recent records, a pointer.

Axis legend, used in every shape comment of this package:

    B  rows of a batch            H  value heads         K  key dim (state columns, contiguous)
    N  slots of a state pool      G  key heads           V  value dim (state rows)
    T  tokens of a row            L  ring rows (window)

Value head ``h`` uses key head ``h // (H // G)``. Published names of a family (A_log, dt_bias, B, C, x) stop at its mixer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from replayssm_jax.pointer import ReplayPointer, init_pointer, reset_pointer
from replayssm_jax.policy import ReplayPolicy
from replayssm_jax.readout import Readout, encode
from replayssm_jax.slots import check_slots, debug_distinct, in_range, scatter_index
from replayssm_jax.trees import check_positive_int, register

Array = jax.Array
Gate = Literal["head", "channel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Static description of a layer's recurrence; names no model family.

        S_t = S_{t-1} * alpha_t + u_t k_t^T,  u_t = beta_t * (v_t - [delta_rule] * (S_{t-1} * alpha_t) k_t),  o_t = S_t q_t

    Args:
        num_value_heads: H, heads of the state, of v and of the output.
        num_key_heads: G, heads of q and k; divides H.
        key_dim: K, columns of the state.
        value_dim: V, rows of the state.
        delta_rule: whether u_t subtracts what the state already answers to k_t (DeltaNet, GDN, KDA) or not (Mamba-2, GLA).
        gate: "head" for one decay per value head, "channel" for one per value head and key channel.

    Raises:
        TypeError, ValueError: a field has the wrong type or value; the message names it.
    """

    num_value_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    delta_rule: bool
    gate: Gate

    def __post_init__(self) -> None:
        for name in ("num_value_heads", "num_key_heads", "key_dim", "value_dim"):
            check_positive_int(name, getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"num_value_heads={self.num_value_heads} must be divisible by num_key_heads={self.num_key_heads}")
        if not isinstance(self.delta_rule, bool):
            raise TypeError(f"delta_rule must be True or False, got {self.delta_rule!r}")
        if self.gate not in ("head", "channel"):
            raise ValueError(f"gate must be 'head' or 'channel', got {self.gate!r}")

    @property
    def group_size(self) -> int:
        """Value heads that share one key head (H // G)."""
        return self.num_value_heads // self.num_key_heads

    @property
    def decay_dims(self) -> tuple[int, ...]:
        """Trailing dims of a log decay: (H,) for a head gate, (H, K) for a channel gate."""
        return (self.num_value_heads,) if self.gate == "head" else (self.num_value_heads, self.key_dim)

    @property
    def state_dims(self) -> tuple[int, int, int]:
        """Dims of one slot's state: (H, V, K)."""
        return (self.num_value_heads, self.value_dim, self.key_dim)


@register(("q", "k", "v", "log_decay", "beta", "q_scale", "k_scale"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Inputs of T tokens for B rows.

    Attributes:
        q: queries. [B, T, G, K] float32, bfloat16 or float16
        k: keys. [B, T, G, K] same dtype choices; recorded as they come, so the policy's record_dtype must hold them
        v: values. [B, T, H, V] same dtype choices; gives the output its dtype
        log_decay: log of the gate, <= 0 (-inf forgets everything). [B, T, H] float32, or [B, T, H, K] for a channel gate
        beta: write strength. [B, T, H] float32
        q_scale: optional factor of q, so that a normalised query is a raw query and a float32 factor. [B, T, G] float32
        k_scale: the same for k. [B, T, G] float32
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array
    q_scale: Array | None = None
    k_scale: Array | None = None


@register(("key", "update", "weight", "log_decay", "factor"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayBuffer:
    """Ring of records. Record j adds ``weight_j * update_j key_j^T`` to a state that it first decays by ``exp(log_decay_j)``.

    With the delta rule and raw records (see ``ReplayPolicy.records``) it is a token's k, v, log_decay and beta instead, from
    which each reader derives that sum's u_j against the state that it reads.

    Attributes:
        key: raw keys. [N, G, L, K] record_dtype
        update: with the delta rule u times the key's factor, in float32; else the raw value, in record_dtype. [N, H, L, V]
        weight: beta times the key's factor without the delta rule, None with it; beta in raw records. [N, H, L] float32
        log_decay: per record, never summed up. [N, H, L] float32, or [N, H, L, K] for a channel gate
        factor: the key's factor in raw records of the delta rule, else None. [N, G, L] float32
    """

    key: Array
    update: Array
    weight: Array | None
    log_decay: Array
    factor: Array | None = None


@register(("checkpoint", "buffer", "pointer", "readout", "first_head"), ("recurrence", "policy"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayState:
    """One layer's pool of slots.

    Attributes:
        checkpoint: state up to the last flush. [N, H, V, K] checkpoint_dtype; with ``policy.readout="bf16_plane"`` the lower
            halves of its numbers, uint16 (``readout.join_planes`` puts them together).
        buffer: records since then, and uncommitted drafts behind them.
        pointer: how many of them count.
        recurrence: static
        policy: static
        readout: ``encode(policy.readout, checkpoint)`` at all times, of the whole checkpoint, which ordinary reads use in its
            place; None with ``policy.readout="checkpoint"``.
        first_head: number of the first value head, where a device has its share of the heads to itself; None elsewhere.
            [] int32
    """

    checkpoint: Array
    buffer: ReplayBuffer
    pointer: ReplayPointer
    recurrence: Recurrence
    policy: ReplayPolicy
    readout: Readout | None = None
    first_head: Array | None = None

    @property
    def num_slots(self) -> int:
        return self.checkpoint.shape[0]


def init_buffer(recurrence: Recurrence, policy: ReplayPolicy, num_slots: int) -> ReplayBuffer:
    """An empty ring for ``num_slots`` slots."""
    check_positive_int("num_slots", num_slots)
    r, window = recurrence, policy.window
    updates = r.delta_rule and policy.records_updates(r)
    raw = r.delta_rule and not updates
    decay_tail = r.decay_dims[1:]
    return ReplayBuffer(
        key=jnp.zeros((num_slots, r.num_key_heads, window, r.key_dim), policy.record_dtype),
        update=jnp.zeros((num_slots, r.num_value_heads, window, r.value_dim), jnp.float32 if updates else policy.record_dtype),
        weight=None if updates else jnp.zeros((num_slots, r.num_value_heads, window), jnp.float32),
        log_decay=jnp.zeros((num_slots, r.num_value_heads, window, *decay_tail), jnp.float32),
        factor=jnp.zeros((num_slots, r.num_key_heads, window), jnp.float32) if raw else None,
    )


def init_readout(recurrence: Recurrence, policy: ReplayPolicy, num_slots: int) -> Readout | None:
    """The read-out copy of ``num_slots`` zero checkpoints, None where ordinary reads use the checkpoint itself."""
    if policy.readout == "checkpoint":
        return None
    checkpoint = jax.ShapeDtypeStruct((num_slots, *recurrence.state_dims), policy.checkpoint_dtype)
    shapes = jax.eval_shape(lambda x: encode(policy.readout, x), checkpoint)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # zeros encode to zero bytes


def init_state(recurrence: Recurrence, policy: ReplayPolicy, num_slots: int) -> ReplayState:
    """A pool of ``num_slots`` zero states.

    Args:
        recurrence: the layer's recurrence.
        policy: how its state is kept.
        num_slots: N, sequences the pool can hold.

    Returns:
        A fresh ReplayState: checkpoint [N, H, V, K] of zeros, an empty ring, pointers at zero.

    Raises:
        TypeError, ValueError: naming the argument that is wrong.
    """
    if not isinstance(recurrence, Recurrence):
        raise TypeError(f"recurrence must be a Recurrence, got {type(recurrence).__name__}")
    if not isinstance(policy, ReplayPolicy):
        raise TypeError(f"policy must be a ReplayPolicy, got {type(policy).__name__}")
    check_positive_int("num_slots", num_slots)
    return ReplayState(
        checkpoint=jnp.zeros((num_slots, *recurrence.state_dims), policy.stored_dtype),
        buffer=init_buffer(recurrence, policy, num_slots),
        pointer=init_pointer(num_slots, policy.window, policy.max_draft),
        recurrence=recurrence,
        policy=policy,
        readout=init_readout(recurrence, policy, num_slots),
    )


def reset(state: ReplayState, slots: Array, request: Array | None = None) -> ReplayState:
    """Empties slots for new sequences: zero checkpoint, pointer at zero; old records are dead and are never read.

    Args:
        state: the pool.
        slots: slots to empty; values outside [0, N) are padding and do nothing. [B] int32
        request: ids of the new sequences, which stochastic rounding is keyed by; None for 0. [B] int, or one int for all

    Returns:
        The pool with those slots fresh and every other slot bit-equal.
    """
    if not isinstance(state, ReplayState):
        raise TypeError(f"state must be a ReplayState, got {type(state).__name__}")
    slots = check_slots(slots, state.num_slots)
    rows = scatter_index(slots, state.num_slots)
    checkpoint, readout = zero_slots((state.checkpoint, state.readout), rows)
    return dataclasses.replace(
        state, checkpoint=checkpoint, readout=readout, pointer=reset_pointer(state.pointer, slots, request)
    )


def zero_slots[Pool](pool: Pool, rows: Array) -> Pool:
    """A pytree of arrays with slots first, zero in the slots ``rows`` [B]; indices past the end do nothing."""
    return jax.tree.map(lambda x: x.at[rows].set(jnp.zeros((), x.dtype), mode="drop"), pool)


def copy_slots[Pool](state: Pool, source: Array, target: Array) -> Pool:
    """Copies whole slots (checkpoint, its read-out, ring and pointer): fork, prefix reuse, compaction.

    Args:
        state: a ReplayState, or any pytree with ``num_slots`` whose arrays all have slots first (the caches of mixers and
            models are).
        source: slots to copy from. [B] int
        target: slots to copy to, all different. A pair with either side outside [0, N) is padding. [B] int

    Returns:
        The pool; all sources are read before any target is written, so swaps and cycles work.

    Raises:
        TypeError, ValueError: source or target is no vector of integers, or they differ in length.
    """
    if not hasattr(state, "num_slots"):
        raise TypeError(f"state must be a ReplayState, got {type(state).__name__}; caches of mixers and models serve too")
    num_slots: int = state.num_slots
    source, target = check_slots(source, num_slots, name="source"), check_slots(target, num_slots, name="target")
    if source.shape != target.shape:
        raise ValueError(f"source and target must have the same shape, got {source.shape} and {target.shape}")
    paired = in_range(source, num_slots) & in_range(target, num_slots)
    debug_distinct(jnp.where(paired, target, num_slots), num_slots, "target")
    read, write = jnp.where(paired, source, 0), jnp.where(paired, target, num_slots)
    return jax.tree.map(lambda pool: pool.at[write].set(pool[read], mode="drop"), state)


def num_bytes(tree: Any) -> int:
    """Bytes of every array in a pytree (arrays or shape structs)."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
