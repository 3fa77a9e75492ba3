"""Folds raw records into the checkpoint, and makes its read-out copy anew.

    S <- S alpha_j,   u = beta_j (v_j - S k_j),   S <- S + u k_j^T          for the committed records j, in order

as ``blocked`` does it for all of a window's at once; then one rounding to the checkpoint's dtype, and the copy of that. Without
the delta rule u = weight_j v_j. The heads of the rows whose turn it is are dealt out to all blocks: few rows keep the whole GPU
busy, and none cost the start of the blocks. Where ordinary rows read the checkpoint, the same block answers the row's tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import blocked, copies, due, heads, system
from pallas_kernels.hopper.blocked import SCALES
from pallas_kernels.hopper.compiler import compiler_params, recompute_in_loop
from pallas_kernels.hopper.heads import Buffers, Call, Head
from pallas_kernels.hopper.tiles import (
    STATE,
    SWIZZLED,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    Rows,
    Tokens,
    barrier,
    bf16,
    f32,
    iota,
    round_to_checkpoint,
    store,
)

_MULTIPROCESSORS = 132
_SHARED_KB = 227  # of one


def refresh(
    rows: Rows,
    pool: Pool,
    geometry: Geometry,
    request: Array,
    first_head: Array,
    due_only: bool,
    tokens: Tokens | None = None,
    out: Ref | None = None,
    interpret: Interpret = None,
) -> None:
    """Folds the records of rows whose length is not 0; the pool is updated in place, the pointer is left to the caller.

    With tokens, the rows that are folded get them answered and recorded as well, from the tiles at hand.

    Args:
        rows: slots, lengths (0: leave the row alone) and pointers.
        pool: references to the state; of rings only the tokens' rows are written.
        geometry: sizes of the call; without tokens these and value_dtype are not used.
        request: ids that stochastic rounding is keyed by. [N] int32
        first_head: number of the pool's first value head. [1] int32
        due_only: whether to leave rows alone whose window still takes two verifies' drafts.
        tokens: T tokens of the rows, 1 to 16.
        out: reference to their outputs, of which other rows are left alone. [B, T, H, V] geometry.value_dtype
        interpret: parameters of interpret mode, None on a GPU.
    """
    g, answers = geometry, tokens is not None
    blocks = min(_MULTIPROCESSORS * heads.blocks_at_once(g, answers), g.rows * g.value_heads)
    more_than = max(0, g.window - 2 * g.max_draft) if due_only else 0
    operands, structure = jax.tree.flatten((rows, pool, tokens, out, copies.request_streams(g, request), first_head))

    def replay_refresh(*refs: Ref, **scratch: Ref) -> None:
        call = Call(*(*jax.tree.unflatten(structure, refs), g, interpret))
        block, buffers = lax.axis_index("block"), Buffers.of(scratch)

        def some_rows(i: Array, before: Array) -> Array:
            first = i * due.ROWS_AT_ONCE
            words = due.due_rows(call.rows, first, g, more_than, interpret)
            count = due.count_rows(words, interpret)
            mine = lax.rem(block + blocks - lax.rem(before * g.value_heads, blocks), blocks)
            served = (count * g.value_heads - mine + blocks - 1) // blocks

            def find(i: Array) -> Head:
                item = mine + i * blocks
                return Head.of(call, first + due.nth_row(words, item // g.value_heads, interpret), item % g.value_heads)

            def one(i: Array, numbers: tuple[Array, ...]) -> tuple[Array, ...]:
                if interpret is None:
                    recompute_in_loop()
                following = find(jnp.minimum(i + 1, served - 1))
                _refresh_head(call, buffers, Head(*numbers), following, i + 1 < served)
                return tuple(following)

            @pl.when(served > 0)
            def _() -> None:
                head = find(jnp.int32(0))
                heads.request_head(call, buffers, head)
                heads.request_updates(call, buffers, head, 0)
                for tile in range(buffers.held):
                    heads.request_tile(call, buffers, head, tile, tile)
                lax.fori_loop(0, served, one, tuple(head))

            return before + count

        lax.fori_loop(0, -(-g.rows // due.ROWS_AT_ONCE), some_rows, jnp.int32(0))

    plgpu.kernel(
        replay_refresh,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=heads.scratch_of(g, answers),
        compiler_params=compiler_params(scalar_reductions=False),
        interpret=interpret,
    )(*operands)


def refresh_unsupported(geometry: Geometry) -> str | None:
    """Why the kernel cannot serve a call, with what would work; None if it can."""
    g = geometry
    if g.window not in (16, 32):
        return f"window={g.window}: refresh takes window=16 or window=32"
    if g.key_dim % 32 or g.key_dim > 256:
        return f"key_dim={g.key_dim}: refresh takes multiples of 32 up to 256"
    if g.value_dim % 8:
        return f"value_dim={g.value_dim}: refresh takes multiples of 8"
    if (needed := heads.shared_kb(g, heads.answers_folded(g))) > _SHARED_KB:
        return (
            f"a head of {g.value_dim} x {g.key_dim} needs {needed} KB of shared memory of {_SHARED_KB} for "
            f"readout={g.readout!r} and window={g.window}: {_smaller(g)}"
        )
    return None


def _smaller(g: Geometry) -> str:
    """What would fit in the place of a geometry that does not."""
    changes: dict[str, dict[str, Any]] = {
        "window=16": {"window": 16},
        "readout='fp8_e4m3'": {"readout": "fp8_e4m3"},
        "a checkpoint of 16 bits": {} if g.halved else {"checkpoint_dtype": bf16},
        "bfloat16 records": {"record_dtype": bf16},
    }
    others = {name: dataclasses.replace(g, **change) for name, change in changes.items()}
    fitting = [name for name, other in others.items() if heads.shared_kb(other, heads.answers_folded(other)) <= _SHARED_KB]
    return f"{' or '.join(fitting)} would do" if fitting else "smaller heads would do"


def _refresh_head(call: Call, buffers: Buffers, head: Head, following: Head, more: Array) -> None:
    """Folds the records of a value head and stores what becomes of it.

    Everything it needs has been requested before; what it has done with it requests for the head that follows, if there is one.
    """
    g, held, whole_codes = call.g, buffers.held, call.g.readout in ("bf16", "fp8_e4m3")
    fold, answers = buffers.fold(head, g, call.interpret), buffers.answers(call, head)
    copies_of_tile = 1 + whole_codes + g.halved

    def request_head() -> None:
        @pl.when(more)
        def _() -> None:
            heads.request_head(call, buffers, following)

    if answers is not None:
        answers.request()
    plgpu.barrier_wait(buffers.head_arrived)
    system.prepare(fold)
    if not (blocked.takes_keys(g) or fold.shares_keys):
        request_head()
    if answers is not None:
        answers.prepare()

    def one_tile(t: Any, seen: Array) -> Array:
        if call.interpret is None:
            recompute_in_loop()
        i = t if held == g.tiles else 0
        plgpu.barrier_wait(buffers.updates_arrived)
        values = blocked.values_of(fold)
        plgpu.commit_smem()  # everybody has read what is overwritten now

        @pl.when(t + 1 < g.tiles)
        def _() -> None:
            heads.request_updates(call, buffers, head, t + 1)

        @pl.when((t + 1 == g.tiles) & more)
        def _() -> None:
            heads.request_updates(call, buffers, following, 0)

        plgpu.barrier_wait(buffers.tile_arrived.at[i])
        tile, codes = buffers.tiles.at[i], buffers.codes.at[i] if whole_codes else None

        def round_piece(first: Array, state: Array, seen: Array) -> Array:
            piece = _rounded(call, head, state, t * g.tile_rows, first)
            copies.store_piece(tile, pl.ds(first, SWIZZLED), piece)
            return copies.see(seen, piece.astype(f32)) if g.readout in ("fp8_e4m3", "nvfp4") else seen

        weights = blocked.weigh(fold, tile, values)
        if fold.shares_keys:
            barrier()  # everybody has read what the following head's keys and decays overwrite

            @pl.when(t + 1 == g.tiles)
            def _() -> None:
                request_head()

        seen = blocked.fold_tile(fold, tile, weights, round_piece, seen)
        _store_tile(call, buffers, head, t, i, codes, seen)
        if answers is not None:
            answers.answer(tile, t, in_flight=copies_of_tile)
        if held < g.tiles:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()

            @pl.when(t + 1 < g.tiles)
            def _() -> None:
                heads.request_tile(call, buffers, head, t + 1, 0)

        return seen if g.readout == "nvfp4" else copies.nothing_seen()

    seen = lax.fori_loop(0, g.tiles, one_tile, copies.nothing_seen())
    if answers is not None:
        answers.finish()
    if blocked.takes_keys(g):
        request_head()
    if g.readout == "nvfp4":
        _copy_nvfp4(call, buffers, head, seen)
    for i in range(held):
        plgpu.wait_smem_to_gmem((held - 1 - i) * (copies_of_tile + (answers is not None)), wait_read_only=True)
        plgpu.commit_smem()

        @pl.when(more)
        def _(i: int = i) -> None:
            heads.request_tile(call, buffers, following, i, i)


def _rounded(call: Call, head: Head, state: Array, first_value: Any, first: Array) -> Array:
    """The one rounding, of a tile's piece. [64, 32] float32 -> checkpoint dtype"""
    g = call.g
    if g.rounding == "nearest" or g.checkpoint_dtype == f32:
        return round_to_checkpoint(state, g.checkpoint_dtype)
    row, column = (iota(state.shape, axis, STATE) for axis in (0, 1))
    element, number = (first_value + row) * g.key_dim + (first + column), call.first_head[0] + head.h
    return copies.round_by_chance(state, g, call.streams[head.slot], head.position, number, element)


