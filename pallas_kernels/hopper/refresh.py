"""Folds raw records into the checkpoint, and makes its read-out copy anew.

    S <- S alpha_j,   u = beta_j (v_j - S k_j),   S <- S + u k_j^T          for the committed records j, in order

in float32, one after the other, the state in registers; then one rounding to the checkpoint's dtype, and the copy of that.
Without the delta rule u = weight_j v_j. A row whose turn it is not costs a look at its numbers.
"""

import dataclasses
import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import copies, records
from pallas_kernels.hopper.records import Ring
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    SQUARE,
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    Rows,
    along,
    barrier,
    compiler_params,
    copy_if,
    f32,
    i32,
    iota,
    load,
    records_layout,
    round_to_checkpoint,
    store,
    swizzled,
)

_CHUNK = 8  # ring rows that are copied together
_SHARED_KB, _HALF_KB = 227, 113  # of a multiprocessor, for one block and for each of two


def refresh(
    rows: Rows,
    pool: Pool,
    geometry: Geometry,
    request: Array,
    first_head: Array,
    due_only: bool,
    interpret: Interpret = None,
) -> None:
    """Folds the records of rows whose length is not 0; the pool is updated in place, the pointer is left to the caller.

    Args:
        rows: slots, lengths (0: leave the row alone) and pointers.
        pool: references to the state; rings are only read.
        geometry: sizes of the call; tokens and value_dtype are not used.
        request: ids that stochastic rounding is keyed by. [N] int32
        first_head: number of the pool's first value head. [1] int32
        due_only: whether to leave rows alone whose window still takes two verifies' drafts.
        interpret: parameters of interpret mode, None on a GPU.
    """
    g = geometry
    present = [name for name, ref in zip(Pool._fields, pool, strict=True) if ref is not None]

    def replay_refresh(*refs: Ref, **scratch: Ref) -> None:
        own = Pool(**dict(zip(present, refs[6:], strict=True)))
        _refresh_head(_Call(Rows(*refs[:4]), own, refs[4], refs[5], g, due_only, interpret), **scratch)

    plgpu.kernel(
        replay_refresh,
        grid=(g.rows * g.value_heads,),
        grid_names=("head",),
        scratch_types=_scratch(g),
        compiler_params=compiler_params(scalar_reductions=g.readout == "nvfp4"),
        interpret=interpret,
    )(*rows, request, first_head, *(getattr(pool, name) for name in present))


def refresh_unsupported(geometry: Geometry) -> str | None:
    """Why the kernel cannot serve a call, with what would work; None if it can."""
    g = geometry
    if g.window not in (16, 32):
        return f"window={g.window}: refresh takes window=16 or window=32"
    if g.key_dim % 32 or g.key_dim > 256:
        return f"key_dim={g.key_dim}: refresh takes multiples of 32 up to 256"
    if g.value_dim % 8:
        return f"value_dim={g.value_dim}: refresh takes multiples of 8"
    if (needed := _shared_kb(g)) > _SHARED_KB:
        return (
            f"a head of {g.value_dim} x {g.key_dim} needs {needed} KB of shared memory of {_SHARED_KB} for "
            f"readout={g.readout!r}: readout='fp8_e4m3' or a checkpoint of 16 bits takes less"
        )
    return None


@dataclasses.dataclass(frozen=True)
class _Call:
    """The kernel's operands and its static parts."""

    rows: Rows
    pool: Pool
    request: Ref
    first_head: Ref
    g: Geometry
    due_only: bool
    interpret: Interpret


def _scratch(g: Geometry, held: int | None = None) -> dict[str, Any]:
    """Shared memory of a block, for ``held`` tiles at a time."""
    held = _held(g) if held is None else held
    dtype, delta = jnp.dtype(g.checkpoint_dtype), g.delta_rule
    chunks = g.window // _CHUNK
    update_copies = chunks if g.tile_rows == TILE_ROWS else g.window
    return {
        "tiles": plgpu.SMEM((held, TILE_ROWS, g.key_dim), dtype, transforms=swizzled(dtype)),
        "updates": plgpu.SMEM((held, g.window, TILE_ROWS), g.update_dtype),
        "keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype),
        "decays": plgpu.SMEM((g.window, g.key_dim) if g.channel_gate else (g.window,), f32),
        "weights": plgpu.SMEM((g.window,), f32),
        **({"factors": plgpu.SMEM((g.window,), f32)} if delta else {}),
        **copies.scratch(g),
        "head_arrived": plgpu.Barrier(num_arrivals=chunks + (chunks if g.channel_gate else 1) + 1 + delta),
        "tile_arrived": plgpu.Barrier(num_arrivals=1 + update_copies, num_barriers=held),
    }


