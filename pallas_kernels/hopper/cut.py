"""How ``read``'s work is cut, and what shared memory a warpgroup then has."""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper import decode, digits
from pallas_kernels.hopper.readers import DRAFTS
from pallas_kernels.hopper.records import RING_CHUNK
from pallas_kernels.hopper.shared import kilobytes, one_of, swizzled
from pallas_kernels.hopper.tiles import (
    TILE_ROWS,
    Geometry,
    bf16,
    f32,
    i32,
)

f16 = jnp.float16
_MULTIPROCESSORS = 132
_ROOM_KB = (56, 75, 113)  # of a multiprocessor's shared memory, for one of four, three and two blocks
# Kinds of "numbers", by value head or (scales) by key head, and by token; factors of planes by plane and column.
LOG_DECAY, BETA, Q_SCALE, K_SCALE, COPY_SCALE, PLANE_FACTORS = range(6)


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
    for other warpgroups on a multiprocessor (one, or for T > 1 tokens up to three) and enough of them to fill the GPU.

    Another head is requested ahead where it takes little memory: warpgroups that live side by side hide each other's waiting.
    """
    enough = max(1, g.rows * g.value_heads // (4 * _MULTIPROCESSORS))
    shared, own = (8, 2) if g.tokens == 1 else (4, 1)
    most = own if g.group_size == 1 or g.channel_gate else shared
    together = g.value_heads if g.group_size == 1 else g.group_size
    configs = [_with_heads(g, n) for n in (8, 4, 2) if together % n == 0 and n <= min(enough, most)]
    for room in _ROOM_KB if g.tokens > 1 else _ROOM_KB[-1:]:
        roomy = [config for config in configs if kilobytes(scratch_of(g, config), reductions=True) <= room]
        if roomy:
            return roomy[0]
    return _with_heads(g, 1)


def _with_heads(g: Geometry, heads: int) -> ReadConfig:
    if not reads_codes(g):
        # a third piece is worth more than more heads that share a key head, as measured, but only with what comes late and
        # the delta rule
        three = g.tokens > 1 and g.delta_rule and reads_float32(g) and sources_come_late(g)
        return ReadConfig(heads, pieces=3 if three else 2, columns=64 if g.tokens == 1 else 32)
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


def sources_come_late(g: Geometry) -> bool:
    """Whether values take the place of what queries are taken back through: where reading the state takes its time.

    They had better come early, as measured, where neither way another warpgroup finds room on a multiprocessor: a float32
    state of a channel gate with 32 records and some tokens.
    """
    crowded = g.channel_gate and g.window == 32 and 1 < g.tokens <= 12 and reads_float32(g)
    return (g.tokens > 1 or not reads_codes(g)) and not crowded


def reads_float32(g: Geometry) -> bool:
    return g.readout == "checkpoint" and g.checkpoint_dtype == f32


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


def scratch_of(g: Geometry, config: ReadConfig) -> dict[str, Any]:
    """Shared memory of a warpgroup of ``read``."""
    s, key_heads, chunks = config.stages, key_heads_of(g, config), g.window // RING_CHUNK
    start = 2 + chunks + (chunks + 1 if g.channel_gate else 1) + 1 + g.delta_rule
    scratch = {
        **_of_tokens(g, config),
        "weights": plgpu.SMEM((config.heads, g.window), f32),
        "start_arrived": plgpu.Barrier(num_arrivals=start),
        "sources_arrived": plgpu.Barrier(num_arrivals=chunks + 1, num_barriers=s),
        **_tile_scratch(g, config),
    }
    if reads_codes(g):
        scratch["head_arrived"] = plgpu.Barrier(num_arrivals=2, num_barriers=s)
    else:
        scratch["piece_arrived"] = plgpu.Barrier(num_barriers=config.pieces)
    # What queries are taken back through, and in its place what tiles then meet.
    through = {"keys": plgpu.SMEM((chunks, key_heads, RING_CHUNK, g.key_dim), g.record_dtype)}
    met = {"updates": plgpu.SMEM((s, g.window, g.value_dim), g.record_dtype), **_met(g, config, many=g.tokens > 1)}
    if takes_digits(g):
        scratch["digits"] = plgpu.SMEM((readers_of(g, config), digits.ROWS, g.key_dim), jnp.int8)
    if g.channel_gate:
        through["decays"] = plgpu.SMEM((chunks, config.heads, RING_CHUNK, g.key_dim), f32)
    else:
        scratch["decays"] = plgpu.SMEM((config.heads, g.window), f32)
    if sources_come_late(g):
        scratch |= one_of({"through": through, "met": met})
    elif g.channel_gate and "planes" in met:
        scratch |= one_of({"decays": through.pop("decays"), "planes": met.pop("planes")}) | through | met
    else:
        scratch |= through | met
    if keeps_direction(g):
        scratch["dots"] = plgpu.SMEM((g.window,), f32)
    if g.delta_rule:
        scratch["factors"] = plgpu.SMEM((key_heads, g.window), f32)
    return scratch


def answering_scratch(g: Geometry, values_late: bool) -> dict[str, Any]:
    """Shared memory with which a head is answered whose records have just been folded, and whose tiles are at hand.

    With ``values_late`` the tokens' values and answers take the place of their queries, keys and gates.
    """
    config = ReadConfig(heads=1)
    scratch = _of_tokens(g, config) | _met(g, config, many=True)
    if values_late:
        vectors = {name: scratch.pop(name) for name in ("vectors", "gates") if name in scratch}
        scratch |= one_of({"vectors": vectors, "values": {name: scratch.pop(name) for name in ("values", "answers")}})
    arrived = {"start_arrived": plgpu.Barrier(num_arrivals=2 + g.channel_gate), "values_arrived": plgpu.Barrier()}
    return scratch | arrived


def _of_tokens(g: Geometry, config: ReadConfig) -> dict[str, Any]:
    """What is known of tokens: queries, keys, numbers, and what becomes of them: weights of sources and factors of planes."""
    n, key_heads, several = columns_of(g), key_heads_of(g, config), planes_per(g, config)
    gates = {"gates": plgpu.SMEM((g.tokens, config.heads, g.key_dim), f32)} if g.channel_gate else {}
    return {
        "vectors": plgpu.SMEM((2, g.tokens, key_heads, g.key_dim), g.record_dtype),
        "numbers": plgpu.SMEM((6, max(config.heads, several), max(g.tokens, n)), f32),
        # records and tokens: of whatever width layout inference tiles it by when ``weigh`` loads it, a multiple of it
        "trace": plgpu.SMEM((several, n, g.window + (DRAFTS if g.tokens > 1 else g.window)), f32),
        **gates,
    }


def _met(g: Geometry, config: ReadConfig, many: bool) -> dict[str, Any]:
    """Tokens' values, planes and, with ``many`` columns of answers, what these go out from."""
    met = {"values": plgpu.SMEM((config.stages, DRAFTS if many else 1, g.value_dim), g.record_dtype)}
    if not takes_digits(g):
        count, dtype = planes_of(g)
        planes = (planes_per(g, config), count * columns_of(g), g.key_dim)
        met["planes"] = plgpu.SMEM(planes, dtype, transforms=swizzled(dtype))
    if many:
        met["answers"] = plgpu.SMEM((columns_of(g), TILE_ROWS), g.value_dtype)
    return met


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
