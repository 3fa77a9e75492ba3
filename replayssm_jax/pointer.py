"""The pointer: two integers per slot that say which records count. Acceptance of drafts moves it and touches nothing else.

The rule, with ``due = length + 2 * max_draft > window``:

    verify    a due row with tokens folds its committed records first:  origin += length, length = 0
              drafts go to logical rows length .. length + T - 1, uncommitted
    commit    length += accepted
    prefill   folds the committed records and the prompt:               origin += length + tokens, length = 0

Hence ``length + max_draft <= window`` always: a draft never lands on a row that is being read, flushed or not.
The decision depends on the pointer alone, so every layer of a model takes the same one and the host never looks.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from replayssm_jax.slots import (
    check_counts,
    check_slots,
    debug_distinct,
    gather_index,
    in_range,
    scatter_index,
)
from replayssm_jax.trees import check_positive_int, register

Array = jax.Array


@register(("length", "origin", "request"), ("window", "max_draft"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayPointer:
    """Where each slot stands and for whom; one pointer serves every layer of a model.

    ``origin + length`` is the number of tokens a slot has committed, so it is also the position of the slot's next token
    for whatever else follows the same tokens (a convolution's history, an attention cache). Logical record j of a slot
    lies in ring row ``(origin + j) % window``.

    Attributes:
        length: committed records in the ring. [N] int32
        origin: tokens folded into the checkpoint since the last reset, at most 2**31 - 1. [N] int32
        request: id of the slot's sequence, set at a reset and 0 unless somebody does; all that reads it is stochastic
            rounding, so that a sequence rounds in the same way in any slot and two sequences round apart. [N] int32
        window: L, ring rows. static
        max_draft: most tokens of one verify. static
    """

    length: Array
    origin: Array
    request: Array
    window: int
    max_draft: int

    @property
    def num_slots(self) -> int:
        return self.length.shape[0]

    @property
    def position(self) -> Array:
        """Tokens committed per slot. [N] int32"""
        return self.origin + self.length

    @property
    def due(self) -> Array:
        """Slots whose records the next verify folds if it brings them tokens. [N] bool"""
        return self.length + 2 * self.max_draft > self.window


def _check_pointer(pointer: ReplayPointer) -> None:
    if not isinstance(pointer, ReplayPointer):
        raise TypeError(f"pointer must be a ReplayPointer, got {type(pointer).__name__}")


def _rows(counts: Array | int | None) -> int | None:
    """How many rows a vector of counts speaks of; None where it does not say."""
    return np.shape(counts)[0] if counts is not None and np.ndim(counts) == 1 else None


def init_pointer(num_slots: int, window: int, max_draft: int) -> ReplayPointer:
    """A pointer of ``num_slots`` fresh slots.

    Raises:
        TypeError, ValueError: an argument is no int of at least 1, or ``window < 2 * max_draft``.
    """
    for name, value in (("num_slots", num_slots), ("window", window), ("max_draft", max_draft)):
        check_positive_int(name, value)
    if window < 2 * max_draft:
        raise ValueError(f"window={window} must be at least 2 * max_draft={2 * max_draft}")
    # three arrays, not one thrice: a donated state must not hold the same buffer in two places
    length, origin, request = (jnp.zeros(num_slots, jnp.int32) for _ in range(3))
    return ReplayPointer(length=length, origin=origin, request=request, window=window, max_draft=max_draft)


def after_verify(pointer: ReplayPointer, slots: Array | None = None, lengths: Array | None = None) -> ReplayPointer:
    """What a verify does to the pointer: due rows with tokens have been folded; nothing is committed yet.

    Args:
        pointer: before the verify.
        slots: slot of each row, None for row b in slot b; values outside [0, N) are padding. [B] int
        lengths: tokens of each row, None for some in every row. With both None every slot has had tokens: name the rows of
            a batch that left slots out. [B] int

    Returns:
        The pointer to commit to.
    """
    _check_pointer(pointer)
    slots = check_slots(slots, pointer.num_slots, rows=_rows(lengths))
    lengths = check_counts(lengths, slots.shape[0], 1, "lengths")
    rows = scatter_index(slots, pointer.num_slots, keep=lengths > 0)
    has_tokens = jnp.zeros(pointer.num_slots, bool).at[rows].set(True, mode="drop")
    fold = pointer.due & has_tokens
    return dataclasses.replace(
        pointer,
        origin=jnp.where(fold, pointer.origin + pointer.length, pointer.origin),
        length=jnp.where(fold, 0, pointer.length),
    )


def commit(pointer: ReplayPointer, accepted: Array | int, slots: Array | None = None) -> ReplayPointer:
    """Accepts the first ``accepted`` tokens of each row's last verify: ``length += accepted``, nothing else.

    Args:
        pointer: as the verify returned it.
        accepted: tokens kept per row, the bonus token included, 0 to reject everything; at most the row's tokens in that
            verify. More is undefined; under ``checkify`` it is an error once it exceeds max_draft or the ring.
            [B] int, or one int for every row
        slots: slot of each row, None for row b in slot b (for every slot, where ``accepted`` is one int);
            values outside [0, N) are padding. [B] int

    Returns:
        The moved pointer.

    Raises:
        TypeError, ValueError: accepted or slots has the wrong dtype or shape.
    """
    _check_pointer(pointer)
    accepted = jnp.asarray(accepted)
    slots = check_slots(slots, pointer.num_slots, rows=_rows(accepted))
    accepted = check_counts(accepted, slots.shape[0], 0, "accepted")
    debug_distinct(slots, pointer.num_slots)
    real = in_range(slots, pointer.num_slots)
    room = pointer.window - pointer.length[gather_index(slots, pointer.num_slots)]
    fits = (accepted >= 0) & (accepted <= jnp.minimum(pointer.max_draft, room))
    checkify.debug_check(
        jnp.all(fits | ~real),
        "accepted must be between 0 and the tokens verified (max_draft {max_draft}), got {accepted}",
        accepted=accepted,
        max_draft=jnp.int32(pointer.max_draft),
    )
    rows = scatter_index(slots, pointer.num_slots)
    return dataclasses.replace(pointer, length=pointer.length.at[rows].add(accepted, mode="drop"))


def after_prefill(pointer: ReplayPointer, slots: Array | None, lengths: Array) -> ReplayPointer:
    """What a prefill does to the pointer: rows with tokens end folded, ``lengths`` tokens further. Arguments as above."""
    _check_pointer(pointer)
    slots = check_slots(slots, pointer.num_slots, rows=_rows(lengths))
    lengths = check_counts(lengths, slots.shape[0], 0, "lengths")
    rows = scatter_index(slots, pointer.num_slots, keep=lengths > 0)
    committed = pointer.length[gather_index(slots, pointer.num_slots)]
    return dataclasses.replace(
        pointer,
        origin=pointer.origin.at[rows].add(committed + lengths, mode="drop"),
        length=pointer.length.at[rows].set(0, mode="drop"),
    )


def after_flush(pointer: ReplayPointer, folded: Array) -> ReplayPointer:
    """What a flush of the slots ``folded`` [N] bool does to the pointer."""
    return dataclasses.replace(
        pointer,
        origin=jnp.where(folded, pointer.origin + pointer.length, pointer.origin),
        length=jnp.where(folded, 0, pointer.length),
    )


def reset_pointer(pointer: ReplayPointer, slots: Array, request: Array | None = None) -> ReplayPointer:
    """Puts slots back to position 0, for new sequences.

    Args:
        pointer: before.
        slots: values outside [0, N) are padding. [B] int
        request: ids of the sequences, None for 0. [B] int, or one int for every row

    Returns:
        The pointer.

    Raises:
        TypeError, ValueError: slots or request is no vector of integers, or they differ in length.
    """
    _check_pointer(pointer)
    slots = check_slots(slots, pointer.num_slots)
    request = check_counts(request, slots.shape[0], 0, "request")
    rows = scatter_index(slots, pointer.num_slots)
    return dataclasses.replace(
        pointer,
        length=pointer.length.at[rows].set(0, mode="drop"),
        origin=pointer.origin.at[rows].set(0, mode="drop"),
        request=pointer.request.at[rows].set(request, mode="drop"),
    )
