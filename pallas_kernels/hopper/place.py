"""Where a warpgroup of ``read`` stands: its share of the work, its shared memory, the copies to and from it."""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import records, warps
from pallas_kernels.hopper.cut import (
    BETA,
    COPY_SCALE,
    K_SCALE,
    LOG_DECAY,
    PLANE_FACTORS,
    Q_SCALE,
    ReadConfig,
    columns_of,
    key_heads_of,
    planes_per,
    readers_of,
)
from pallas_kernels.hopper.records import RING_CHUNK, Ring
from pallas_kernels.hopper.request import Copy, request
from pallas_kernels.hopper.tiles import (
    TILE_ROWS,
    Array,
    Geometry,
    Interpret,
    Ref,
    Rows,
    barrier,
    channels_layout,
    load,
    store,
)


@dataclasses.dataclass
class Place:
    """One warpgroup's place in a live row, its shared memory, and the copies to and from it."""

    rows: Rows
    tokens: Any  # references
    pool: Any
    out: Ref
    g: Geometry
    config: ReadConfig
    interpret: Interpret
    s: dict[str, Ref]
    b: Array
    first_head: Array
    slot: Array
    length: Array
    folded: bool = False  # whether the row's records have become part of the state

    def __post_init__(self) -> None:
        g, numbers = self.g, self.s["numbers"].at
        self.planes = planes_per(g, self.config)
        factors = numbers[PLANE_FACTORS, pl.ds(0, self.planes), pl.ds(0, columns_of(g))]
        vectors = {name: self.s["vectors"].at[i] for i, name in enumerate(("queries", "token_keys"))}
        self.s = s = self.s | vectors | {"scales": factors}
        self.key_head, self.key_heads = self.first_head // g.group_size, key_heads_of(g, self.config)
        self.recorded, start = self.rows.length[self.slot], self.rows.origin[self.slot] & (g.window - 1)
        count = jnp.where(self.recorded + 2 * g.max_draft > g.window, 0, self.recorded)
        keys, updates, decays, weights = (s.get(name) for name in ("keys", "updates", "decays", "weights"))
        self.ring = Ring(keys, [], updates, decays, None, weights, start, count, g.window)
        self.readers, self.layout = readers_of(g, self.config), warps.columns_layout(g.key_dim)

    def all_have_read(self) -> None:
        """Before a copy overwrites what has been read. A read needs no fence; interpret mode's detector of races wants one."""
        (barrier if self.interpret is None else plgpu.commit_smem)()

    # Copies.

    def request_start(self) -> None:
        g, s, pool, slot, arrived = self.g, self.s, self.pool, self.slot, self.s["start_arrived"]
        heads, key_heads = pl.ds(self.first_head, self.config.heads), pl.ds(self.key_head, self.key_heads)
        copies = [
            Copy(self.tokens.q.at[self.b, :, key_heads], s["queries"], arrived),
            Copy(self.tokens.k.at[self.b, :, key_heads], s["token_keys"], arrived),
        ]
        for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, RING_CHUNK)):
            rows = pl.ds(i * RING_CHUNK, RING_CHUNK)
            copies.append(Copy(pool.key.at[slot, key_heads, rows], s["keys"].at[i], arrived, wanted))
            if g.channel_gate:
                copies.append(Copy(pool.log_decay.at[slot, heads, rows], s["decays"].at[i], arrived, wanted))
        if g.channel_gate:
            copies.append(Copy(self.tokens.log_decay.at[self.b, :, heads], s["gates"], arrived))
        else:
            copies.append(Copy(pool.log_decay.at[slot, heads], s["decays"], arrived))
        copies.append(Copy(pool.weight.at[slot, heads], s["weights"], arrived))
        if g.delta_rule:
            copies.append(Copy(pool.factor.at[slot, key_heads], s["factors"], arrived))
        request(copies, self.interpret)

    def request_head(self, head: Array) -> None:
        """Requests the codes and scales of a value head."""
        s, pool, slot, h, stage = self.s, self.pool, self.slot, self.first_head + head, head % self.config.stages
        arrived = s["head_arrived"].at[stage]
        copies = [Copy(pool.payload.at[slot, h], s["tile"].at[stage], arrived)]
        if self.g.readout == "fp8_e4m3":
            copies.append(Copy(pool.scale.at[slot, h], s["row_scales"].at[stage], arrived))
        else:
            copies.append(Copy(pool.block_scale.at[slot, h], s["copied_scales"].at[stage], arrived))
        request(copies, self.interpret)

    def request_sources(self, head: Array) -> None:
        """Requests the values of a value head's records and tokens."""
        g, s, pool, slot = self.g, self.s, self.pool, self.slot
        h, stage = self.first_head + head, head % self.config.stages
        arrived, copies = s["sources_arrived"].at[stage], []
        for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, RING_CHUNK)):
            rows = pl.ds(i * RING_CHUNK, RING_CHUNK)
            copies.append(Copy(pool.update.at[slot, h, rows], s["updates"].at[stage, rows], arrived, wanted))
        copies.append(Copy(self.tokens.v.at[self.b, :, h], s["values"].at[stage, pl.ds(0, g.tokens)], arrived))
        request(copies, self.interpret)

    def piece(self, head: Array, part: int, first: int) -> Array:
        """Number of the piece with ``columns`` from ``first`` on, of 64 values."""
        in_row = self.g.key_dim // self.config.columns
        return (head * self.g.tiles + part) * in_row + first // self.config.columns

    def request_piece(self, piece: Array) -> None:
        """Requests a piece of the state, if there is one."""
        g, s, config = self.g, self.s, self.config
        in_row, stage = g.key_dim // config.columns, piece % config.pieces
        tile, column = piece // in_row, piece % in_row
        source = self.pool.checkpoint if g.readout == "checkpoint" else self.pool.payload
        values, columns = pl.ds((tile % g.tiles) * TILE_ROWS, TILE_ROWS), pl.ds(column * config.columns, config.columns)
        source = source.at[self.slot, self.first_head + tile // g.tiles, values, columns]

        @pl.when(piece < config.heads * g.tiles * in_row)
        def _():
            request([Copy(source, s["tile"].at[stage], s["piece_arrived"].at[stage])], self.interpret)

    def store_numbers(self) -> None:
        """The tokens' numbers, and scales of the heads' copies."""
        g, numbers, tokens, b = self.g, self.s["numbers"], self.tokens, self.b
        for h in range(self.config.heads):
            head = self.first_head + h
            if g.readout == "nvfp4":
                numbers[COPY_SCALE, h, 0] = self.pool.scale[self.slot, head]
            for i in range(g.tokens):
                if not g.channel_gate:
                    numbers[LOG_DECAY, h, i] = tokens.log_decay[b, i, head]
                numbers[BETA, h, i] = tokens.beta[b, i, head]
                if h < self.key_heads:
                    numbers[Q_SCALE, h, i] = tokens.q_scale[b, i, self.key_head + h]
                    numbers[K_SCALE, h, i] = tokens.k_scale[b, i, self.key_head + h]

    def append(self) -> None:
        """Records the tokens, but for their values."""
        g, s, pool, slot, numbers = self.g, self.s, self.pool, self.slot, self.s["numbers"]
        layout = channels_layout(g.key_dim)

        def one(i: Array, carry: None) -> None:
            row = self.ring.row(self.recorded + i)
            for h in range(self.config.heads):
                head = self.first_head + h
                if g.channel_gate:
                    store(pool.log_decay.at[slot, head, row], load(s["gates"].at[i, h], layout))
                else:
                    pool.log_decay[slot, head, row] = numbers[LOG_DECAY, h, i]
                scale = 1.0 if g.delta_rule else numbers[K_SCALE, min(h, self.key_heads - 1), i]
                pool.weight[slot, head, row] = numbers[BETA, h, i] * scale

            @pl.when(self.first_head % g.group_size == 0)
            def _():
                for h in range(self.key_heads):
                    store(pool.key.at[slot, self.key_head + h, row], load(s["token_keys"].at[i, h], layout))
                    if g.delta_rule:
                        pool.factor[slot, self.key_head + h, row] = numbers[K_SCALE, h, i]

        lax.fori_loop(0, self.length, one, None)
