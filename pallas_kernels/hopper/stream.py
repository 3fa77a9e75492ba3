"""How a step and a verify walk over the state: one warpgroup streams the tiles of a few value heads of one key head of one row.

What is needed is requested by TMA as soon as the slot is known, the next tile as soon as this one has been read; three to five
warpgroups live on a multiprocessor, so that each one's waiting hides behind the others' work. What a key head's value heads
share is done once for all of them, what a value head's tiles share once a head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import folding, records
from pallas_kernels.hopper.compiler import recompute_in_loop
from pallas_kernels.hopper.records import Ring
from pallas_kernels.hopper.request import Copy, request
from pallas_kernels.hopper.tiles import (
    TILE_ROWS,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    Rows,
    Tokens,
    bf16,
    channels_layout,
    load,
    store,
)

# First rows of the scratch "numbers": what a head gate's ring has of log decays, and without the delta rule of weights.
DECAYS, WEIGHTS = 0, 1


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How the work is cut: value heads that one warpgroup serves, ring rows that are copied together.

    Raises:
        ValueError: ring rows that do not fill the tiles of eight in which shared memory may lie. Four compile, but a copy and a
            load then disagree on where a row is.
    """

    heads: int = 4
    ring_chunk: int = 8

    def __post_init__(self) -> None:
        if self.ring_chunk not in (8, 16):
            raise ValueError(f"ring_chunk={self.ring_chunk} must be 8 or 16")


@dataclasses.dataclass(frozen=True)
class Call:
    """The kernel's operands and its static parts."""

    rows: Rows
    tokens: Tokens
    pool: Pool
    out: Ref
    g: Geometry
    config: StreamConfig
    interpret: Interpret


def folds_on_tensor_cores(g: Geometry) -> bool:
    return g.channel_gate or (g.record_dtype == bf16 and g.tile_rows == TILE_ROWS)


def numbers_width(g: Geometry, config: StreamConfig) -> int:
    """Heads whose numbers a warpgroup copies to shared memory: four floats are the least that TMA takes. 0 where that fails."""
    width = 8 if config.heads == 8 else 4
    pays = g.tokens > (8 if width == 8 else 1)  # eight heads and few drafts: registers that cost a third warpgroup
    fits = pays and config.heads != 3 and g.value_heads % width == 0 and g.key_heads % width == 0
    return width if fits else 0


def store_answers(call: Call, answers: Ref, b: Array, h: Array, first: Array) -> None:
    """Stores the outputs of one tile, from value ``first`` on, for all T tokens."""
    g, values = call.g, pl.ds(first, call.g.tile_rows)
    if g.tile_rows == TILE_ROWS:
        plgpu.copy_smem_to_gmem(answers.at[pl.ds(0, g.tokens)], call.out.at[b, :, h, values])
        return
    for i in range(g.tokens):
        plgpu.copy_smem_to_gmem(answers.at[i, pl.ds(0, g.tile_rows)], call.out.at[b, i, h, values])


