"""A row's committed records in shared memory: how they decay, how a tile reads them, how they are folded into it.

Every exponent is a sum of log decays over the records in between, never a difference of running sums, and at most 0.
Ring rows without a committed record may hold anything, NaN included: loops do not visit them, masks select them away.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.request import Copy
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    SQUARE,
    STATE,
    SWIZZLED,
    TERMS,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    along,
    barrier,
    bf16,
    channels_layout,
    f32,
    iota,
    keep,
    load,
    records_layout,
    split_in,
    store,
)

RING_CHUNK = 8  # ring rows that are copied together, where nothing else is known to be better


@dataclasses.dataclass(frozen=True)
class Ring:
    """The records of one row, as one value head and one tile see them."""

    key: Ref  # [L or more, K] record dtype
    decayed: list[Ref]  # [L or more, K] the keys, or with a channel gate the bfloat16 terms of what is left of them
    update: Ref  # [L, 64] float32 or record dtype
    log_decay: Ref  # [L] or [L, K] float32
    elapsed: Any  # [L, K] float32 log decay since, with a channel gate; may be the log decays
    weight: Ref | None  # [L] float32
    start: Array  # ring row of record 0
    count: Array  # committed records
    window: int

    def row(self, record: Array) -> Array:
        return (self.start + record) & (self.window - 1)

    def age(self, layout: Any, axis: int = 0, rank: int = 1) -> Array:
        """The record in each ring row, along ``axis`` of an array over ring rows."""
        return (iota((self.window,) * rank, axis, layout) - self.start) & (self.window - 1)


def chunks_needed(start: Array, count: Array, window: int, chunk: int) -> list[Array]:
    """Which chunks of ``chunk`` ring rows hold a committed record."""
    end = start + count
    return [
        (count > 0) & ((start < first + chunk) & (end > first) | (end > window + first)) for first in range(0, window, chunk)
    ]


def copies(geometry: Geometry, chunk: int) -> int:
    """Arrivals of the three requests below together."""
    g, chunks = geometry, geometry.window // chunk
    updates = chunks if g.tile_rows == TILE_ROWS else g.window
    decays = chunks if g.channel_gate else 1
    return chunks + updates + decays + (not g.delta_rule)


def visit(count: Array, one: Callable[[Array, Array, Any], Any], carry: Any, unroll: int = 4) -> Any:
    """``carry = one(j, 1.0, carry)`` for each record j, ``unroll`` at a time so that their loads overlap.

    What fills the last ones up repeats the last record with a factor of 0.0 in place of 1.0.
    """

    def several(i: Array, carry: Any) -> Any:
        for j in range(unroll):
            record = unroll * i + j
            carry = one(jnp.minimum(record, count - 1), jnp.where(record < count, 1.0, 0.0), carry)
        return carry

    return lax.fori_loop(0, (count + unroll - 1) // unroll, several, carry)


def copies_of_keys(pool: Pool, slot: Array, g: Array, ring: Ring, chunk: int, arrived: Ref) -> list[Copy]:
    """The ring's keys, chunks without records left out."""
    copies = []
    for i, wanted in enumerate(chunks_needed(ring.start, ring.count, ring.window, chunk)):
        rows = pl.ds(i * chunk, chunk)
        copies.append(Copy(pool.key.at[slot, g, rows], ring.key.at[rows], arrived, wanted))
    return copies


def copies_of_updates(
    pool: Pool, slot: Array, h: Array, first: Array, ring: Ring, geometry: Geometry, chunk: int, arrived: Ref
) -> list[Copy]:
    """What one tile, from value ``first`` on, needs of the ring's updates."""
    values, copies = pl.ds(first, geometry.tile_rows), []
    for i, wanted in enumerate(chunks_needed(ring.start, ring.count, ring.window, chunk)):
        if geometry.tile_rows == TILE_ROWS:
            rows = pl.ds(i * chunk, chunk)
            copies.append(Copy(pool.update.at[slot, h, rows, values], ring.update.at[rows], arrived, wanted))
            continue
        for row in range(i * chunk, (i + 1) * chunk):
            target = ring.update.at[pl.ds(row, 1), pl.ds(0, geometry.tile_rows)]
            copies.append(Copy(pool.update.at[slot, h, pl.ds(row, 1), values], target, arrived, wanted))
    return copies


def copies_of_decays(pool: Pool, slot: Array, h: Array, ring: Ring, geometry: Geometry, chunk: int, arrived: Ref) -> list[Copy]:
    """The ring's log decays and weights."""
    copies = []
    if geometry.channel_gate:
        for i, wanted in enumerate(chunks_needed(ring.start, ring.count, ring.window, chunk)):
            rows = pl.ds(i * chunk, chunk)
            copies.append(Copy(pool.log_decay.at[slot, h, rows], ring.log_decay.at[rows], arrived, wanted))
    else:
        copies.append(Copy(pool.log_decay.at[slot, h], ring.log_decay, arrived, ring.count > 0))
    if ring.weight is not None:
        weights: Any = pool.weight
        copies.append(Copy(weights.at[slot, h], ring.weight, arrived, ring.count > 0))
    return copies


