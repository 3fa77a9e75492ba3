"""What all tiles of a value head share when its raw records are folded: decays, keys, and the system that the updates solve.

See ``blocked`` for the equations.
"""

from collections.abc import Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.hopper import mlir
from pallas_kernels.hopper.blocked import (
    FACTORS,
    LEFT,
    LOG_DECAYS,
    OF_READS,
    OF_VALUES,
    TOTAL,
    WEIGHTS,
    Fold,
    terms_of,
)
from pallas_kernels.hopper.products import pairs, sum_products
from pallas_kernels.hopper.repeated import first_rows, repeated
from pallas_kernels.hopper.substitute import substitute
from pallas_kernels.hopper.tiles import (
    SQUARE,
    SWIZZLED,
    Array,
    Interpret,
    Ref,
    along,
    barrier,
    channels_layout,
    f32,
    load,
    split_exactly,
    store,
)

_FOUR = 4  # records that decay keys together


def prepare(fold: Fold) -> None:
    """What all tiles of a value head share, from keys, log decays, weights and factors that have arrived."""
    if fold.g.channel_gate:
        _decay_channels(fold)
    else:
        _place_keys(fold)
        _decay_heads(fold)
    if fold.g.delta_rule:
        _invert(fold)
    plgpu.commit_smem()  # the tensor cores read planes and inverse


def _place_keys(fold: Fold) -> None:
    """Puts keys where the tensor cores read them, zeros in dead rows."""
    ring = fold.ring
    live = ring.age(SQUARE.reduce(1)) < ring.count
    keys = load(ring.key, SQUARE)
    keys = jnp.where(along(live, keys.shape, 0), keys, jnp.zeros((), keys.dtype))
    for plane, term in zip(fold.planes, terms_of(keys), strict=True):
        store(plane, term)


