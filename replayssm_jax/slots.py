"""Rows of a batch and slots of a pool: which rows are real, and indices that never clamp or wrap."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

Array = jax.Array

_INT32_MAX = 2**31 - 1


def in_range(slots: Array, num_slots: int) -> Array:
    """Which slots are real and not padding. [B] bool"""
    return (slots >= 0) & (slots < num_slots)


def gather_index(slots: Array, num_slots: int) -> Array:
    """Indices safe to read at: padding reads slot 0, and whoever reads must not use it. [B] int32"""
    return jnp.where(in_range(slots, num_slots), slots, 0)


def scatter_index(slots: Array, num_slots: int, keep: Array | None = None) -> Array:
    """Indices safe to write at under mode="drop": padding, and rows not in ``keep``, point past the end. [B] int32"""
    real = in_range(slots, num_slots)
    return jnp.where(real if keep is None else real & keep, slots, num_slots)


def check_slots(slots: Array | None, num_slots: int, rows: int | None = None, name: str = "slots") -> Array:
    """Trace-time check of a vector of slots; None puts row b in slot b.

    Args:
        slots: [B] integers or None.
        num_slots: N, size of the pool.
        rows: B where it is known from another argument.
        name: of the argument, for messages.

    Returns:
        [B] int32, padding still outside [0, N).

    Raises:
        TypeError, ValueError: not a vector of B integers, or None with more rows than slots.
    """
    if slots is None:
        rows = num_slots if rows is None else rows
        if rows > num_slots:
            raise ValueError(f"{name}=None puts row b in slot b, but there are {rows} rows and {num_slots} slots")
        return jnp.arange(rows, dtype=jnp.int32)
    slots = _as_int32(slots)
    if slots.ndim != 1:
        raise ValueError(f"{name} must be a vector [B], got shape {slots.shape}")
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {slots.dtype}")
    if rows is not None and slots.shape != (rows,):
        raise ValueError(f"{name} must have one entry per row, shape ({rows},), got {slots.shape}")
    return slots.astype(jnp.int32)


def check_counts(counts: Array | None, rows: int, default: int, name: str) -> Array:
    """Trace-time check of one count per row; None is ``default`` for every row. Returns [B] int32."""
    if counts is None:
        return jnp.full(rows, default, jnp.int32)
    counts = _as_int32(counts)
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {counts.dtype}")
    if counts.ndim == 0:
        counts = jnp.broadcast_to(counts, (rows,))
    if counts.shape != (rows,):
        raise ValueError(f"{name} must have one entry per row, shape ({rows},), got {counts.shape}")
    return counts.astype(jnp.int32)


def _as_int32(values: Array) -> Array:
    """An array whose integers are int32. What int32 cannot hold becomes -1 or the largest one: nothing wraps into range."""
    if not isinstance(values, jax.Array):
        values = np.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        return jnp.asarray(values)
    xp = np if isinstance(values, np.ndarray) else jnp
    if values.dtype.itemsize >= 4 and values.dtype != jnp.int32:
        values = xp.minimum(values, _INT32_MAX)
        values = xp.maximum(values, -1) if jnp.issubdtype(values.dtype, jnp.signedinteger) else values
    return jnp.asarray(values, jnp.int32)


def debug_distinct(slots: Array, num_slots: int, name: str = "slots") -> None:
    """Run-time check, live only under ``checkify``: no real slot appears twice."""
    ordered = jnp.sort(scatter_index(slots, num_slots))
    repeated = jnp.any((ordered[1:] == ordered[:-1]) & (ordered[1:] < num_slots))
    checkify.debug_check(~repeated, name + " must name no slot twice, got {slots}", slots=slots)
