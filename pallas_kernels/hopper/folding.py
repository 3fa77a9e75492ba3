"""Folds the committed records, whose values are updates or need no update, into a tile of the checkpoint in shared memory."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.records import Ring, add_product, visit
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    MMA_LEFT,
    MMA_RIGHT,
    MMA_SUM,
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Ref,
    along,
    barrier,
    f32,
    keep,
    load,
    records_layout,
    round_to_checkpoint,
    split_exactly,
    store,
)


def fold(tile: Ref, ring: Ring, left: Ref, total: Array, geometry: Geometry) -> None:
    """Folds the committed records into a tile in shared memory: S <- S total + sum_l left_l update_l key_l^T, rounded once.

    For a head gate, in float32 on the CUDA cores: exact.

    Args:
        tile: [64, K] checkpoint dtype
        ring: the records.
        left: factor of each record by ring row. [L]
        total: what is left of the checkpoint.
        geometry: sizes of the call.
    """
    shape = (TILE_ROWS, SWIZZLED)
    for first in range(0, geometry.key_dim, SWIZZLED):
        columns = pl.ds(first, SWIZZLED)

        def one(j: Array, counts: Array, state: Array, columns: Any = columns) -> Array:
            row = ring.row(j)
            update = load(ring.update.at[row], VALUES).astype(f32) * (counts * left[row])
            key = load(ring.key.at[row, columns], COLUMNS).astype(f32)
            return state + along(update, shape, 0) * along(key, shape, 1)

        state = load(tile.at[:, columns], STATE).astype(f32) * total
        state = visit(ring.count, one, state, unroll=2)
        store(tile.at[:, columns], round_to_checkpoint(state, geometry.checkpoint_dtype))


def fold_on_tensor_cores(
    tile: Ref, ring: Ring, left: Ref | None, total: Any, plane: Ref, geometry: Geometry, interpret: Interpret
) -> None:
    """``fold`` for bfloat16 keys, or a channel gate's decayed ones: the updates are cut into three bfloat16 terms.

    With a head gate nothing is rounded but the sum: the terms are the float32 updates, times what is left of them, the keys are
    as they came. A channel gate's decayed keys are as exact as their terms: three hold them, two to 2**-17 (see
    ``shared.decays``), which a verify of a float32 checkpoint makes do with.

    Args:
        tile: [64, K] checkpoint dtype
        ring: the records.
        left: factor of each record by ring row, [L] float32, or None with a channel gate.
        total: what is left of the checkpoint: a scalar, or with a channel gate a reference to [K].
        plane: scratch, which may be the updates'. [L, 64] bfloat16
        geometry: sizes of the call.
        interpret: parameters of interpret mode.
    """
    layout, rows = records_layout(TILE_ROWS), pl.ds(0, ring.window)
    by_row = layout.reduce(1)
    update = load(ring.update, layout).astype(f32)
    if left is not None:
        update = update * along(load(left.at[rows], by_row), update.shape, 0)
    live = ring.age(by_row) < ring.count
    update = jnp.where(along(live, update.shape, 0), update, 0.0)
    terms = []
    for term in split_exactly(update):
        barrier()
        store(plane, term)
        barrier()
        terms.append(load(plane.T, MMA_LEFT))
    live = ring.age(MMA_RIGHT.reduce(1)) < ring.count
    for first in range(0, geometry.key_dim, SWIZZLED):
        columns, shape = pl.ds(first, SWIZZLED), (TILE_ROWS, SWIZZLED)
        keys = [load(x.at[rows, columns], MMA_RIGHT) for x in ring.decayed]
        keys = [keep(x, live, 0) for x in keys]
        remains = total if left is not None else along(load(total.at[columns], COLUMNS), shape, 1)
        state = plgpu.layout_cast(load(tile.at[:, columns], STATE).astype(f32) * remains, MMA_SUM)
        for key, of_key in zip(keys, (terms, terms[:2], terms[:1]), strict=False):
            for term in of_key:
                state = add_product(state, term, key, interpret)
        store(tile.at[:, columns], round_to_checkpoint(plgpu.layout_cast(state, STATE), geometry.checkpoint_dtype))
