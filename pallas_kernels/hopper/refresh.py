"""Folds raw records into the checkpoint, and makes its read-out copy anew.

    S <- S alpha_j,   u = beta_j (v_j - S k_j),   S <- S + u k_j^T          for the committed records j, in order

as ``blocked`` does it for all of a window's at once; then one rounding to the checkpoint's dtype, and the copy of that. Without
the delta rule u = weight_j v_j. The heads of the rows whose turn it is are dealt out to all blocks: few rows keep the whole GPU
busy, and none cost the start of the blocks.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import blocked, copies, due, records
from pallas_kernels.hopper.blocked import SCALES, Fold
from pallas_kernels.hopper.records import RING_CHUNK, Ring
from pallas_kernels.hopper.tiles import (
    STATE,
    SWIZZLED,
    TILE_ROWS,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    Rows,
    barrier,
    compiler_params,
    f32,
    iota,
    kilobytes,
    named,
    round_to_checkpoint,
    store,
    swizzled,
)
from pallas_kernels.small_floats import SCALE_BLOCK

_MULTIPROCESSORS, _SHARED_KB = 132, 227


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
    blocks = min(_MULTIPROCESSORS * min(_side_by_side(g), 228 // (_shared_kb(g) + 1)), g.rows * g.value_heads)
    more_than = max(0, g.window - 2 * g.max_draft) if due_only else 0

    def replay_refresh(*refs: Ref, **scratch: Ref) -> None:
        streams, first_head, *own = refs[4:]
        call = _Call(Rows(*refs[:4]), Pool(**dict(zip(present, own, strict=True))), streams, first_head, g, interpret)
        block = lax.axis_index("block")

        def some_rows(i: Array, before: Array) -> Array:
            first = i * due.ROWS_AT_ONCE
            words = due.due_rows(call.rows, first, g, more_than, interpret)
            count = due.count_rows(words, interpret)
            mine = lax.rem(block + (before * g.value_heads // blocks + 1) * blocks - before * g.value_heads, blocks)

            def one(i: Array, carry: None) -> None:
                item = mine + i * blocks
                row = first + due.nth_row(words, item // g.value_heads, interpret)
                _refresh_head(call, call.rows.slots[row], item % g.value_heads, **named(scratch))

            lax.fori_loop(0, (count * g.value_heads - mine + blocks - 1) // blocks, one, None)
            return before + count

        lax.fori_loop(0, -(-g.rows // due.ROWS_AT_ONCE), some_rows, jnp.int32(0))

    plgpu.kernel(
        replay_refresh,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=_scratch(g),
        compiler_params=compiler_params(scalar_reductions=False),
        interpret=interpret,
    )(*rows, copies.request_streams(g, request), first_head, *(getattr(pool, name) for name in present))


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
    streams: Ref
    first_head: Ref
    g: Geometry
    interpret: Interpret


def _scratch(g: Geometry, held: int | None = None) -> dict[str, Any]:
    """Shared memory of a block, for ``held`` tiles at a time."""
    held = _held(g) if held is None else held
    dtype, chunks = jnp.dtype(g.checkpoint_dtype), g.window // RING_CHUNK
    return {
        "tiles": plgpu.SMEM((held, TILE_ROWS, g.key_dim), dtype, transforms=swizzled(dtype)),
        "updates": plgpu.SMEM((g.window, TILE_ROWS), g.update_dtype),
        **blocked.scratch(g),
        **copies.scratch(g),
        "head_arrived": plgpu.Barrier(num_arrivals=chunks + (chunks if g.channel_gate else 1) + 1 + g.delta_rule),
        "tile_arrived": plgpu.Barrier(num_barriers=held),
        "updates_arrived": plgpu.Barrier(num_arrivals=chunks if g.tile_rows == TILE_ROWS else g.window),
    }


def _side_by_side(g: Geometry) -> int:
    """Blocks for whose registers a multiprocessor has room."""
    return 2 if g.channel_gate else 3 + (not g.delta_rule)


def _held(g: Geometry) -> int:
    """Tiles that a block holds: all of a head, which nvfp4 needs, and others where that leaves room for the other blocks."""
    room = 228 // min(3, _side_by_side(g)) - 1
    return g.tiles if g.readout == "nvfp4" or _shared_kb(g, g.tiles) <= room else 1


def _shared_kb(g: Geometry, held: int | None = None) -> int:
    """Shared memory of a block in KB."""
    return kilobytes(_scratch(g, held), reductions=False)


def _refresh_head(
    call: _Call,
    slot: Array,
    h: Array,
    *,
    tiles: Ref,
    updates: Ref,
    numbers: Ref,
    planes: list[Ref],
    head_arrived: Ref,
    tile_arrived: Ref,
    updates_arrived: Ref,
    keys: Ref | None = None,
    decays: Ref | None = None,
    readers: list[Ref] | None = None,
    total: Ref | None = None,
    system: Ref | None = None,
    inverse: Ref | None = None,
    **copy: Ref,
) -> None:
    """Folds the records of one value head of one slot, and stores what becomes of it."""
    g, pool, interpret = call.g, call.pool, call.interpret
    count, origin, held = call.rows.length[slot], call.rows.origin[slot], tiles.shape[0]
    weights, factors, log_decays = (numbers.at[n, pl.ds(0, g.window)] for n in range(3))
    keys, log_decays = planes[0] if keys is None else keys, log_decays if decays is None else decays
    ring = Ring(keys, [keys], updates, log_decays, None, weights, origin & (g.window - 1), count, g.window)
    fold = Fold(ring, planes, readers or planes, decays, total, system, inverse, numbers, g, interpret)

    def request_tile(t: Any, i: Any) -> None:
        own = pl.ds(t * g.tile_rows, g.tile_rows)
        plgpu.copy_gmem_to_smem(pool.checkpoint.at[slot, h, own], tiles.at[i, pl.ds(0, g.tile_rows)], tile_arrived.at[i])

    def request_updates(t: Any) -> None:
        records.request_updates(pool, slot, h, t * g.tile_rows, ring, g, RING_CHUNK, updates_arrived, interpret)

    records.request_keys(pool, slot, h // g.group_size, ring, RING_CHUNK, head_arrived, interpret)
    records.request_decays(pool, slot, h, ring, g, RING_CHUNK, head_arrived, interpret)
    if pool.factor is not None:
        plgpu.copy_gmem_to_smem(pool.factor.at[slot, h // g.group_size], factors, head_arrived)
    request_updates(0)
    for i in range(held):
        request_tile(i, i)
    plgpu.barrier_wait(head_arrived)
    blocked.prepare(fold)

    def one_tile(t: Any, seen: Array) -> Array:
        i = t if held == g.tiles else 0
        plgpu.barrier_wait(updates_arrived)
        values = blocked.values_of(fold)
        plgpu.commit_smem()  # everybody has read what the next tile's overwrite

        @pl.when(t + 1 < g.tiles)
        def _() -> None:
            request_updates(t + 1)

        plgpu.barrier_wait(tile_arrived.at[i])
        tile = tiles.at[i]
        for first, state in blocked.folded(fold, tile, blocked.weigh(fold, tile, values)):
            piece = _rounded(call, state, slot, h, t * g.tile_rows, first, origin + count)
            store(tile.at[:, pl.ds(first, SWIZZLED)], piece)
            if g.readout in ("fp8_e4m3", "nvfp4"):
                seen = copies.see(seen, piece.astype(f32))
        _store_tile(call, tile, seen, slot, h, t, numbers, copy)
        if held < g.tiles:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()

            @pl.when(t + 1 < g.tiles)
            def _() -> None:
                request_tile(t + 1, 0)

        return seen if g.readout == "nvfp4" else copies.nothing_seen()

    seen = lax.fori_loop(0, g.tiles, one_tile, copies.nothing_seen())
    if g.readout == "nvfp4":
        _copy_nvfp4(call, tiles, seen, slot, h, numbers, **copy)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()  # the next head's copies overwrite what has been read and written here


def _rounded(call: _Call, state: Array, slot: Array, h: Array, first_value: Any, first: int, position: Array) -> Array:
    """The one rounding, of a tile's piece. [64, 32] float32 -> checkpoint dtype"""
    g = call.g
    if g.rounding == "nearest" or g.checkpoint_dtype == f32:
        return round_to_checkpoint(state, g.checkpoint_dtype)
    row, column = (iota(state.shape, axis, STATE) for axis in (0, 1))
    element = (first_value + row) * g.key_dim + (first + column)
    return copies.round_by_chance(state, g, call.streams[slot], position, call.first_head[0] + h, element)