def _store_tile(call: Call, buffers: Buffers, head: Head, t: Array, i: Any, codes: Ref, seen: Array) -> None:
    """Starts storing a tile of the checkpoint, and of its copy but for nvfp4."""
    g, pool, tile, scales = call.g, call.pool, buffers.tiles.at[i], buffers.numbers.at[SCALES]
    values, stored = pl.ds(t * g.tile_rows, g.tile_rows), pl.ds(0, g.tile_rows)
    payload: Any = pool.payload
    if g.readout == "bf16":
        copies.encode_bf16(tile, codes)
    if g.readout == "fp8_e4m3":
        copies.encode_fp8(tile, copies.largest(seen, g), codes, scales)
    plgpu.commit_smem()
    if codes is not None:
        plgpu.copy_smem_to_gmem(codes.at[stored], payload.at[head.slot, head.h, values])
    if g.readout == "fp8_e4m3" and pool.scale is not None:
        copies.store_rows(scales, pool.scale.at[head.slot, head.h, values])
    for target, source in heads.tile_parts(call, buffers, head, t, i):
        plgpu.copy_smem_to_gmem(source, target)


def _copy_nvfp4(call: Call, buffers: Buffers, head: Head, seen: Array) -> None:
    """The copy of a head whose rounded tiles are in shared memory, from what has been seen of each row of a tile."""
    g, pool, scales = call.g, call.pool, buffers.numbers.at[SCALES]
    payload: Any = pool.payload
    pool_scale: Any = pool.scale
    block_scale: Any = pool.block_scale
    scale, inverse = copies.power_of_two_scale(copies.most(copies.largest(seen, g), scales, call.interpret), 6.0 * 448.0)
    barrier()
    store(scales, scale)
    barrier()
    pool_scale[head.slot, head.h] = scales[0]

    def one(t: Array, carry: None) -> None:
        values = pl.ds(t * g.tile_rows, g.tile_rows)
        targets = payload.at[head.slot, head.h, values], block_scale.at[head.slot, head.h, values]
        codes, blocks = targets if buffers.codes is None else (buffers.codes, buffers.block_scales)

        copies.encode_nvfp4(buffers.tiles.at[t], inverse, codes, blocks, call.interpret)
        if buffers.codes is not None:
            barrier()
            for source, target in zip((codes, blocks), targets, strict=True):
                copies.store_first(source, target)
            barrier()

    lax.fori_loop(0, g.tiles, one, None)
