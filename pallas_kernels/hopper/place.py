"""Where a warpgroup of ``read`` stands: its share of the work, its shared memory, the copies to and from it."""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import decode, digits, records, warps
from pallas_kernels.hopper.readers import DRAFTS
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
    kilobytes,
    load,
    one_of,
    store,
    swizzled,
)

f16 = jnp.float16
_MULTIPROCESSORS = 132
_HALF_KB = 113  # of a multiprocessor's shared memory, for one of two blocks
# Kinds of "numbers", by value head or (scales) by key head, and by token.
LOG_DECAY, BETA, Q_SCALE, K_SCALE, COPY_SCALE = range(5)


@dataclasses.dataclass(frozen=True)
class ReadConfig:
    """How the work is cut.

    Attributes:
        heads: value heads that one warpgroup serves.
        stages: of them on their way at once.
        pieces: of the state, 64 values by ``columns``, on their way at once, where no codes are read.
        columns: of such a piece.
    """

    heads: int
    stages: int = 1
    pieces: int = 2
    columns: int = 64


def best_read_config(g: Geometry) -> ReadConfig:
    """As many heads as share a key head (of those with gates or keys of their own two, or one of T > 1 tokens) that leave room
    for a second warpgroup on a multiprocessor and enough of them to fill the GPU.

    Another head is requested ahead where it takes little memory: warpgroups that live side by side hide each other's waiting.
    """
    enough = max(1, g.rows * g.value_heads // (4 * _MULTIPROCESSORS))
    shared, own = (8, 2) if g.tokens == 1 else (4, 1)
    most = own if g.group_size == 1 or g.channel_gate else shared
    together = g.value_heads if g.group_size == 1 else g.group_size
    configs = [_with_heads(g, n) for n in (8, 4, 2) if together % n == 0 and n <= min(enough, most)]
    roomy = [config for config in configs if kilobytes(scratch_of(g, config), reductions=True) <= _HALF_KB]
    return roomy[0] if roomy else _with_heads(g, 1)


def _with_heads(g: Geometry, heads: int) -> ReadConfig:
    if not reads_codes(g):
        return ReadConfig(heads, columns=64 if g.tokens == 1 else 32)
    codes = g.value_dim * g.key_dim // (2 if g.readout == "nvfp4" else 1)
    return ReadConfig(heads, stages=2 if g.tokens == 1 and heads > 2 and codes <= 8192 else 1)


def block_scale_rows(g: Geometry) -> tuple[int, int]:
    """Shape in which a copy wants the block scales of a value head: rows of at most 256 bytes."""
    size = g.value_dim * g.key_dim // 16
    return (size // 256, 256) if size % 256 == 0 else (1, size)


def readers_of(g: Geometry, config: ReadConfig) -> int:
    """Queries that are taken back together, filled up to rows of four warps."""
    return 4 * (-(-config.heads * g.tokens // 4))


def planes_per(g: Geometry, config: ReadConfig) -> int:
    """Planes of queries: one of all heads' (T = 1), or each head has its own."""
    return 1 if g.tokens == 1 else config.heads


def key_heads_of(g: Geometry, config: ReadConfig) -> int:
    """Key heads of a warpgroup's value heads."""
    return config.heads if g.group_size == 1 else 1


def columns_of(g: Geometry) -> int:
    """N, columns of the tensor cores: heads (T = 1), at most 8, or tokens."""
    return -(-g.tokens // 8) * 8


def keeps_direction(g: Geometry) -> bool:
    """Whether a query keeps its direction on its way back, and all value heads of a key head share it."""
    return g.tokens == 1 and not (g.delta_rule or g.channel_gate) and g.group_size > 1


def reads_codes(g: Geometry) -> bool:
    """Whether what is read has scales. Then it is copied by value head, and else by pieces."""
    return g.readout in ("fp8_e4m3", "nvfp4")


def takes_digits(g: Geometry) -> bool:
    """Whether the tensor cores multiply integers."""
    return g.tokens == 1 and g.readout == "nvfp4"


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
    start = 2 + chunks + (chunks + 1 if g.channel_gate else 1) + 1 + g.delta_rule
    return start, 2 * reads_codes(g) + chunks + 1


def scratch_of(g: Geometry, config: ReadConfig) -> dict[str, Any]:
    s, n, r, key_heads = config.stages, columns_of(g), readers_of(g, config), key_heads_of(g, config)
    chunks, (start, with_head) = g.window // RING_CHUNK, _arrivals(g)
    several = planes_per(g, config)
    scratch = {
        "queries": plgpu.SMEM((g.tokens, key_heads, g.key_dim), g.record_dtype),
        "token_keys": plgpu.SMEM((g.tokens, key_heads, g.key_dim), g.record_dtype),
        "keys": plgpu.SMEM((chunks, key_heads, RING_CHUNK, g.key_dim), g.record_dtype),
        "weights": plgpu.SMEM((config.heads, g.window), f32),
        "numbers": plgpu.SMEM((5, config.heads, g.tokens), f32),
        # records and tokens: of whatever width layout inference tiles it by when ``weigh`` loads it, a multiple of it
        "trace": plgpu.SMEM((several, n, g.window + (DRAFTS if g.tokens > 1 else g.window)), f32),
        "scales": plgpu.SMEM((several, n), f32),
        "updates": plgpu.SMEM((s, g.window, g.value_dim), g.record_dtype),
        "values": plgpu.SMEM((s, DRAFTS if g.tokens > 1 else 1, g.value_dim), g.record_dtype),
        "start_arrived": plgpu.Barrier(num_arrivals=start),
        "head_arrived": plgpu.Barrier(num_arrivals=with_head, num_barriers=s),
        **_tile_scratch(g, config),
    }
    if not reads_codes(g):
        scratch["piece_arrived"] = plgpu.Barrier(num_barriers=config.pieces)
    planes: dict[str, Any] = {}
    if takes_digits(g):
        scratch["digits"] = plgpu.SMEM((r, digits.ROWS, g.key_dim), jnp.int8)
    else:
        count, dtype = planes_of(g)
        planes["planes"] = plgpu.SMEM((several, count * n, g.key_dim), dtype, transforms=swizzled(dtype))
    if g.channel_gate:
        scratch["gates"] = plgpu.SMEM((g.tokens, config.heads, g.key_dim), f32)
        decays = {"decays": plgpu.SMEM((chunks, config.heads, RING_CHUNK, g.key_dim), f32)}
        scratch |= one_of(decays | planes) if planes else decays
    else:
        scratch |= {"decays": plgpu.SMEM((config.heads, g.window), f32), **planes}
    if keeps_direction(g):
        scratch["dots"] = plgpu.SMEM((g.window,), f32)
    if g.delta_rule:
        scratch["factors"] = plgpu.SMEM((key_heads, g.window), f32)
    if g.tokens > 1:
        scratch["answers"] = plgpu.SMEM((n, TILE_ROWS), g.value_dtype)
    return scratch


def _tile_scratch(g: Geometry, config: ReadConfig) -> dict[str, Any]:
    """Shared memory of what is read: as it is copied, under "tile", and as it is loaded."""
    stages, shape, u8 = config.stages, (config.pieces, TILE_ROWS, config.columns), jnp.uint8
    match g.readout:
        case "checkpoint":
            return {"tile": plgpu.SMEM(shape, jnp.dtype(g.checkpoint_dtype), transforms=swizzled(g.checkpoint_dtype))}
        case "bf16" | "bf16_plane":
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
        self.key_head, self.key_heads = self.first_head // g.group_size, key_heads_of(g, self.config)
        recorded, start = self.rows.length[self.slot], self.rows.origin[self.slot] & (g.window - 1)
        due = recorded + 2 * g.max_draft > g.window
        self.recorded = recorded
        self.ring = Ring(
            s["keys"], [], s["updates"], s["decays"], None, s["weights"], start, jnp.where(due, 0, recorded), g.window
        )
        self.readers, self.layout = readers_of(g, self.config), warps.columns_layout(g.key_dim)
        self.planes = planes_per(g, self.config)

    def all_have_read(self) -> None:
        """Before a copy overwrites what has been read. A read needs no fence; interpret mode's detector of races wants one."""
        (barrier if self.interpret is None else plgpu.commit_smem)()

    # Copies.

    def request_start(self) -> None:
        g, s, pool, slot, arrived = self.g, self.s, self.pool, self.slot, self.s["start_arrived"]
        heads, key_heads = pl.ds(self.first_head, self.config.heads), pl.ds(self.key_head, self.key_heads)
        plgpu.copy_gmem_to_smem(self.tokens.q.at[self.b, :, key_heads], s["queries"], arrived)
        plgpu.copy_gmem_to_smem(self.tokens.k.at[self.b, :, key_heads], s["token_keys"], arrived)
        for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, RING_CHUNK)):
            rows = pl.ds(i * RING_CHUNK, RING_CHUNK)
            records.copy_if(wanted, pool.key.at[slot, key_heads, rows], s["keys"].at[i], arrived, self.interpret)
            if g.channel_gate:
                records.copy_if(wanted, pool.log_decay.at[slot, heads, rows], s["decays"].at[i], arrived, self.interpret)
        if g.channel_gate:
            plgpu.copy_gmem_to_smem(self.tokens.log_decay.at[self.b, :, heads], s["gates"], arrived)
        else:
            plgpu.copy_gmem_to_smem(pool.log_decay.at[slot, heads], s["decays"], arrived)
        plgpu.copy_gmem_to_smem(pool.weight.at[slot, heads], s["weights"], arrived)
        if g.delta_rule:
            plgpu.copy_gmem_to_smem(pool.factor.at[slot, key_heads], s["factors"], arrived)

    def request_head(self, head: Array) -> None:
        """Requests what is read of a value head, its scales, the records' values and the tokens' ones."""
        g, s, pool, slot, interpret = self.g, self.s, self.pool, self.slot, self.interpret
        h, stage = self.first_head + head, head % self.config.stages
        arrived = s["head_arrived"].at[stage]
        if reads_codes(g):
            plgpu.copy_gmem_to_smem(pool.payload.at[slot, h], s["tile"].at[stage], arrived)
        if g.readout == "fp8_e4m3":
            plgpu.copy_gmem_to_smem(pool.scale.at[slot, h], s["row_scales"].at[stage], arrived)
        if g.readout == "nvfp4":
            plgpu.copy_gmem_to_smem(pool.block_scale.at[slot, h], s["copied_scales"].at[stage], arrived)
        for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, RING_CHUNK)):
            rows = pl.ds(i * RING_CHUNK, RING_CHUNK)
            records.copy_if(wanted, pool.update.at[slot, h, rows], s["updates"].at[stage, rows], arrived, interpret)
        plgpu.copy_gmem_to_smem(self.tokens.v.at[self.b, :, h], s["values"].at[stage, pl.ds(0, g.tokens)], arrived)

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
            plgpu.copy_gmem_to_smem(source, s["tile"].at[stage], s["piece_arrived"].at[stage])

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
