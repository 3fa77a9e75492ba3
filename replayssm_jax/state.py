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
from replayssm_jax.slots import check_slots, debug_distinct, in_range, scatter_index
from replayssm_jax.trees import check_positive_int, register

Array = jax.Array
Gate = Literal["head", "channel"]

_FLOAT_DTYPES = ("float32", "bfloat16", "float16")
_READOUTS = ("checkpoint", "bf16", "fp8_e4m3", "nvfp4")
_ROUNDINGS = ("nearest", "stochastic")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayPolicy:
    """Static choices of how a layer's state is kept.

    Args:
        window: L, ring rows per slot. A slot's records are folded into its checkpoint before they could overflow it,
            every ``window - 2 * max_draft + 1`` to ``window - max_draft`` accepted tokens.
        max_draft: most tokens one ``verify`` may take per row; 1 is plain decoding. ``window >= 2 * max_draft``.
        checkpoint_dtype: float32, bfloat16 or float16. Rounded once per flush; float16 and bfloat16 saturate at their
            largest finite value instead of overflowing.
        record_dtype: dtype of recorded raw inputs (keys; values where there is no delta rule). Must hold the activations
            exactly: bfloat16 for bfloat16 activations. What is not a raw input is recorded in float32 whatever this says.
        readout: what ordinary reads use; "checkpoint" or, once implemented, a low-precision copy.
        rounding: "nearest" or, once implemented, "stochastic".

    Raises:
        TypeError, ValueError: a field has the wrong type or value; the message names it.
        NotImplementedError: a readout or rounding that this version does not have yet.
    """

    window: int = 16
    max_draft: int = 1
    checkpoint_dtype: Any = "float32"
    record_dtype: Any = "float32"
    readout: str = "checkpoint"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_positive_int("window", self.window)
        check_positive_int("max_draft", self.max_draft)
        if self.window < 2 * self.max_draft:
            raise ValueError(f"window={self.window} must be at least 2 * max_draft={2 * self.max_draft}")
        for name in ("checkpoint_dtype", "record_dtype"):
            object.__setattr__(self, name, _check_dtype(name, getattr(self, name)))
        choices: dict[str, tuple[str, ...]] = {"readout": _READOUTS, "rounding": _ROUNDINGS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.readout != "checkpoint":
            raise NotImplementedError(f"readout={self.readout!r} is not implemented yet; readout='checkpoint' works")
        if self.rounding != "nearest":
            raise NotImplementedError(f"rounding={self.rounding!r} is not implemented yet; rounding='nearest' works")


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


@register(("key", "update", "weight", "log_decay"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayBuffer:
    """Ring of records. Record j adds ``weight_j * update_j key_j^T`` to a state that it first decays by ``exp(log_decay_j)``.

    Attributes:
        key: raw keys. [N, G, L, K] record_dtype
        update: with the delta rule u times the key's factor, else the raw value. [N, H, L, V] float32, else record_dtype
        weight: beta times the key's factor without the delta rule; None with it. [N, H, L] float32
        log_decay: per record, never summed up. [N, H, L] float32, or [N, H, L, K] for a channel gate
    """

    key: Array
    update: Array
    weight: Array | None
    log_decay: Array


@register(("checkpoint", "buffer", "pointer"), ("recurrence", "policy"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayState:
    """One layer's pool of slots.

    Attributes:
        checkpoint: state up to the last flush. [N, H, V, K] checkpoint_dtype
        buffer: records since then, and uncommitted drafts behind them.
        pointer: how many of them count.
        recurrence: static
        policy: static
    """

    checkpoint: Array
    buffer: ReplayBuffer
    pointer: ReplayPointer
    recurrence: Recurrence
    policy: ReplayPolicy

    @property
    def num_slots(self) -> int:
        return self.checkpoint.shape[0]


def init_buffer(recurrence: Recurrence, policy: ReplayPolicy, num_slots: int) -> ReplayBuffer:
    """An empty ring for ``num_slots`` slots."""
    check_positive_int("num_slots", num_slots)
    r, window = recurrence, policy.window
    update_dtype = jnp.float32 if r.delta_rule else policy.record_dtype
    decay_tail = r.decay_dims[1:]
    return ReplayBuffer(
        key=jnp.zeros((num_slots, r.num_key_heads, window, r.key_dim), policy.record_dtype),
        update=jnp.zeros((num_slots, r.num_value_heads, window, r.value_dim), update_dtype),
        weight=None if r.delta_rule else jnp.zeros((num_slots, r.num_value_heads, window), jnp.float32),
        log_decay=jnp.zeros((num_slots, r.num_value_heads, window, *decay_tail), jnp.float32),
    )


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
        checkpoint=jnp.zeros((num_slots, *recurrence.state_dims), policy.checkpoint_dtype),
        buffer=init_buffer(recurrence, policy, num_slots),
        pointer=init_pointer(num_slots, policy.window, policy.max_draft),
        recurrence=recurrence,
        policy=policy,
    )


def reset(state: ReplayState, slots: Array) -> ReplayState:
    """Empties slots for new sequences: zero checkpoint, pointer at zero; old records are dead and are never read.

    Args:
        state: the pool.
        slots: slots to empty; values outside [0, N) are padding and do nothing. [B] int32

    Returns:
        The pool with those slots fresh and every other slot bit-equal.
    """
    if not isinstance(state, ReplayState):
        raise TypeError(f"state must be a ReplayState, got {type(state).__name__}")
    slots = check_slots(slots, state.num_slots)
    rows = scatter_index(slots, state.num_slots)
    return dataclasses.replace(
        state,
        checkpoint=state.checkpoint.at[rows].set(0, mode="drop"),
        pointer=reset_pointer(state.pointer, slots),
    )


def copy_slots[Pool](state: Pool, source: Array, target: Array) -> Pool:
    """Copies whole slots (checkpoint, ring and pointer): fork, prefix reuse, compaction.

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


def _check_dtype(name: str, value: Any) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name} must be one of {', '.join(_FLOAT_DTYPES)}, got {value!r}") from None
    if dtype.name not in _FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(_FLOAT_DTYPES)}, got {dtype.name}")
    return dtype


def num_bytes(tree: Any) -> int:
    """Bytes of every array in a pytree (arrays or shape structs)."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