def _decay_heads(fold: Fold) -> None:
    """Decays of a head gate: LEFT, OF_VALUES, OF_READS and TOTAL; with the delta rule A, in "system"."""
    g, ring, by_row, by_column = fold.g, fold.ring, SQUARE.reduce(1), SQUARE.reduce(0)
    shape = (g.window, g.window)
    log_decay = jnp.where(ring.age(by_column) < ring.count, load(fold.number(LOG_DECAYS), by_column), 0.0)
    everything = along(plgpu.layout_cast(log_decay, by_column), shape, 1)
    row, column = ring.age(SQUARE, 0, 2), ring.age(SQUARE, 1, 2)
    left = jnp.exp(jnp.sum(jnp.where(column > row, everything, 0.0), axis=1))
    store(fold.number(TOTAL), jnp.exp(jnp.sum(everything, axis=1)))
    weight, live = load(fold.number(WEIGHTS), by_row), ring.age(by_row) < ring.count
    if not g.delta_rule:
        store(fold.number(LEFT), jnp.where(live, left * weight, 0.0))
        return
    factor = load(fold.number(FACTORS), by_row)
    since = jnp.exp(jnp.sum(jnp.where(column <= row, everything, 0.0), axis=1))
    store(fold.number(LEFT), jnp.where(live, left, 0.0))
    store(fold.number(OF_VALUES), weight * factor)
    store(fold.number(OF_READS), weight * factor * factor * since)
    barrier()
    plgpu.commit_smem()  # the tensor cores read the keys
    _multiply_keys(fold)
    barrier()

    def four(n: Array, between: Array) -> Array:
        records = [_FOUR * n + i for i in range(1, _FOUR + 1)]
        for i, log_decay in [(i, fold.numbers[LOG_DECAYS, ring.row(i)]) for i in records]:
            between = jnp.where((column < i) & (row >= i), between + log_decay, between)
        return between

    between = plgpu.layout_cast(jnp.zeros(shape, f32), SQUARE)
    between = lax.fori_loop(0, (ring.count + _FOUR - 2) // _FOUR, four, between)
    store(fold.system, _weighted(fold, load(fold.system, SQUARE) * jnp.exp(between)))
    barrier()


def _weighted(fold: Fold, products: Array) -> Array:
    """A from products of decayed keys. [L, L] by ``SQUARE``"""
    ring, row, column = fold.ring, fold.ring.age(SQUARE, 0, 2), fold.ring.age(SQUARE, 1, 2)
    factor, weight = (load(fold.number(which), SQUARE.reduce(1)) for which in (FACTORS, OF_VALUES))
    return jnp.where((row > column) & (row < ring.count), products * along(factor * weight, products.shape, 0), 0.0)


def _multiply_keys(fold: Fold) -> None:
    """Products of all keys with all of them, in "system"."""
    window, interpret = fold.g.window, fold.interpret

    def products() -> Iterator[list[Any]]:
        for first in range(0, fold.g.key_dim, SWIZZLED):
            columns = pl.ds(first, SWIZZLED)
            keys = [repeated(plane.at[:, columns], interpret) for plane in fold.planes]
            yield [(x, plane, columns) for x, plane in pairs(keys, fold.planes)]

    store(fold.system, first_rows(sum_products(products(), window, interpret), window, interpret))


def _decay_channels(fold: Fold) -> None:
    """Keys under a channel gate, as folded and as they read; OF_VALUES, OF_READS and "total"; with the delta rule A."""
    g, ring, by_row, shape = fold.g, fold.ring, SQUARE.reduce(1), (fold.g.window, fold.g.key_dim)
    live = ring.age(by_row) < ring.count
    store(fold.decays, jnp.exp(load(fold.decays, plgpu.Layout.WG_STRIDED(shape, vec_size=4))))
    keys = jnp.where(along(live, shape, 0), load(ring.key, SQUARE).astype(f32), 0.0)
    weight = load(fold.number(WEIGHTS), by_row)
    store(fold.number(LEFT), jnp.where(live, 1.0 if g.delta_rule else weight, 0.0))
    if g.delta_rule:
        factor = load(fold.number(FACTORS), by_row)
        store(fold.number(OF_VALUES), weight * factor)
        store(fold.number(OF_READS), weight * factor * factor)
    barrier()
    keys = _decay_within_fours(fold, keys)
    barrier()  # everybody has read the decays that this overwrites
    _decay_readers(fold)
    barrier()
    keys = _decay_over_fours(fold, keys)
    barrier()
    if g.delta_rule:
        store(fold.system, _weighted(fold, _products_of_keys(fold)))
        barrier()  # everybody has read what the planes overwrite
    for plane, term in zip(fold.planes, split_exactly(keys), strict=True):
        store(plane, term)
    if g.delta_rule:
        keys = jnp.where(along(live, shape, 0), load(fold.decays, SQUARE), 0.0)
        if fold.shares_keys:
            barrier()  # everybody has read what the readers overwrite
        for plane, term in zip(fold.readers, split_exactly(keys), strict=True):
            store(plane, term)


def _decay_within_fours(fold: Fold, keys: Array) -> Array:
    """Keys as they are left by the last of their four records, with products of those on the way. [L, K]"""
    ring, age, products = fold.ring, fold.ring.age(SQUARE.reduce(1)), []
    for step in range(1, _FOUR):
        row, same = ring.row(age + step), ((age & (_FOUR - 1)) + step < _FOUR) & (age + step < ring.count)
        keys = jnp.where(along(same, keys.shape, 0), keys * _take_rows(fold.decays, row, fold.interpret), keys)
        if fold.g.delta_rule:
            products.append(_multiply(keys, _take_rows(ring.key, row, fold.interpret).astype(f32)))
    for step, product in enumerate(products, 1):  # at the end, as nothing moves across what crosses lanes
        store(fold.near(step), jnp.sum(product, axis=1))
    return keys


def _decay_readers(fold: Fold) -> None:
    """Fills in "total" and what is left over each four records; with the delta rule keys as they read.

    Those take the place of the decays, and as they would read from the first of their four records on they are in "fours".
    """
    g, ring, channels = fold.g, fold.ring, channels_layout(fold.g.key_dim)
    ones = plgpu.layout_cast(jnp.ones((g.key_dim,), f32), channels)

    def four(n: Array, before: Array) -> Array:
        records = [_FOUR * n + i for i in range(_FOUR)]
        live, rows = [jnp.broadcast_to(i < ring.count, ones.shape) for i in records], [ring.row(i) for i in records]
        decays = [jnp.where(real, load(fold.decays.at[row], channels), 1.0) for real, row in zip(live, rows, strict=True)]
        keys = [load(ring.key.at[row], channels).astype(f32) for row in rows] if g.delta_rule else []
        if g.key_dim % 128:
            barrier()  # every warp does all channels, and has read the decays that this overwrites
        since, readers = ones, []
        for i, decay in enumerate(decays):
            since = since * decay
            if g.delta_rule:
                readers.append(since * keys[i])
        for row, reader in zip(rows, readers, strict=False):
            store(fold.since(row), reader)
            store(fold.decays.at[row], before * reader)
        store(fold.over(n), since)
        return before * since

    store(fold.total, lax.fori_loop(0, (ring.count + _FOUR - 1) // _FOUR, four, ones))


def _decay_over_fours(fold: Fold, keys: Array) -> Array:
    """Keys as they are left by the last record, with products of those on the way in "system". [L, K]"""
    ring, by_column, age = fold.ring, SQUARE.reduce(0), fold.ring.age(SQUARE.reduce(1))

    def four(n: Array, keys: Array) -> Array:
        rows = [ring.row(_FOUR * n + i) for i in range(_FOUR)] if fold.g.delta_rule else []
        products = [_multiply(keys, along(load(fold.since(row), by_column), keys.shape, 1)) for row in rows]
        left = keys * along(load(fold.over(n), by_column), keys.shape, 1)
        keys = jnp.where(along(age < _FOUR * n, keys.shape, 0), left, keys)
        for row, product in zip(rows, products, strict=True):  # at the end, as above
            store(fold.system.at[row], jnp.sum(product, axis=1))
        return keys

    return lax.fori_loop(1, (ring.count + _FOUR - 1) // _FOUR, four, keys)


def _products_of_keys(fold: Fold) -> Array:
    """Products of decayed keys from where they have been put. [L, L] by ``SQUARE``"""
    row, column = fold.ring.age(SQUARE, 0, 2), fold.ring.age(SQUARE, 1, 2)
    one, two, three = (along(load(fold.near(step), SQUARE.reduce(0)), row.shape, 1) for step in range(1, _FOUR))
    near = jnp.where(row - column == 1, one, jnp.where(row - column == 2, two, three))
    return jnp.where((row ^ column) < _FOUR, near, load(fold.system, SQUARE))


def _multiply(x: Array, y: Array) -> Array:
    """Products of two arrays [L, K], summed as far as that takes no other lane. [L, 16]"""
    product = x * y
    pieces = [product[:, k : k + 16] for k in range(0, product.shape[1], 16)]
    return sum(pieces[1:], pieces[0])


def _take_rows(ref: Ref, rows: Array, interpret: Interpret) -> Array:
    """Rows of shared memory in some order, [n] by ``SQUARE``. [L, K] -> [n, K]"""
    if interpret is not None:
        return ref[...][rows]
    shape, layout = (rows.shape[0], ref.shape[1]), SQUARE.to_mgpu()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SQUARE.reduce(1)), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=SQUARE)
    )
    def take(_: Any, ref: Any, rows: Any) -> Any:
        some = layout.registers_element_type(ir.MemRefType(ref.type).element_type)
        rows = [mlir.index(mlir.element(row, 0)) for row in rows.registers.flat]
        places = zip(np.ndindex(layout.registers_shape(shape)), layout.thread_idxs(shape), strict=True)
        return mlir.array([vector.load(some, ref, [rows[at[0]], column]) for at, (_, column) in places], SQUARE, shape)

    return take(ref, rows)


def _invert(fold: Fold) -> None:
    """Puts diag(LEFT) (I + A)^-1 in "inverse"."""
    window, ring = fold.g.window, fold.ring
    substitute(fold.system, ring.start, fold.interpret)
    scale = along(load(fold.number(LEFT), SQUARE.reduce(1)), (window, window), 0)
    x = jnp.where(ring.age(SQUARE, 0, 2) >= ring.age(SQUARE, 1, 2), load(fold.system, SQUARE) * scale, 0.0)
    barrier()  # everybody has read what the terms overwrite
    for n, term in enumerate(split_exactly(x)):
        store(fold.inverse.at[pl.ds(n * window, window)], term)
