"""Folds raw records into a tile on the tensor cores, a window's at once: the mathematics of ``replayssm_jax.blocked``.

With f_i a key's factor, E_i the decay from the checkpoint to record i, E_ij that from record j to record i, F_i what is left of
record i at the last one and D what is left of the checkpoint then,

    A_ij = beta_i f_i^2 (key_i E_ij . key_j), i > j                   once per value head
    W    = diag(F) (I + A)^-1 [beta_i f_i (v_i - f_i S E_i key_i)]    per tile; without the delta rule W_i = weight_i F_i v_i
    S   <- S D + sum_i W_i key_i^T

A channel gate decays channels of keys, not rows: E_i, E_ij and F_i then go into the keys. Decays are multiplied up or their
logarithms summed over the records in between, never divided or subtracted.

Every operand is cut into as many bfloat16 terms, up to three, as hold it exactly, and products of terms are left out from 2^-24
of the largest on. The system is solved by substitution: the powers of A that a product of inverses would need may cancel.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.copies import load_piece
from pallas_kernels.hopper.products import pairs, sum_products
from pallas_kernels.hopper.records import Ring, keep_rows
from pallas_kernels.hopper.shared import one_of, swizzled
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Ref,
    along,
    bf16,
    f32,
    iota,
    keep,
    load,
    split,
    split_exactly,
)

_RECORDS = 16  # that one instruction of the tensor cores sums over
_TERMS = 3  # bfloat16 terms that hold a float32
# Rows of "numbers": by ring row; TOTAL begins with what is left of the checkpoint under a head gate; SCALES are for the copy.
WEIGHTS, FACTORS, LOG_DECAYS, LEFT, OF_VALUES, OF_READS, TOTAL, SCALES = range(8)


@dataclasses.dataclass(frozen=True)
class Fold:
    """The records of one row as a value head sees them, and what all its tiles share once ``prepare`` has run."""

    ring: Ring
    planes: list[Ref]  # keys as they are folded, their sum: [L, K] bfloat16 each
    readers: list[Ref]  # keys as they read the checkpoint
    decays: Ref  # channel gate: log decays, [L, K] float32
    fours: Ref  # channel gate: see ``since``, ``over`` and ``near``, [L + L / 4 + 3, K] float32; where the planes are to be
    total: Ref  # channel gate: what is left of the checkpoint, [K] float32
    system: Ref  # A and its inverse, [L, L] float32
    inverse: Ref  # diag(F) (I + A)^-1 as terms, one below the other: [3 L, L] bfloat16
    numbers: Ref  # [8, 32 or 64] float32
    shares_keys: bool  # whether keys and decays, once dealt with, leave their place to readers
    g: Geometry
    interpret: Interpret

    def number(self, which: int) -> Ref:
        return self.numbers.at[which, pl.ds(0, self.g.window)]

    def since(self, row: Array) -> Ref:
        """A ring row's key as it would read from the first of its four records on. [K] float32"""
        return self.fours.at[row]

    def over(self, n: Array) -> Ref:
        """What the n-th four records leave. [K] float32"""
        return self.fours.at[self.g.window + n]

    def near(self, step: int) -> Ref:
        """Products of decayed keys by ring row, with that 1, 2 or 3 records later. [L] float32"""
        return self.fours.at[self.g.window + self.g.window // 4 + step - 1, pl.ds(0, self.g.window)]


def takes_keys(g: Geometry) -> bool:
    """Whether the keys of the ring are what is folded, and lie where the tensor cores read them."""
    return g.record_dtype == bf16 and not g.channel_gate


def scratch(g: Geometry, shares_keys: bool) -> dict[str, Any]:
    """Shared memory of a value head."""
    plane = plgpu.SMEM((g.window, g.key_dim), bf16, transforms=swizzled(bf16, _RECORDS))
    width = TILE_ROWS if g.readout in ("fp8_e4m3", "nvfp4") else 32  # a copy to a row wants it to begin at 128 bytes
    numbers = {"numbers": plgpu.SMEM((8, width), f32)}
    if g.delta_rule:
        inverse = plgpu.SMEM((_TERMS * g.window, g.window), bf16, transforms=swizzled(bf16, _RECORDS))
        numbers |= one_of({"system": plgpu.SMEM((g.window, g.window), f32), "inverse": inverse})
    if takes_keys(g):
        return {"planes": [plane], **numbers}
    count = _TERMS if g.channel_gate or g.record_dtype == f32 else 2
    arriving: dict[str, Any] = {"keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype)}
    planes = {"planes": [plane] * count}
    if not g.channel_gate:
        return arriving | planes | numbers
    arriving["decays"] = plgpu.SMEM((g.window, g.key_dim), f32)
    fours, total = plgpu.SMEM((g.window + g.window // 4 + 3, g.key_dim), f32), plgpu.SMEM((g.key_dim,), f32)
    if g.delta_rule:
        readers = {"readers": [plane] * _TERMS}
        arriving = one_of({"arriving": arriving} | readers) if shares_keys else arriving | readers
    return arriving | one_of({"fours": fours} | planes) | numbers | {"total": total}


def values_of(fold: Fold) -> Array:
    """The records' values that have arrived, 16-bit ones of dead rows zero. [64, L] float32"""
    ring, g = fold.ring, fold.g
    keep_rows(ring.update)
    if jnp.dtype(ring.update.dtype).itemsize == 2:
        return keep(load(ring.update.T, STATE), ring.age(COLUMNS) < ring.count, 1).astype(f32)
    shape = (TILE_ROWS, g.window)
    values, column = plgpu.layout_cast(jnp.zeros(shape, f32), STATE), iota(shape, 1, STATE)
    for row in range(g.window):
        values = jnp.where(column == row, along(load(ring.update.at[row], VALUES), shape, 0), values)
    return values


def weigh(fold: Fold, tile: Ref, values: Array) -> Array:
    """W of a tile, zero in dead rows. A tile [64, K], values [64, L] -> [64, L] float32"""
    g, shape = fold.g, values.shape
    live = along(fold.ring.age(COLUMNS) < fold.ring.count, shape, 1)
    if not g.delta_rule:
        return jnp.where(live, values * along(load(fold.number(LEFT), COLUMNS), shape, 1), 0.0)

    def reads() -> Iterator[list[Any]]:
        for first in range(0, g.key_dim, SWIZZLED):
            columns = pl.ds(first, SWIZZLED)
            terms = terms_of(load_piece(tile, columns))
            yield [(x, plane, columns) for x, plane in pairs(terms, fold.readers)]

    of_reads, of_values = (along(load(fold.number(which), COLUMNS), shape, 1) for which in (OF_READS, OF_VALUES))
    rest = jnp.where(live, values * of_values - sum_products(reads(), g.window, fold.interpret) * of_reads, 0.0)
    terms, inverse = split_exactly(rest), [fold.inverse.at[pl.ds(n * g.window, g.window)] for n in range(_TERMS)]
    products = []
    for first in range(0, g.window, _RECORDS):
        pieces = [x[:, first : first + _RECORDS] for x in terms]
        products.append([(x, plane, pl.ds(first, _RECORDS)) for x, plane in pairs(pieces, inverse)])
    return sum_products(products, g.window, fold.interpret)


def fold_tile[T](fold: Fold, tile: Ref, weights: Array, one: Callable[[Array, Array, T], T], carry: T) -> T:
    """``carry = one(first column, state after the records, carry)`` for each piece [64, 32] float32 of a tile, in order."""
    g, terms = fold.g, split_exactly(weights)
    width = 32 if g.key_dim % 64 else 64

    def some(i: Array, carry: T) -> T:
        update = _sum_by_record(pairs(terms, fold.planes), pl.ds(i * width, width), fold.interpret)
        for at in range(0, width, SWIZZLED):
            first = i * width + at
            columns = pl.ds(first, SWIZZLED)
            state = load_piece(tile, columns).astype(f32)
            if fold.total is None:
                remains = fold.numbers[TOTAL, 0]
            else:
                remains = along(load(fold.total.at[columns], COLUMNS), state.shape, 1)
            carry = one(first, state * remains + update[:, at : at + SWIZZLED], carry)
        return carry

    return lax.fori_loop(0, g.key_dim // width, some, carry)


def terms_of(x: Array) -> tuple[Array, ...]:
    """x as the sum of bfloat16, exactly."""
    if x.dtype == bf16:
        return (x,)
    return split(x.astype(f32)) if jnp.dtype(x.dtype).itemsize == 2 else split_exactly(x)


def _sum_by_record(operands: list[tuple[Array, Ref]], columns: Any, interpret: Interpret) -> Array:
    """The sum of all x @ plane[:, columns]: [64, L], [L, K] -> [64, n] float32"""
    if interpret is not None:
        parts = [jnp.dot(x.astype(f32), plane[:, columns].astype(f32), precision="highest") for x, plane in operands]
        return sum(parts[1:], parts[0])

    def accumulate(total: Ref) -> Array:
        for x, plane in operands:
            plgpu.wgmma(total, x, plane.at[:, columns])
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((TILE_ROWS, columns.size), f32))
