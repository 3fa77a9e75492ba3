"""Where a warpgroup of ``read`` stands: its share of the work, its shared memory, the copies to and from it."""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import decode, records
from pallas_kernels.hopper.readers import DRAFTS, SOURCES
from pallas_kernels.hopper.records import RING_CHUNK, Ring
from pallas_kernels.hopper.tiles import (
    TILE_ROWS,
    Array,
    Geometry,
    Interpret,
    Ref,
    Rows,
    barrier,
    bf16,
    channels_layout,
    f32,
    i32,
    load,
    one_of,
    store,
    swizzled,
)

f16 = jnp.float16
_MULTIPROCESSORS = 132
COPY_SCALES = 32  # where in the last row of "numbers" the scales of nvfp4 begin


@dataclasses.dataclass(frozen=True)
class ReadConfig:
    """How the work is cut: value heads that one warpgroup serves, and how many of them are on their way at once."""

    heads: int
    stages: int


def best_read_config(g: Geometry) -> ReadConfig:
    """As many heads of one key head as share its queries, but enough warpgroups to fill the GPU.

    One head at a time: warpgroups that live side by side hide each other's waiting better than what is requested ahead.
    """
    enough, most = max(1, g.rows * g.value_heads // (4 * _MULTIPROCESSORS)), 8 if g.tokens == 1 else 4
    if g.channel_gate:
        return ReadConfig(1, 1)
    return ReadConfig(max(n for n in (1, 2, 4, 8) if g.group_size % n == 0 and n <= min(enough, most)), 1)


def block_scale_rows(g: Geometry) -> tuple[int, int]:
    """Shape in which a copy wants the block scales of a value head: rows of at most 256 bytes."""
    size = g.value_dim * g.key_dim // 16
    return (size // 256, 256) if size % 256 == 0 else (1, size)


def readers_of(g: Geometry, config: ReadConfig) -> int:
    """R, queries that are taken back together: rows of x, a multiple of four."""
    return 4 * (-(-(config.heads if g.tokens == 1 else g.tokens) // 4))


def columns_of(g: Geometry, config: ReadConfig) -> int:
    """N, the same as columns of the tensor cores."""
    return -(-readers_of(g, config) // 8) * 8


def keeps_direction(g: Geometry) -> bool:
    """Whether a query keeps its direction on its way back, so that all value heads of a key head share it."""
    return g.tokens == 1 and not (g.delta_rule or g.channel_gate)


def planes_of(g: Geometry) -> tuple[int, Any]:
    """Terms of x, and their dtype, which is the tile's."""
    if g.readout in decode.UNIT or g.readout == "fp8_e4m3":
        return 2, f16
    if g.readout == "checkpoint" and g.checkpoint_dtype == f16:
        return 2, f16
    return (2, bf16) if g.readout == "checkpoint" and g.checkpoint_dtype == f32 else (3, bf16)


def _arrivals(g: Geometry) -> tuple[int, int]:
    """Copies of what comes at the start, and of what comes with a value head."""
    chunks = g.window // RING_CHUNK
    start = 2 + chunks + (chunks if g.channel_gate else 0) + (not g.channel_gate) + 1 + g.delta_rule
    return start, 1 + (g.readout in ("fp8_e4m3", "nvfp4")) + chunks + 1


def scratch_of(g: Geometry, config: ReadConfig) -> dict[str, Any]:
    s, n, r = config.stages, columns_of(g, config), readers_of(g, config)
    count, dtype = planes_of(g)
    decays = (g.window, g.key_dim) if g.channel_gate else (config.heads, g.window)
    start, with_head = _arrivals(g)
    scratch = {
        "queries": plgpu.SMEM((r if g.tokens > 1 else 1, g.key_dim), g.record_dtype),
        "token_keys": plgpu.SMEM((g.tokens, g.key_dim), g.record_dtype),
        "keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype),
        "decays": plgpu.SMEM(decays, f32),
        "weights": plgpu.SMEM((config.heads, g.window), f32),
        "numbers": plgpu.SMEM((4, 64), f32),
        "trace": plgpu.SMEM((SOURCES, n), f32),
        "scales": plgpu.SMEM((n,), f32),
        "planes": plgpu.SMEM((count * n, g.key_dim), dtype, transforms=swizzled(dtype)),
        "updates": plgpu.SMEM((s, g.window, g.value_dim), g.record_dtype),
        "values": plgpu.SMEM((s, g.tokens, g.value_dim), g.record_dtype),
        "start_arrived": plgpu.Barrier(num_arrivals=start),
        "head_arrived": plgpu.Barrier(num_arrivals=with_head, num_barriers=s),
        **_tile_scratch(g, s),
    }
    if g.record_dtype == bf16:
        scratch["weighing"] = plgpu.SMEM((2 * n, SOURCES), bf16, transforms=swizzled(bf16, DRAFTS))
    if g.delta_rule:
        scratch["factors"] = plgpu.SMEM((g.window,), f32)
    elif keeps_direction(g):
        scratch["dots"] = plgpu.SMEM((g.window,), f32)
    if g.tokens > 1:
        scratch["answers"] = plgpu.SMEM((n, TILE_ROWS), g.value_dtype)
    return scratch


def _tile_scratch(g: Geometry, stages: int) -> dict[str, Any]:
    """Shared memory of what is read: as it is copied, under "tile", and as it is loaded."""
    shape, u8 = (stages, g.value_dim, g.key_dim), jnp.uint8
    match g.readout:
        case "checkpoint":
            return {"tile": plgpu.SMEM(shape, jnp.dtype(g.checkpoint_dtype), transforms=swizzled(g.checkpoint_dtype))}
        case "bf16":
            tiles = (plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)) for dtype in (jnp.uint16, bf16))
            return one_of(dict(zip(("tile", "numbers_of_tile"), tiles, strict=True)))
        case "fp8_e4m3":
            return _codes(stages, g.value_dim, g.key_dim) | {"row_scales": plgpu.SMEM((stages, g.value_dim), f32)}
    copied = plgpu.SMEM((stages, *block_scale_rows(g)), u8)
    scales = plgpu.SMEM((stages, g.value_dim, g.key_dim // 16), u8)
    return _codes(stages, g.value_dim, g.key_dim // 2) | one_of({"copied_scales": copied, "block_scales": scales})


def _codes(stages: int, rows: int, row_bytes: int) -> dict[str, Any]:
    """The same bytes twice, said to be swizzled alike: layout inference might swizzle what is loaded and not what is copied."""
    width = min(row_bytes, 128)
    tile = plgpu.SMEM((stages, rows, row_bytes), jnp.uint8, transforms=swizzled(jnp.uint8, width))
    words = plgpu.SMEM((stages, rows, row_bytes // 4), i32, transforms=swizzled(i32, width // 4))
    return one_of({"tile": tile, "words": words})


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

    def __post_init__(self) -> None:
        g, s = self.g, self.s
        self.key_head = self.first_head // g.group_size
        recorded, start = self.rows.length[self.slot], self.rows.origin[self.slot] & (g.window - 1)
        due = recorded + 2 * g.max_draft > g.window
        self.recorded = recorded
        self.ring = Ring(
            s["keys"], [], s["updates"], s["decays"], None, s["weights"], start, jnp.where(due, 0, recorded), g.window
        )
        self.readers, self.layout = readers_of(g, self.config), decode.columns_layout(g.key_dim)

    def all_have_read(self) -> None:
        """Before a copy overwrites what has been read. A read needs no fence; interpret mode's detector of races wants one."""
        (barrier if self.interpret is None else plgpu.commit_smem)()

    # Copies.

    def request_start(self) -> None:
        g, s, pool, arrived = self.g, self.s, self.pool, self.s["start_arrived"]
        heads = pl.ds(self.first_head, self.config.heads)
        plgpu.copy_gmem_to_smem(self.tokens.q.at[self.b, :, self.key_head], s["queries"].at[pl.ds(0, g.tokens)], arrived)
        plgpu.copy_gmem_to_smem(self.tokens.k.at[self.b, :, self.key_head], s["token_keys"], arrived)
        records.request_keys(pool, self.slot, self.key_head, self.ring, RING_CHUNK, arrived, self.interpret)
        if g.channel_gate:
            for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, RING_CHUNK)):
                rows = pl.ds(i * RING_CHUNK, RING_CHUNK)
                source = pool.log_decay.at[self.slot, self.first_head, rows]
                records.copy_if(wanted, source, s["decays"].at[rows], arrived, self.interpret)
        else:
            plgpu.copy_gmem_to_smem(pool.log_decay.at[self.slot, heads], s["decays"], arrived)
        plgpu.copy_gmem_to_smem(pool.weight.at[self.slot, heads], s["weights"], arrived)
        if g.delta_rule:
            plgpu.copy_gmem_to_smem(pool.factor.at[self.slot, self.key_head], s["factors"], arrived)

    def request_head(self, head: Array) -> None:
        """Requests what is read of a value head, its scales, the records' values and the tokens' ones."""
        g, s, pool, slot, interpret = self.g, self.s, self.pool, self.slot, self.interpret
        h, stage = self.first_head + head, head % self.config.stages
        arrived = s["head_arrived"].at[stage]
        source = pool.checkpoint if g.readout == "checkpoint" else pool.payload
        plgpu.copy_gmem_to_smem(source.at[slot, h], s["tile"].at[stage], arrived)
        if g.readout == "fp8_e4m3":
            plgpu.copy_gmem_to_smem(pool.scale.at[slot, h], s["row_scales"].at[stage], arrived)
        if g.readout == "nvfp4":
            plgpu.copy_gmem_to_smem(pool.block_scale.at[slot, h], s["copied_scales"].at[stage], arrived)
        for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, RING_CHUNK)):
            rows = pl.ds(i * RING_CHUNK, RING_CHUNK)
            records.copy_if(wanted, pool.update.at[slot, h, rows], s["updates"].at[stage, rows], arrived, interpret)
        plgpu.copy_gmem_to_smem(self.tokens.v.at[self.b, :, h], s["values"].at[stage], arrived)

    # The tokens' numbers: rows of "numbers" hold log decays and betas by head and token, scales of queries and keys by token;
    # behind the latter those of the heads' copies.

    def store_numbers(self) -> None:
        g, numbers, b = self.g, self.s["numbers"], self.b
        if g.readout == "nvfp4":
            for h in range(self.config.heads):
                numbers[3, COPY_SCALES + h] = self.pool.scale[self.slot, self.first_head + h]
        for i in range(g.tokens):
            for h in range(self.config.heads):
                if not g.channel_gate:
                    numbers[0, h * g.tokens + i] = self.tokens.log_decay[b, i, self.first_head + h]
                numbers[1, h * g.tokens + i] = self.tokens.beta[b, i, self.first_head + h]
            numbers[2, i] = self.tokens.q_scale[b, i, self.key_head]
            numbers[3, i] = self.tokens.k_scale[b, i, self.key_head]

    def append(self) -> None:
        """Records the tokens, but for their values."""
        g, s, pool, numbers = self.g, self.s, self.pool, self.s["numbers"]
        layout = channels_layout(g.key_dim)

        def row(i: Array) -> Array:
            return self.ring.row(self.recorded + i)

        def one(i: Array, carry: None) -> None:
            for h in range(self.config.heads):
                head = self.first_head + h
                if not g.channel_gate:
                    pool.log_decay[self.slot, head, row(i)] = numbers[0, h * g.tokens + i]
                scale = 1.0 if g.delta_rule else numbers[3, i]
                pool.weight[self.slot, head, row(i)] = numbers[1, h * g.tokens + i] * scale
            if g.channel_gate:
                gate = self.tokens.log_decay.at[self.b, i, self.first_head]
                store(pool.log_decay.at[self.slot, self.first_head, row(i)], load(gate, layout))

        lax.fori_loop(0, self.length, one, None)

        @pl.when(self.first_head % g.group_size == 0)
        def _():
            def one(i: Array, carry: None) -> None:
                store(pool.key.at[self.slot, self.key_head, row(i)], load(s["token_keys"].at[i], layout))
                if g.delta_rule:
                    pool.factor[self.slot, self.key_head, row(i)] = numbers[3, i]

            lax.fori_loop(0, self.length, one, None)
