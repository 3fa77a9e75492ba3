"""Folds committed records into the checkpoint now: for snapshots, hand-over, a change of precision.

    C <- C D + sum_l w_l u_l key_l^T          rounded once to the checkpoint's dtype

An ordinary decode loop never calls it: a step or a verify folds a row whose turn it is in the same pass.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import folding, records
from pallas_kernels.hopper.compiler import compiler_params
from pallas_kernels.hopper.records import RING_CHUNK, Ring
from pallas_kernels.hopper.request import Copy, request
from pallas_kernels.hopper.shared import decays as channel_decays
from pallas_kernels.hopper.shared import named, one_of, state_tile, with_terms
from pallas_kernels.hopper.tiles import Geometry, Interpret, Pool, Ref, Rows, barrier, channels_layout, f32, store


def flush(rows: Rows, pool: Pool, geometry: Geometry, interpret: Interpret = None) -> None:
    """Folds the records of rows whose length is not 0; the pool is updated in place, the pointer is left to the caller.

    Args:
        rows: slots, lengths (0 or 1: whether to fold) and pointers.
        pool: references to the state; rings are only read.
        geometry: sizes of the call; tokens and value_dtype are not used.
        interpret: parameters of interpret mode, None on a GPU.
    """
    g = geometry
    operands = [*rows, *(x for x in pool if x is not None)]

    def replay_flush(*refs: Ref, **scratch: Ref) -> None:
        _flush_tile(Rows(*refs[:4]), Pool(*refs[4:]), g, interpret, **named(scratch))

    plgpu.kernel(
        replay_flush,
        grid=(g.rows * g.value_heads * g.tiles,),
        grid_names=("tile",),
        scratch_types=_scratch(g),
        compiler_params=compiler_params(scalar_reductions=False),
        interpret=interpret,
    )(*operands)


def _scratch(g: Geometry) -> dict[str, Any]:
    scratch = {
        "tile": state_tile(g),
        "keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype),
        **one_of(with_terms("updates", g.window, g.update_dtype)),
        "factors": plgpu.SMEM((3, 32), f32),  # what is left of each record, the records' weights, what is left of the tile
        "arrived": plgpu.Barrier(num_arrivals=1 + records.copies(g, RING_CHUNK)),
    }
    if g.channel_gate:
        return scratch | channel_decays(g) | {"total": plgpu.SMEM((g.key_dim,), f32)}
    return scratch | {"decays": plgpu.SMEM((g.window,), f32)}


def _flush_tile(
    rows: Rows,
    pool: Pool,
    g: Geometry,
    interpret: Interpret,
    *,
    tile: Ref,
    keys: Ref,
    updates: Ref,
    decays: Ref,
    factors: Ref,
    arrived: Ref,
    total: Ref | None = None,
    updates_terms: list[Ref] | None = None,
    decayed: list[Ref] | None = None,
    since: Ref | None = None,
) -> None:
    """The kernel's body: one tile of one value head of one row."""
    index = lax.axis_index("tile")
    part, index = index % g.tiles, index // g.tiles
    h, b = index % g.value_heads, index // g.value_heads
    slot = rows.slots[b]
    wanted = (slot >= 0) & (slot < g.slots) & (rows.lengths[b] > 0)
    count = rows.length[jnp.where(wanted, slot, 0)]

    @pl.when(wanted & (count > 0))
    def _():
        values, stored = pl.ds(part * g.tile_rows, g.tile_rows), pl.ds(0, g.tile_rows)
        weight = None if g.delta_rule else factors.at[1, pl.ds(0, g.window)]
        start = rows.origin[slot] & (g.window - 1)
        elapsed = decays if since is None else since
        ring = Ring(keys, decayed or [keys], updates, decays, elapsed, weight, start, count, g.window)
        copies = [
            Copy(pool.checkpoint.at[slot, h, values], tile.at[stored], arrived),
            *records.copies_of_keys(pool, slot, h // g.group_size, ring, RING_CHUNK, arrived),
            *records.copies_of_decays(pool, slot, h, ring, g, RING_CHUNK, arrived),
            *records.copies_of_updates(pool, slot, h, part * g.tile_rows, ring, g, RING_CHUNK, arrived),
        ]
        request(copies, interpret, by_one_warp=False)  # it waits for memory, as a step does
        plgpu.barrier_wait(arrived)
        if g.channel_gate:
            left = records.decay_channels(ring, plgpu.layout_cast(jnp.zeros((g.key_dim,), f32), channels_layout(g.key_dim)))
            store(total, jnp.exp(left))
            barrier()
            plane = updates if updates_terms is None else updates_terms[0]
            records.keep_rows(updates)
            folding.fold_on_tensor_cores(tile, ring, None, total, plane, g, interpret)
        else:
            left, remains = records.decay_heads(ring)
            rows_of_ring = pl.ds(0, g.window)
            store(factors.at[0, rows_of_ring], left)
            store(factors.at[2, rows_of_ring], remains)
            barrier()
            folding.fold(tile, ring, factors.at[0], factors[2, 0], g)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[stored], pool.checkpoint.at[slot, h, values])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