def _store_tile(
    call: _Call, tile: Ref, seen: Array, slot: Array, h: Array, t: Array, numbers: Ref, copy: dict[str, Ref]
) -> None:
    """Starts storing a tile of the checkpoint, and of its copy but for nvfp4."""
    g, pool, scales = call.g, call.pool, numbers.at[SCALES]
    values = pl.ds(t * g.tile_rows, g.tile_rows)
    if g.readout == "bf16":
        copies.encode_bf16(tile, copy["codes"])
    if g.readout == "fp8_e4m3":
        copies.encode_fp8(tile, copies.largest(seen, g), copy["codes"], scales)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, g.tile_rows)], pool.checkpoint.at[slot, h, values])
    if g.readout in ("bf16", "fp8_e4m3"):
        _store_codes(call, copy["codes"], slot, h, values)
    if g.readout == "fp8_e4m3" and pool.scale is not None:
        copies.store_rows(scales, pool.scale.at[slot, h, values])


def _store_codes(call: _Call, codes: Ref, slot: Array, h: Array, values: Any) -> None:
    payload: Any = call.pool.payload
    plgpu.copy_smem_to_gmem(codes.at[pl.ds(0, call.g.tile_rows)], payload.at[slot, h, values])


def _copy_nvfp4(call: _Call, tiles: Ref, seen: Array, slot: Array, h: Array, numbers: Ref, **staged: Ref) -> None:
    """The copy of a head whose rounded tiles are in shared memory, from what has been seen of each row of a tile."""
    g, pool, scales = call.g, call.pool, numbers.at[SCALES]
    payload: Any = pool.payload
    pool_scale: Any = pool.scale
    block_scale: Any = pool.block_scale
    scale, inverse = copies.power_of_two_scale(copies.most(copies.largest(seen, g), scales, call.interpret), 6.0 * 448.0)
    barrier()
    store(scales, scale)
    barrier()
    pool_scale[slot, h] = scales[0]

    def one(t: Array, carry: None) -> None:
        values = pl.ds(t * g.tile_rows, g.tile_rows)
        targets = payload.at[slot, h, values], block_scale.at[slot, h, values]
        codes, blocks = targets if g.tile_rows == TILE_ROWS else (staged["codes"], staged["block_scales"])

        def put(first: Array, some_codes: Array, some_scales: Array) -> None:
            columns = some_scales.shape[1]
            store(codes.at[:, pl.ds(first // 2, some_codes.shape[1])], some_codes)
            store(blocks.at[:, pl.ds(first // SCALE_BLOCK, columns)], some_scales)

        copies.encode_nvfp4(tiles.at[t], inverse, put, call.interpret)
        if staged:
            barrier()
            for source, target in zip((codes, blocks), targets, strict=True):
                copies.store_first(source, target)
            barrier()

    lax.fori_loop(0, g.tiles, one, None)