class Stream:
    """One warpgroup's place in a live row, its shared memory, and the copies to and from it."""

    def __init__(self, call: Call, b: Array, first_head: Array, slot: Array, length: Array, scratch: dict[str, Ref]):
        g = call.g
        self.call, self.g, self.pool = call, g, call.pool
        self.tokens: Any = call.tokens  # references
        self.b, self.first_head, self.slot, self.length, self.scratch = b, first_head, slot, length, scratch
        self.key_head = first_head // g.group_size
        count, start = call.rows.length[slot], call.rows.origin[slot] & (g.window - 1)
        keys, numbers, rows = scratch.get("ring", scratch["keys"]), scratch["numbers"], pl.ds(0, g.window)
        decays = scratch["decays"] if g.channel_gate else numbers.at[DECAYS, rows]
        decayed = scratch["decayed"] if g.channel_gate else [keys]
        elapsed = scratch.get("since", decays) if g.channel_gate else None
        weights = None if g.delta_rule else numbers.at[WEIGHTS, rows]
        self.ring = Ring(keys, decayed, scratch["updates"], decays, elapsed, weights, start, count, g.window)
        self.due = count + 2 * g.max_draft > g.window
        self.present = dataclasses.replace(self.ring, count=jnp.where(self.due, 0, count))  # records that the tokens see
        self.num_tiles = call.config.heads * g.tiles

    # The tokens' numbers, of token ``i`` and value head ``h``: from shared memory where ``numbers_width`` copies them there.

    def _number(self, which: int, i: int | Array, head: Array) -> Array:
        if width := numbers_width(self.g, self.call.config):
            return self.scratch["tokens"][which, i, head % width]
        per_token = (self.tokens.log_decay, self.tokens.beta, self.tokens.q_scale, self.tokens.k_scale)
        return per_token[which][self.b, i, head]

    def log_decay(self, i: int | Array, h: Array) -> Array:
        return self._number(0, i, h)

    def beta(self, i: int | Array, h: Array) -> Array:
        return self._number(1, i, h)

    def q_scale(self, i: int | Array) -> Array:
        return self._number(2, i, self.key_head)

    def k_scale(self, i: int | Array) -> Array:
        return self._number(3, i, self.key_head)

    def _copies_of_numbers(self, arrived: Ref) -> list[Copy]:
        """The tokens' numbers of the ``width`` heads among which this warpgroup's are."""
        if not (width := numbers_width(self.g, self.call.config)):
            return []
        first, tokens, copies = self.g.channel_gate, self.tokens, []
        for which, source in list(enumerate((tokens.log_decay, tokens.beta, tokens.q_scale, tokens.k_scale)))[first:]:
            head = self.first_head if which < 2 else self.key_head
            heads = pl.ds(head // width * width, width)
            target = self.scratch["tokens"].at[which, pl.ds(0, self.g.tokens)]
            copies.append(Copy(source.at[self.b, :, heads], target, arrived))
        return copies

    def place(self, t: Any) -> tuple[Any, Any]:
        """Value head and first value of tile ``t``."""
        return self.first_head + t // self.g.tiles, (t % self.g.tiles) * self.g.tile_rows

    def start(self, queries: Ref, keys: Ref) -> None:
        """Requests what the first tile needs but its inputs, and the tokens' queries and keys, which wait at "keys_arrived"."""
        arrived = self.scratch["keys_arrived"]
        copies = [
            self._copy_of_tile(0),
            Copy(self.tokens.q.at[self.b, :, self.key_head], queries, arrived),
            Copy(self.tokens.k.at[self.b, :, self.key_head], keys, arrived),
            *self._copies_of_numbers(arrived),
            *self._copies_of_keys(self.scratch["keys"], arrived),
            *self._copies_of_head(0),
        ]
        self._request(copies)

    def _request(self, copies: list[Copy]) -> None:
        request(copies, self.call.interpret, by_one_warp=self.g.tokens > 1)

    def request_keys(self, keys: Ref, arrived: Ref) -> None:
        self._request(self._copies_of_keys(keys, arrived))

    def _copies_of_keys(self, keys: Ref, arrived: Ref) -> list[Copy]:
        ring, chunk = dataclasses.replace(self.ring, key=keys), self.call.config.ring_chunk
        return records.copies_of_keys(self.pool, self.slot, self.key_head, ring, chunk, arrived)

    def _copy_of_tile(self, t: Any) -> Copy:
        (h, first), rows = self.place(t), self.g.tile_rows
        source = self.pool.checkpoint.at[self.slot, h, pl.ds(first, rows)]
        return Copy(source, self.scratch["tile"].at[pl.ds(0, rows)], self.scratch["tile_arrived"])

    def _copies_of_head(self, head: Any) -> list[Copy]:
        """The ring's decays and weights, and with a channel gate the tokens' own decays."""
        s, h, arrived = self.scratch, self.first_head + head, self.scratch["head_arrived"]
        ring_chunk = self.call.config.ring_chunk
        copies = records.copies_of_decays(self.pool, self.slot, h, self.ring, self.g, ring_chunk, arrived)
        if self.g.channel_gate:
            copies.append(Copy(self.tokens.log_decay.at[self.b, :, h], s["gates"], arrived))
        return copies

    def request_inputs(self, t: Any, values: Ref) -> None:
        """Requests the ring's updates and the tokens' values, [T, 64] of shared memory, of a tile."""
        (h, first), g, arrived = self.place(t), self.g, self.scratch["inputs_arrived"]
        ring_chunk, tile = self.call.config.ring_chunk, pl.ds(first, g.tile_rows)
        copies = records.copies_of_updates(self.pool, self.slot, h, first, self.ring, g, ring_chunk, arrived)
        if g.tile_rows == TILE_ROWS:
            copies.append(Copy(self.tokens.v.at[self.b, :, h, tile], values, arrived))
        else:
            for i in range(g.tokens):
                row = values.at[pl.ds(i, 1), pl.ds(0, g.tile_rows)]
                copies.append(Copy(self.tokens.v.at[self.b, pl.ds(i, 1), h, tile], row, arrived))
        self._request(copies)

    def each_tile(self, solve: Callable[[Array], None], answer: Callable[[Array], None]) -> None:
        """``solve(head)`` before the first tile of every head, ``answer(t)`` for every tile."""

        def one(t: Array, carry: None) -> None:
            recompute_in_loop()

            @pl.when(t % self.g.tiles == 0)
            def _():
                solve(t // self.g.tiles)

            answer(t)

        lax.fori_loop(0, self.num_tiles, one, None)

    def fold_if_due(self, t: Array, left: Ref | None, total: Any) -> None:
        """Waits for a tile; on a row whose turn it is, folds its records and stores it."""
        s, (h, first) = self.scratch, self.place(t)
        plgpu.barrier_wait(s["tile_arrived"])

        @pl.when(self.due)
        def _():
            plgpu.barrier_wait(s["inputs_arrived"])
            if folds_on_tensor_cores(self.g):
                plane = s["updates_terms"][0] if "updates_terms" in s else s["updates"]
                folding.fold_on_tensor_cores(s["tile"], self.ring, left, total, plane, self.g, self.call.interpret)
            else:
                folding.fold(s["tile"], self.ring, left, total, self.g)
            plgpu.commit_smem()
            stored = s["tile"].at[pl.ds(0, self.g.tile_rows)]
            plgpu.copy_smem_to_gmem(stored, self.pool.checkpoint.at[self.slot, h, pl.ds(first, self.g.tile_rows)])

    def tile_done(self, t: Array) -> None:
        """Everybody has read the tile, and stores of the one before have been read: requests the next, waits for the inputs."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()

        @pl.when(t + 1 < self.num_tiles)
        def _():
            self._request([self._copy_of_tile(t + 1)])

            @pl.when((t + 1) % self.g.tiles == 0)
            def _():
                self._request(self._copies_of_head((t + 1) // self.g.tiles))

        @pl.when(~self.due)
        def _():
            plgpu.barrier_wait(self.scratch["inputs_arrived"])

    def store(self, t: Array, recorded: Callable[[Any], Ref], together: Ref | None) -> None:
        """Stores a tile's answers, and its updates behind the committed records.

        Args:
            t: tile.
            recorded: row of the i-th token's update, a slice [1, V of the tile].
            together: the rows of all tokens, where they are stored as they are.
        """
        (h, first), rows = self.place(t), self.g.tile_rows
        plgpu.commit_smem()
        store_answers(self.call, self.scratch["answers"], self.b, h, first)
        self.append(recorded, self.pool.update.at[self.slot, h, :, pl.ds(first, rows)], together)

    def append(self, row: Callable[[Any], Ref], target: Ref, together: Ref | None = None) -> None:
        """Stores ``row(i)`` for i < length behind the committed records of ``target`` [L, ...], at once if possible."""
        count, first = self.g.tokens, self.ring.row(self.ring.count)

        def one(i: Array, carry: None) -> None:
            plgpu.copy_smem_to_gmem(row(i), target.at[pl.ds(self.ring.row(self.ring.count + i), 1)])

        if count == 1:  # a live row has its one token
            plgpu.copy_smem_to_gmem(row(0), target.at[pl.ds(first, 1)])
            return
        if together is None:
            lax.fori_loop(0, self.length, one, None)
            return
        whole = (self.length == count) & (first + count <= self.g.window)

        @pl.when(whole)
        def _():
            plgpu.copy_smem_to_gmem(together, target.at[pl.ds(first, count)])

        @pl.when(~whole)
        def _():
            lax.fori_loop(0, self.length, one, None)

    def load_keys(self, keys: Ref) -> list[Array]:
        """The tokens' keys, rows of ``keys``, as ``append_keys`` wants them."""
        return [load(keys.at[i], channels_layout(self.g.key_dim)) for i in range(self.g.tokens)]

    def append_keys(self, keys: list[Array]) -> None:
        """Records the tokens' keys, once per key head: from registers, because TMA wants rows of whole 128 bytes."""
        for i, key in enumerate(keys):

            @pl.when((self.first_head % self.g.group_size == 0) & (i < self.length))
            def _(i: int = i, key: Array = key) -> None:
                store(self.pool.key.at[self.slot, self.key_head, self.ring.row(self.ring.count + i)], key)

    def append_numbers(self, h: Array) -> None:
        """Records the tokens' weights, and with a head gate their log decays."""

        if self.g.channel_gate and self.g.delta_rule:
            return
        for i in range(self.g.tokens):
            row = self.ring.row(self.ring.count + i)

            @pl.when(i < self.length)
            def _(i: int = i, row: Array = row) -> None:
                if not self.g.channel_gate:
                    self.pool.log_decay[self.slot, h, row] = self.log_decay(i, h)
                if self.pool.weight is not None:
                    self.pool.weight[self.slot, h, row] = self.beta(i, h) * self.k_scale(i)

    def append_gates(self, h: Array) -> None:
        """Records the tokens' log decays of a channel gate, and waits until shared memory has been read."""
        gates = self.scratch["gates"]
        plgpu.commit_smem()  # the ring's decays have been read before the tokens' are stored behind them
        self.append(lambda i: gates.at[pl.ds(i, 1)], self.pool.log_decay.at[self.slot, h], gates)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