def _held(g: Geometry) -> int:
    """Tiles that a block holds: all of a head, which nvfp4 needs and others like where there is room for two such blocks."""
    return g.tiles if g.readout == "nvfp4" or _shared_kb(g, g.tiles) <= _HALF_KB else 1


def _shared_kb(g: Geometry, held: int | None = None) -> int:
    """Shared memory of a block in KB: every buffer is padded to one; one more holds barriers, one a reduction."""
    buffers: list[Any] = [x for x in _scratch(g, held).values() if hasattr(x, "dtype")]
    return 2 + sum(-(-math.prod(x.shape) * jnp.dtype(x.dtype).itemsize // 1024) for x in buffers)


def _refresh_head(
    call: _Call,
    *,
    tiles: Ref,
    updates: Ref,
    keys: Ref,
    decays: Ref,
    weights: Ref,
    head_arrived: Ref,
    tile_arrived: Ref,
    factors: Ref | None = None,
    **copy: Ref,
) -> None:
    """The kernel's body: one value head of one row."""
    g, rows, pool, interpret = call.g, call.rows, call.pool, call.interpret
    index = lax.axis_index("head")
    h, b = index % g.value_heads, index // g.value_heads
    slot = rows.slots[b]
    wanted = (slot >= 0) & (slot < g.slots) & (rows.lengths[b] > 0)
    count = rows.length[jnp.where(wanted, slot, 0)]
    due = (count + 2 * g.max_draft > g.window) if call.due_only else (count > 0)

    @pl.when(wanted & (count > 0) & due)
    def _():
        origin = rows.origin[slot]
        held, key_head = tiles.shape[0], h // g.group_size
        start = origin & (g.window - 1)
        rings = [Ring(keys, [keys], updates.at[i], decays, None, weights, start, count, g.window) for i in range(held)]

        def values(t: Any) -> Any:
            return pl.ds(t * g.tile_rows, g.tile_rows)

        def stored(t: Any) -> Ref:
            return tiles.at[t, pl.ds(0, g.tile_rows)]

        def request_tile(t: Any, i: int) -> None:
            arrived = tile_arrived.at[i]
            plgpu.copy_gmem_to_smem(pool.checkpoint.at[slot, h, values(t)], stored(i), arrived)
            records.request_updates(pool, slot, h, t * g.tile_rows, rings[i], g, _CHUNK, arrived, interpret)

        if held == g.tiles:
            for t in range(held):
                request_tile(t, t)
        records.request_keys(pool, slot, key_head, rings[0], _CHUNK, head_arrived, interpret)
        records.request_decays(pool, slot, h, rings[0], g, _CHUNK, head_arrived, interpret)
        if factors is not None:
            all_factors: Any = pool.factor
            copy_if(count > 0, all_factors.at[slot, key_head], factors, head_arrived, interpret)
        plgpu.barrier_wait(head_arrived)
        layout = records_layout(g.key_dim) if g.channel_gate else SQUARE.reduce(1)
        store(decays, jnp.exp(load(decays, layout)))  # each thread what it has read; rows without a record are never used
        barrier()

        def fold_tile(t: Any, largest: Array) -> Array:
            i = t if held == g.tiles else 0
            if held < g.tiles:
                request_tile(t, 0)
            plgpu.barrier_wait(tile_arrived.at[i])
            ring = dataclasses.replace(rings[0], update=updates.at[i])
            state = _fold(load(tiles.at[i], STATE).astype(f32), ring, factors, g)
            _store_rounded(call, state, tiles.at[i], slot, h, t * g.tile_rows, origin + count)
            if g.readout in ("fp8_e4m3", "nvfp4"):
                by_row = copies.largest_by_row(tiles.at[i], g)
            if g.readout == "bf16":
                copies.encode_bf16(tiles.at[i], copy["codes"])
            if g.readout == "fp8_e4m3":
                copies.encode_fp8(tiles.at[i], by_row, copy["codes"], copy["scales"])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stored(i), pool.checkpoint.at[slot, h, values(t)])
            if g.readout in ("bf16", "fp8_e4m3"):
                _store_codes(call, copy["codes"], slot, h, values(t))
            if g.readout == "fp8_e4m3":
                scales: Any = pool.scale
                copies.store_rows(copy["scales"], scales.at[slot, h, values(t)])
            if g.readout == "nvfp4":
                return jnp.maximum(largest, by_row)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return largest

        zero = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), i32), VALUES)
        largest = lax.fori_loop(0, g.tiles, fold_tile, zero)
        if g.readout == "nvfp4":
            _copy_nvfp4(call, tiles, largest, slot, h, **copy)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _fold(state: Array, ring: Ring, factors: Ref | None, g: Geometry) -> Array:
    """A tile's state after the committed records.

    Args:
        state: [64, K] float32
        ring: the records; ``log_decay`` has what a record leaves, its exponential. ``weight`` is beta with the delta rule.
        factors: the keys' factors with the delta rule. [L]
        g: sizes of the call.

    Returns:
        [64, K] float32
    """
    shape = state.shape
    weights: Any = ring.weight

    def one(j: Array, state: Array) -> Array:
        row = ring.row(j)
        key = along(load(ring.key.at[row], COLUMNS).astype(f32), shape, 1)
        u = load(ring.update.at[row], VALUES).astype(f32)
        state = state * (along(load(ring.log_decay.at[row], COLUMNS), shape, 1) if g.channel_gate else ring.log_decay[row])
        weight = weights[row]
        if factors is not None:
            factor = factors[row]
            u = (u - factor * jnp.sum(state * key, axis=1)) * (weight * factor)
        else:
            u = u * weight
        return state + along(u, shape, 0) * key

    return lax.fori_loop(0, ring.count, one, state)


