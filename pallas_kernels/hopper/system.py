"""What all tiles of a value head share when its raw records are folded: decays, keys, and the system that the updates solve.

See ``blocked`` for the equations.
"""

from collections.abc import Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, memref

from pallas_kernels.hopper import mlir
from pallas_kernels.hopper.blocked import FACTORS, LEFT, LOG_DECAYS, OF_READS, OF_VALUES, TOTAL, WEIGHTS, Fold, pairs, terms_of
from pallas_kernels.hopper.products import sum_products
from pallas_kernels.hopper.tiles import (
    SQUARE,
    STATE,
    SWIZZLED,
    TILE_ROWS,
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


def prepare(fold: Fold) -> None:
    """What all tiles of a value head share, from keys, log decays, weights and factors that have arrived."""
    if fold.g.channel_gate:
        _decay_channels(fold)
    else:
        _place_keys(fold)
        _decay_heads(fold)
    barrier()
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

    def one(i: Array, between: Array) -> Array:
        log_decay = fold.numbers[LOG_DECAYS, ring.row(i)]
        return jnp.where((column < i) & (row >= i), between + log_decay, between)

    between = lax.fori_loop(1, ring.count, one, plgpu.layout_cast(jnp.zeros(shape, f32), SQUARE))
    store(fold.system, _weighted(fold, load(fold.system, SQUARE) * jnp.exp(between)))


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
            keys = [_repeated(plane.at[:, columns], interpret) for plane in fold.planes]
            yield [(x, plane, columns) for x, plane in pairs(keys, fold.planes)]

    store(fold.system, _first_rows(sum_products(products(), window, interpret), window, interpret))


def _repeated_layout(rows: int) -> Any:
    """[rows, 8 n], in every warp or in every other one as ``STATE`` has 16 rows."""
    warps: tuple[Any, ...] = (plgpu.Replicated(4),) if rows == 16 else (plgpu.Replicated(2), -7)
    tiling = plgpu.Tiling(((rows, 8), *(((16, 8),) if rows > 16 else ()), (8, 8), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-3, -2), vector_dim=-1)


def _repeated(rows: Ref, interpret: Interpret) -> Array:
    """Rows of shared memory over and over. [L, n] -> [64, n]"""
    shape, layout = (TILE_ROWS, rows.shape[1]), _repeated_layout(rows.shape[0])
    if interpret is not None:
        return jnp.tile(rows[...], (TILE_ROWS // rows.shape[0], 1))
    return _renamed(load(rows, layout), layout, STATE, shape)


def _first_rows(x: Array, rows: int, interpret: Interpret) -> Array:
    """The first rows of an array [64, n] that repeats them."""
    if interpret is not None:
        return x[:rows]
    return _renamed(x, STATE, _repeated_layout(rows), (rows, x.shape[1]))


def _renamed(x: Array, layout: Any, target: Any, shape: tuple[int, int]) -> Array:
    """The same registers as another array."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, x.dtype, layout=target))
    def rename(context: Any, x: Any) -> Any:
        registers = x.registers.reshape(target.to_mgpu().registers_shape(shape))
        return fragmented_array.FragmentedArray(_registers=registers, _layout=target.to_mgpu(), _is_signed=None)

    return rename(x)


def _decay_channels(fold: Fold) -> None:
    """Keys under a channel gate, as folded and as they read; OF_VALUES, OF_READS and "total"; with the delta rule A."""
    g, ring = fold.g, fold.ring
    by_row, by_column, shape = SQUARE.reduce(1), SQUARE.reduce(0), (g.window, g.key_dim)
    store(fold.decays, jnp.exp(load(fold.decays, SQUARE)))
    age = ring.age(by_row)
    keys = jnp.where(along(age < ring.count, shape, 0), load(ring.key, SQUARE).astype(f32), 0.0)
    barrier()

    def four(n: Array, keys: Array) -> Array:
        products = []
        for i in (4 * n + k for k in range(4)):  # what fills up decays no key, and its products are in no system
            row = ring.row(i)
            older = along(age < jnp.where(i < ring.count, i, 0), shape, 0)
            keys = jnp.where(older, keys * along(load(fold.decays.at[row], by_column), shape, 1), keys)
            if g.delta_rule:
                product = keys * along(load(ring.key.at[row], by_column).astype(f32), shape, 1)
                pieces = [product[:, k : k + 16] for k in range(0, g.key_dim, 16)]
                products.append((row, sum(pieces[1:], pieces[0])))
        for row, product in products:  # at the end, as nothing moves across what crosses lanes
            store(fold.system.at[row], jnp.sum(product, axis=1))
        return keys

    keys = lax.fori_loop(0, (ring.count + 3) // 4, four, plgpu.layout_cast(keys, SQUARE))
    barrier()
    _decay_readers(fold)
    for plane, term in zip(fold.planes, split_exactly(keys), strict=True):
        store(plane, term)
    weight, live = load(fold.number(WEIGHTS), by_row), ring.age(by_row) < ring.count
    if not g.delta_rule:
        store(fold.number(LEFT), jnp.where(live, weight, 0.0))
        return
    factor = load(fold.number(FACTORS), by_row)
    store(fold.number(LEFT), jnp.where(live, 1.0, 0.0))
    store(fold.number(OF_VALUES), weight * factor)
    store(fold.number(OF_READS), weight * factor * factor)
    barrier()
    readers = jnp.where(along(age < ring.count, shape, 0), load(fold.decays, SQUARE), 0.0)
    store(fold.system, _weighted(fold, load(fold.system, SQUARE)))
    for plane, term in zip(fold.readers, split_exactly(readers), strict=True):
        store(plane, term)


def _decay_readers(fold: Fold) -> None:
    """Fills in "total", and with the delta rule has keys as they read, in float32, in place of the decays."""
    ring, channels = fold.ring, channels_layout(fold.g.key_dim)

    def one(i: Array, since: Array) -> Array:
        row = ring.row(i)
        since = since * load(fold.decays.at[row], channels)
        if fold.g.delta_rule:
            key = load(ring.key.at[row], channels).astype(f32)
            if fold.g.key_dim % 128:
                barrier()  # every warp does all channels, and has read the gate that this overwrites
            store(fold.decays.at[row], since * key)
        return since

    ones = plgpu.layout_cast(jnp.ones((fold.g.key_dim,), f32), channels)
    store(fold.total, lax.fori_loop(0, ring.count, one, ones))


def _invert(fold: Fold) -> None:
    """Puts diag(LEFT) (I + A)^-1 in "inverse"."""
    window, system = fold.g.window, fold.system
    _substitute(system, fold.ring.start, fold.interpret)
    barrier()
    scale = load(fold.number(LEFT), SQUARE.reduce(1))
    x = load(system, SQUARE) * along(scale, (window, window), 0)
    barrier()  # everybody has read what the terms overwrite
    for n, term in enumerate(split_exactly(x)):
        store(fold.inverse.at[pl.ds(n * window, window)], term)


def _substitute(system: Ref, start: Array, interpret: Interpret) -> None:
    """A becomes (I + A)^-1: each lane, in every warp, finds a column of it. [L, L], of which row ``start`` is the first"""
    window = system.shape[0]
    if interpret is not None:
        order = (start + jnp.arange(window)) & (window - 1)
        x = jnp.eye(window)
        for i in range(1, window):
            x = x.at[order[i]].add(-system[...][order[i], order[:i]] @ x[order[:i]])
        system[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def substitute(context: Any, system: Any, start: Any) -> None:
        start, last = start.registers.item(), mlir.word(window - 1)
        lane = arith.andi(mgpu_utils.thread_idx(), last)
        column, age = mlir.index(lane), arith.andi(arith.subi(lane, start), last)
        rows = [mlir.index(arith.andi(arith.addi(start, mlir.word(i)), last)) for i in range(window)]
        solved: list[Any] = []
        for i, row in enumerate(rows):
            own = arith.cmpi(arith.CmpIPredicate.eq, age, mlir.word(i))
            x = arith.uitofp(ir.F32Type.get(), own)
            for known, other in zip(solved, rows, strict=False):
                x = math.fma(arith.negf(memref.load(system, [row, other])), known, x)
            solved.append(x)
        mgpu_utils.warpgroup_barrier()  # everybody has read what the solution overwrites
        for row, x in zip(rows, solved, strict=True):
            memref.store(x, system, [row, column])

    substitute(system, start)
