"""Folds raw records into the checkpoint, and makes its read-out copy anew.

    S <- S alpha_j,   u = beta_j (v_j - S k_j),   S <- S + u k_j^T          for the committed records j, in order

in float32, one after the other, the state in registers; then one rounding to the checkpoint's dtype, and the copy of that.
Without the delta rule u = weight_j v_j. The rows whose turn it is are listed beforehand, and their heads dealt out to all
blocks: few rows keep the whole GPU busy, and none cost the start of the blocks.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import copies, records
from pallas_kernels.hopper.records import RING_CHUNK, Ring
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
    f32,
    i32,
    iota,
    kilobytes,
    load,
    named,
    one_of,
    records_layout,
    round_to_checkpoint,
    store,
    swizzled,
)
from pallas_kernels.small_floats import SCALE_BLOCK

_SHARED_KB, _THIRD_KB = 227, 75  # of a multiprocessor, for one block and for each of three, which registers allow at best
# Few enough that starting them for nothing costs little; one, two or three at a time on each of 132 multiprocessors.
_BLOCKS = 6 * 132


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
    upto, queue = _queue(rows, g, due_only)
    blocks = min(_BLOCKS, g.rows * g.value_heads)

    def replay_refresh(*refs: Ref, **scratch: Ref) -> None:
        slots, _, _, _, upto, queue, streams, first_head, *own = refs
        call = _Call(Rows(*refs[:4]), Pool(**dict(zip(present, own, strict=True))), streams, first_head, g, interpret)
        block, items = lax.axis_index("block"), upto[g.rows - 1] * g.value_heads

        def one(i: Array, carry: None) -> None:
            item = block + i * blocks
            _refresh_head(call, slots[queue[item // g.value_heads]], item % g.value_heads, **named(scratch))

        lax.fori_loop(0, (items - block + blocks - 1) // blocks, one, None)

    plgpu.kernel(
        replay_refresh,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=_scratch(g),
        compiler_params=compiler_params(scalar_reductions=g.readout == "nvfp4"),
        interpret=interpret,
    )(*rows, upto, queue, copies.request_streams(g, request), first_head, *(getattr(pool, name) for name in present))


def _queue(rows: Rows, g: Geometry, due_only: bool) -> tuple[Array, Array]:
    """Rows to fold up to each one, and the rows to fold, in order; what is left of the queue holds B. [B] int32 each"""
    slots = jnp.asarray(rows.slots)
    wanted = (slots >= 0) & (slots < g.slots) & (rows.lengths > 0)
    count = jnp.where(wanted, jnp.asarray(rows.length)[jnp.clip(slots, 0, g.slots - 1)], 0)
    wanted = count > (max(0, g.window - 2 * g.max_draft) if due_only else 0)
    b = jnp.arange(g.rows)
    upto = jnp.sum(wanted[None, :] & (b[None, :] <= b[:, None]), axis=1, dtype=i32)
    return upto, jnp.sum(upto[None, :] <= b[:, None], axis=1, dtype=i32)


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
    update_copies = chunks if g.tile_rows == TILE_ROWS else g.window
    updates = plgpu.SMEM((held, g.window, TILE_ROWS), g.update_dtype)
    keys = plgpu.SMEM((g.window, g.key_dim), g.record_dtype)
    copy = copies.scratch(g)
    if g.readout == "nvfp4":  # encoded when all tiles have been folded
        records_and_copy = one_of({"updates": updates, "codes": copy["codes"]})
        records_and_copy |= one_of({"keys": keys, "block_scales": copy["block_scales"]})
    else:
        records_and_copy = {"updates": updates, "keys": keys, **copy}
    return {
        "tiles": plgpu.SMEM((held, TILE_ROWS, g.key_dim), dtype, transforms=swizzled(dtype)),
        **records_and_copy,
        **({"decays": plgpu.SMEM((g.window, g.key_dim), f32)} if g.channel_gate else {}),
        # by ring row: weights, keys' factors, decays of a head gate; and scales by row of a tile
        "numbers": plgpu.SMEM((4, TILE_ROWS), f32),
        "head_arrived": plgpu.Barrier(num_arrivals=chunks + (chunks if g.channel_gate else 1) + 1 + g.delta_rule),
        "tile_arrived": plgpu.Barrier(num_arrivals=1 + update_copies, num_barriers=held),
    }


def _held(g: Geometry) -> int:
    """Tiles that a block holds: all of a head, which nvfp4 needs, and others where that leaves room for two more blocks."""
    return g.tiles if g.readout == "nvfp4" or _shared_kb(g, g.tiles) <= _THIRD_KB else 1


def _shared_kb(g: Geometry, held: int | None = None) -> int:
    """Shared memory of a block in KB."""
    return kilobytes(_scratch(g, held), reductions=g.readout == "nvfp4")


def _refresh_head(
    call: _Call,
    slot: Array,
    h: Array,
    *,
    tiles: Ref,
    updates: Ref,
    keys: Ref,
    numbers: Ref,
    head_arrived: Ref,
    tile_arrived: Ref,
    decays: Ref | None = None,
    **copy: Ref,
) -> None:
    """Folds the records of one value head of one slot, and stores what becomes of it."""
    g, pool, interpret = call.g, call.pool, call.interpret
    scales = numbers.at[3]
    count, origin, held = call.rows.length[slot], call.rows.origin[slot], tiles.shape[0]
    weights, factors, head_decays = (numbers.at[n, pl.ds(0, g.window)] for n in range(3))
    left = head_decays if decays is None else decays
    ring = Ring(keys, [keys], updates.at[0], left, None, weights, origin & (g.window - 1), count, g.window)

    def request_tile(t: Any, i: int) -> None:
        arrived, own = tile_arrived.at[i], pl.ds(t * g.tile_rows, g.tile_rows)
        plgpu.copy_gmem_to_smem(pool.checkpoint.at[slot, h, own], tiles.at[i, pl.ds(0, g.tile_rows)], arrived)
        target = dataclasses.replace(ring, update=updates.at[i])
        records.request_updates(pool, slot, h, t * g.tile_rows, target, g, RING_CHUNK, arrived, interpret)

    if held == g.tiles:
        for t in range(held):
            request_tile(t, t)
    records.request_keys(pool, slot, h // g.group_size, ring, RING_CHUNK, head_arrived, interpret)
    records.request_decays(pool, slot, h, ring, g, RING_CHUNK, head_arrived, interpret)
    if pool.factor is not None:
        plgpu.copy_gmem_to_smem(pool.factor.at[slot, h // g.group_size], factors, head_arrived)
    plgpu.barrier_wait(head_arrived)
    remains = jnp.exp(load(left, records_layout(g.key_dim) if g.channel_gate else SQUARE.reduce(1)))
    barrier()
    store(left, remains)  # rows without a record may hold anything, and are never used
    barrier()

    def one_tile(t: Any, largest: Array) -> Array:
        i = t if held == g.tiles else 0
        if held < g.tiles:
            request_tile(t, 0)
        plgpu.barrier_wait(tile_arrived.at[i])
        tile, own = tiles.at[i], pl.ds(t * g.tile_rows, g.tile_rows)
        state = load(tile, STATE).astype(f32)
        state = _fold(state, dataclasses.replace(ring, update=updates.at[i]), factors, g)
        _store_rounded(call, state, tile, slot, h, t * g.tile_rows, origin + count)
        if g.readout in ("fp8_e4m3", "nvfp4"):
            largest = jnp.maximum(largest if g.readout == "nvfp4" else 0, copies.largest_by_row(tile, g))
        if g.readout == "bf16":
            copies.encode_bf16(tile, copy["codes"])
        if g.readout == "fp8_e4m3":
            copies.encode_fp8(tile, largest, copy["codes"], scales)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, g.tile_rows)], pool.checkpoint.at[slot, h, own])
        if g.readout in ("bf16", "fp8_e4m3"):
            _store_codes(call, copy["codes"], slot, h, own)
        if g.readout == "fp8_e4m3" and pool.scale is not None:
            copies.store_rows(scales, pool.scale.at[slot, h, own])
        if g.readout != "nvfp4":
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return largest

    largest = lax.fori_loop(0, g.tiles, one_tile, plgpu.layout_cast(jnp.zeros((TILE_ROWS,), i32), VALUES))
    if g.readout == "nvfp4":
        _copy_nvfp4(call, tiles, largest, slot, h, scales, **copy)
    plgpu.commit_smem()  # the next head's copies overwrite what has been read and written here


def _fold(state: Array, ring: Ring, factors: Ref, g: Geometry) -> Array:
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
        if g.delta_rule:
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
        element = (first + row) * g.key_dim + (start + column)
        head = call.first_head[0] + h
        store(tile.at[:, columns], copies.round_by_chance(piece, g, call.streams[slot], position, head, element))


def _store_codes(call: _Call, codes: Ref, slot: Array, h: Array, values: Any) -> None:
    payload: Any = call.pool.payload
    plgpu.copy_smem_to_gmem(codes.at[pl.ds(0, call.g.tile_rows)], payload.at[slot, h, values])


def _copy_nvfp4(
    call: _Call, tiles: Ref, largest: Array, slot: Array, h: Array, scales: Ref, *, codes: Ref, block_scales: Ref
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
        for block in range(g.key_dim // SCALE_BLOCK):
            copies.store_rows(block_scales.at[block], pool_blocks.at[slot, h, values, block])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        barrier()

    lax.fori_loop(0, g.tiles, one, None)
