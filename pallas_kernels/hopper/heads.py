"""A value head that ``refresh`` works on: what a block holds of it, and how that gets there."""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper import blocked, copies, records
from pallas_kernels.hopper.answers import Folded
from pallas_kernels.hopper.blocked import Fold
from pallas_kernels.hopper.cut import ReadConfig, answering_scratch
from pallas_kernels.hopper.records import RING_CHUNK, Ring
from pallas_kernels.hopper.request import Copy, request
from pallas_kernels.hopper.shared import kilobytes, named, swizzled
from pallas_kernels.hopper.tiles import TILE_ROWS, Array, Geometry, Interpret, Pool, Ref, Rows, Tokens

_MULTIPROCESSOR_KB = 228  # of shared memory, of which every block takes one more than it asks for


@dataclasses.dataclass(frozen=True)
class Call:
    """The kernel's operands and its static parts."""

    rows: Rows
    pool: Pool
    tokens: Tokens | None
    out: Ref | None
    streams: Ref
    first_head: Ref
    g: Geometry
    interpret: Interpret


class Head(NamedTuple):
    """A value head of a slot whose records are to be folded."""

    row: Array
    slot: Array
    h: Array
    length: Array  # committed records
    origin: Array  # tokens folded so far

    @staticmethod
    def of(call: Call, row: Array, h: Array) -> "Head":
        slot = call.rows.slots[row]
        return Head(row, slot, h, call.rows.length[slot], call.rows.origin[slot])

    @property
    def position(self) -> Array:
        """Tokens folded when this has been."""
        return self.origin + self.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Shared memory of a block, see ``scratch_of``."""

    tiles: Ref
    updates: Ref
    numbers: Ref
    planes: list[Ref]
    head_arrived: Ref
    tile_arrived: Ref
    updates_arrived: Ref
    keys: Ref = None
    decays: Ref = None
    readers: list[Ref] | None = None
    fours: Ref = None
    total: Ref = None
    system: Ref = None
    inverse: Ref = None
    codes: Ref = None
    block_scales: Ref = None
    answering: dict[str, Ref] | None = None

    @staticmethod
    def of(scratch: dict[str, Any]) -> "Buffers":
        buffers = named(scratch)
        answering = buffers.pop("answering", None)
        return Buffers(**buffers, answering=answering and named(answering))

    @property
    def held(self) -> int:
        return self.tiles.shape[0]

    def answers(self, call: Call, head: Head) -> Folded | None:
        """The head's answers to the row's tokens, if there are any."""
        if self.answering is None:
            return None
        return Folded(
            call.rows,
            call.tokens,
            call.pool,
            call.out,
            call.g,
            ReadConfig(heads=1),
            call.interpret,
            self.answering,
            head.row,
            head.h,
            head.slot,
            call.rows.lengths[head.row],
            values_late=shares_keys(call.g, True),
        )

    def ring(self, head: Head, g: Geometry) -> Ring:
        weights, _, log_decays = (self.numbers.at[n, pl.ds(0, g.window)] for n in range(3))
        keys = self.planes[0] if self.keys is None else self.keys
        log_decays = log_decays if self.decays is None else self.decays
        return Ring(keys, [keys], self.updates, log_decays, None, weights, head.origin & (g.window - 1), head.length, g.window)

    def fold(self, head: Head, g: Geometry, interpret: Interpret) -> Fold:
        readers = self.readers or self.planes
        return Fold(
            self.ring(head, g),
            self.planes,
            readers,
            self.decays,
            self.fours,
            self.total,
            self.system,
            self.inverse,
            self.numbers,
            shares_keys(g, self.answering is not None),
            g,
            interpret,
        )


def scratch_of(g: Geometry, answers: bool, held: int | None = None, shares: bool | None = None) -> dict[str, Any]:
    """Shared memory of a block, for ``held`` tiles at a time, with keys that leave their place to readers if it ``shares``."""
    shares = shares_keys(g, answers) if shares is None else shares
    held = _held(g, answers, shares) if held is None else held
    dtype, chunks = jnp.dtype("uint16" if g.halved else g.checkpoint_dtype), g.window // RING_CHUNK
    tile = (2, TILE_ROWS, g.key_dim) if g.halved else (TILE_ROWS, g.key_dim)
    return {
        "tiles": plgpu.SMEM((held, *tile), dtype, transforms=swizzled(dtype)),
        "updates": plgpu.SMEM((g.window, TILE_ROWS), g.update_dtype),
        **blocked.scratch(g, shares),
        **copies.scratch(g, held),
        "head_arrived": plgpu.Barrier(num_arrivals=chunks + (chunks if g.channel_gate else 1) + 1 + g.delta_rule),
        "tile_arrived": plgpu.Barrier(num_arrivals=1 + g.halved, num_barriers=held),
        "updates_arrived": plgpu.Barrier(num_arrivals=chunks if g.tile_rows == TILE_ROWS else g.window),
        **({"answering": answering_scratch(g, values_late=shares)} if answers else {}),
    }


def side_by_side(g: Geometry, answers: bool) -> int:
    """Blocks for whose registers a multiprocessor has room, as compiled for Hopper."""
    if g.channel_gate:
        return 2 if g.readout == "fp8_e4m3" else 3
    return 3 if g.delta_rule and answers and g.tokens == 1 else 4


def blocks_at_once(g: Geometry, answers: bool, held: int | None = None, shares: bool | None = None) -> int:
    """Blocks that a multiprocessor has room for."""
    return min(side_by_side(g, answers), _MULTIPROCESSOR_KB // (shared_kb(g, answers, held, shares) + 1))


def shares_keys(g: Geometry, answers: bool) -> bool:
    """Whether keys and decays, once dealt with, leave their place to readers: where that makes room for another block.

    The following head's are then requested later, and the tokens' values when queries and gates have left theirs.
    """
    if not (g.channel_gate and g.delta_rule):
        return False
    return blocks_at_once(g, answers, shares=True) > blocks_at_once(g, answers, shares=False)


def answers_folded(g: Geometry) -> bool:
    """Whether ``refresh`` also answers the rows that it folds: where these read the checkpoint, and memory allows.

    That is if a multiprocessor keeps two blocks, or as many as without answers. A channel gate's window of 32 leaves it one in
    float32 and has not been seen to pay otherwise.
    """
    if not g.folds_apart or g.readout != "checkpoint" or (g.channel_gate and g.window == 32):
        return False
    return blocks_at_once(g, True) >= min(2, blocks_at_once(g, False))


def _held(g: Geometry, answers: bool, shares: bool) -> int:
    """Tiles that a block holds: all of a head, which nvfp4 needs, and others where that costs no other block its room."""
    one, every = (blocks_at_once(g, answers, held, shares) for held in (1, g.tiles))
    return g.tiles if g.readout == "nvfp4" or one <= every else 1


def shared_kb(g: Geometry, answers: bool, held: int | None = None, shares: bool | None = None) -> int:
    """Shared memory of a block in KB."""
    return kilobytes(scratch_of(g, answers, held, shares), reductions=False)


def request_head(call: Call, buffers: Buffers, head: Head) -> None:
    """Starts copying what all tiles of a head need."""
    g, pool, ring = call.g, call.pool, buffers.ring(head, call.g)
    arrived, key_head = buffers.head_arrived, head.h // g.group_size
    copies = [
        *records.copies_of_keys(pool, head.slot, key_head, ring, RING_CHUNK, arrived),
        *records.copies_of_decays(pool, head.slot, head.h, ring, g, RING_CHUNK, arrived),
    ]
    if pool.factor is not None:
        factors = buffers.numbers.at[blocked.FACTORS, pl.ds(0, g.window)]
        copies.append(Copy(pool.factor.at[head.slot, key_head], factors, arrived))
    request(copies, call.interpret, by_one_warp=g.channel_gate)


def request_updates(call: Call, buffers: Buffers, head: Head, t: Any) -> None:
    g, ring, arrived = call.g, buffers.ring(head, call.g), buffers.updates_arrived
    copies = records.copies_of_updates(call.pool, head.slot, head.h, t * g.tile_rows, ring, g, RING_CHUNK, arrived)
    request(copies, call.interpret, by_one_warp=g.channel_gate)


def request_tile(call: Call, buffers: Buffers, head: Head, t: Any, i: int) -> None:
    parts, arrived = tile_parts(call, buffers, head, t, i), buffers.tile_arrived.at[i]
    request([Copy(*part, arrived) for part in parts], call.interpret, by_one_warp=call.g.channel_gate)


def tile_parts(call: Call, buffers: Buffers, head: Head, t: Any, i: Any) -> list[tuple[Ref, Ref]]:
    """Where a tile of the checkpoint lies, in global and in shared memory: in one piece or in two halves of its numbers."""
    g, pool, rows = call.g, call.pool, pl.ds(0, call.g.tile_rows)
    place = head.slot, head.h, pl.ds(t * g.tile_rows, g.tile_rows)
    if not g.halved:
        return [(pool.checkpoint.at[place], buffers.tiles.at[i, rows])]
    upper: Any = pool.payload
    return [(upper.at[place], buffers.tiles.at[i, 0, rows]), (pool.checkpoint.at[place], buffers.tiles.at[i, 1, rows])]