def _store_rounded(call: _Call, state: Array, tile: Ref, slot: Array, h: Array, first: Any, position: Array) -> None:
    """The one rounding, of a tile from value ``first`` on. [64, K] float32 -> shared memory [64, K] checkpoint dtype"""
    g = call.g
    for start in range(0, g.key_dim, SWIZZLED):
        columns = slice(start, start + SWIZZLED)
        piece = state[:, columns]
        if g.rounding == "nearest" or g.checkpoint_dtype == f32:
            store(tile.at[:, columns], round_to_checkpoint(piece, g.checkpoint_dtype))
            continue
        row, column = (iota(piece.shape, axis, STATE) for axis in (0, 1))
        element = ((first + row) * g.key_dim + (start + column)).astype(jnp.uint32)
        head = call.first_head[0] + h
        store(tile.at[:, columns], copies.round_by_chance(piece, g, call.request[slot], position, head, element))


def _store_codes(call: _Call, codes: Ref, slot: Array, h: Array, values: Any) -> None:
    payload: Any = call.pool.payload
    plgpu.copy_smem_to_gmem(codes.at[pl.ds(0, call.g.tile_rows)], payload.at[slot, h, values])


def _copy_nvfp4(
    call: _Call, tiles: Ref, largest: Array, slot: Array, h: Array, *, codes: Ref, scales: Ref, block_scales: Ref
) -> None:
    """The copy of a head whose rounded tiles are in shared memory, from the largest magnitude in each row of a tile."""
    g, pool = call.g, call.pool
    pool_scale: Any = pool.scale
    pool_blocks: Any = pool.block_scale
    largest = copies.most(largest, scales)
    barrier()
    store(scales, copies.power_of_two_scale(largest, 6.0 * 448.0)[0])
    barrier()
    pool_scale[slot, h] = scales[0]

    def one(t: Array, carry: None) -> None:
        copies.encode_nvfp4(tiles.at[t], largest, codes, block_scales)
        plgpu.commit_smem()
        values = pl.ds(t * g.tile_rows, g.tile_rows)
        _store_codes(call, codes, slot, h, values)
        for block in range(g.key_dim // copies.BLOCK):
            copies.store_rows(block_scales.at[block], pool_blocks.at[slot, h, values, block])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        barrier()

    lax.fori_loop(0, g.tiles, one, None)