def decay_heads(ring: Ring) -> tuple[Array, Array]:
    """What is left of each record, its weight included, by ring row (dead ones 0), and of the checkpoint (L times). [L] each"""
    by_row, by_column = SQUARE.reduce(1), SQUARE.reduce(0)
    log_decay = load(ring.log_decay, by_column)
    committed = plgpu.layout_cast(jnp.where(ring.age(by_column) < ring.count, log_decay, 0.0), by_column)
    younger = ring.age(SQUARE, 1, 2) > ring.age(SQUARE, 0, 2)
    everything = along(committed, younger.shape, 1)
    total = jnp.exp(jnp.sum(everything, axis=1))
    left = jnp.exp(jnp.sum(jnp.where(younger, everything, 0.0), axis=1))
    if ring.weight is not None:
        left = left * load(ring.weight, by_row)
    return jnp.where(ring.age(by_row) < ring.count, left, 0.0), total


def decay_channels(ring: Ring, since: Array) -> Array:
    """Fills in the decayed keys of a channel gate, zero in dead rows.

    Args:
        ring: the records.
        since: log decay after the last of them. [K] float32

    Returns:
        The log decay of the checkpoint. [K] float32
    """
    channels, layout = channels_layout(ring.key.shape[1]), TERMS

    def one(i: Array, elapsed: Array) -> Array:
        row = ring.row(ring.count - 1 - i)
        log_decay = load(ring.log_decay.at[row], channels)
        store(ring.elapsed.at[row], elapsed)
        return elapsed + log_decay

    total = lax.fori_loop(0, ring.count, one, since)
    barrier()
    live = ring.age(layout.reduce(1)) < ring.count
    rows = pl.ds(0, ring.window)
    key = load(ring.key.at[rows], layout).astype(f32) * jnp.exp(load(ring.elapsed, layout))
    if ring.weight is not None:
        key = key * along(load(ring.weight, layout.reduce(1)), key.shape, 0)
    key = jnp.where(along(live, key.shape, 0), key, 0.0)
    barrier()  # everybody has read what the terms overwrite
    terms = split_in(key, len(ring.decayed), nearest=True)
    for plane, term in zip(ring.decayed, terms, strict=True):
        store(plane, term)
    barrier()
    return total


def multiply_decayed(ring: Ring, planes: Ref, products: Ref, terms: int, interpret: Interpret) -> None:
    """Products of the decayed keys of a channel gate, of which so many ``terms`` count, with the terms of the readers.

    Args:
        ring: the records.
        planes: the terms, a row each, R a multiple of 16, of 32 in a window of 16, at least 32. [R, K] bfloat16
        products: result. [L, R] float32
        interpret: parameters of interpret mode, which has no mma.
    """
    warps = ring.window // 16
    left, right, total = (x(bf16, m_warps=warps) for x in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC))
    live = ring.age(left.reduce(1)) < ring.count
    result = plgpu.layout_cast(jnp.zeros(products.shape, f32), total)
    for first in range(0, ring.key.shape[1], SWIZZLED):
        columns = pl.ds(first, SWIZZLED)
        of_readers = load(planes.at[:, columns].T, right)
        for plane in ring.decayed[:terms]:
            result = add_product(result, keep(load(plane.at[:, columns], left), live, 0), of_readers, interpret)
    store(products, result)


def add_product(total: Array, x: Array, y: Array, interpret: Interpret) -> Array:
    """total + x @ y of bfloat16 by mma.sync, which interpret mode does not have."""
    if interpret is None:
        return plgpu.mma(total, x, y)
    return total + jnp.dot(x.astype(f32), y.astype(f32), precision="highest")


def keep_rows(buffer: Ref, layout: Any = VALUES) -> None:
    """Touches one row of shared memory, [64] unless a layout is given, that is otherwise only accessed in two dimensions.

    Such memory may get tiled, and what a copy brings then lies where nobody looks for it, as do slices from any row on.
    """
    store(buffer.at[0], load(buffer.at[0], layout))
    barrier()


def sources(values: Ref, terms: list[Ref] | None, live: Callable[[Any], Array], count: Array, by_row: bool) -> list[Array]:
    """Values as sums of bfloat16, transposed, dead rows zero. [64, n] each

    Args:
        values: [n, 64], n a multiple of 16
        terms: unless the values are of bfloat16, memory for them, which may be the values'. [n, 64] bfloat16 each
        live: of a layout, which rows are. [n] bool
        count: how many.
        by_row: whether the values are stored by row.
    """
    if terms is None:
        return [keep(load(values.T, STATE), live(COLUMNS), 1)]
    layout, shape = records_layout(TILE_ROWS), values.shape

    @pl.when(count > 0)
    def _():
        if by_row:
            keep_rows(values)
        x = load(values, layout).astype(f32)
        x = jnp.where(along(live(layout.reduce(1)), shape, 0), x, 0.0)
        barrier()  # everybody has read what the terms overwrite
        for ref, term in zip(terms, split_in(x, len(terms)), strict=True):
            store(ref, term)

    @pl.when(count == 0)
    def _():
        for ref in terms:
            store(ref, plgpu.layout_cast(jnp.zeros(shape, bf16), layout))

    barrier()
    return [load(ref.T, STATE) for ref in terms]
