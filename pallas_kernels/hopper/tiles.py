"""What the kernels for Hopper share: the call's geometry, register layouts, what they load, store and split.

One warpgroup (128 threads) works on a tile of the state: up to 64 of a value head's V rows by all of its K columns. Rows of a
tile never mix, so a tile of fewer rows (V = 80 is two tiles of 40) leaves the rest of the 64 as rubbish that nobody stores.

Axes: B rows, N slots, T tokens, H value heads, G key heads, V value dim, K key dim, L ring rows.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir.dialects import memref

Array = jax.Array
Ref = Any
Interpret = plgpu.InterpretGPUParams | None

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32

# A tile of the state in registers: a warp holds 16 rows, four neighbouring lanes one of them.
STATE = plgpu.Layout.WGMMA
VALUES = STATE.reduce(1)  # [64], one per row of the tile
COLUMNS = STATE.reduce(0)  # one per column of the tile, in every warp
TILE_ROWS = 64
# Operands of mma.sync on bfloat16; its sum is laid out like the state, under another name.
MMA_LEFT, MMA_RIGHT, MMA_SUM = plgpu.Layout.MMA_LHS(bf16), plgpu.Layout.MMA_RHS(bf16), plgpu.Layout.MMA_ACC(bf16)
SWIZZLED = 32  # columns of a swizzled row; slices of one are multiples of it


def _tiled(tiles: tuple[tuple[int, ...], ...]) -> Any:
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


# Square masks over ring rows: 16 rows by 16 columns at a time.
SQUARE = _tiled(((16, 16), (4, 16), (2,)))
# Drafts by readers: 16 rows by 8 columns at a time, one element a thread.
DRAFTS_BY_READERS = _tiled(((16, 8), (4, 8), (1,)))
# Terms of decayed keys, swizzled: two rows a warp, sixteen lanes a row.
TERMS = _tiled(((8, 32), (2, 32), (2,)))
_RECORDS_64 = _tiled(((16, 64), (4, 64), (8,)))
_RECORDS_32 = _tiled(((16, 32), (4, 32), (4,)))
_EVERY_WARP = plgpu.Layout.TILED(plgpu.Tiling(((32,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)


def records_layout(key_dim: int) -> Any:
    """[16 n, K]: four rows a warp, eight lanes a row."""
    return _RECORDS_32 if key_dim % 64 else _RECORDS_64


def eight_rows_layout(key_dim: int) -> Any:
    """[8 n, K]: what swizzled rows of bfloat16 are written with. A warp takes 32 columns of all rows, or two rows of 32."""
    if key_dim % 128:
        return TERMS
    return plgpu.Layout.TILED(plgpu.Tiling(((8, 128), (8, 32), (8,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


def channels_layout(key_dim: int) -> Any:
    """[K]: every thread owns whole channels. Where K does not fill the warpgroup, each warp does all of them."""
    return _EVERY_WARP if key_dim % 128 else plgpu.Layout.WG_STRIDED((key_dim,), vec_size=1)


class Rows(NamedTuple):
    """Where the call's rows stand. A row whose slot is outside [0, N) or whose length is 0 is padding."""

    slots: Array  # [B] int32
    lengths: Array  # [B] int32, real tokens
    length: Array  # [N] int32, committed records
    origin: Array  # [N] int32, tokens folded so far: record j lies in ring row (origin + j) mod L


class Tokens(NamedTuple):
    """Inputs of T tokens; queries and keys (without a delta rule values too) in the ring's dtype."""

    q: Array  # [B, T, G, K]
    k: Array  # [B, T, G, K]
    v: Array  # [B, T, H, V]
    log_decay: Array  # [B, T, H] or [B, T, H, K] float32
    beta: Array  # [B, T, H] float32
    q_scale: Array  # [B, T, G] float32
    k_scale: Array  # [B, T, G] float32


class Pool(NamedTuple):
    """The state of N slots, as references that a kernel updates in place."""

    checkpoint: Ref  # [N, H, V, K] float32, bfloat16 or float16; uint16 where the payload is the upper half of float32
    key: Ref  # [N, G, L, K] record dtype
    update: Ref  # [N, H, L, V] updates in float32, or values in the record dtype (raw records, or without the delta rule)
    log_decay: Ref  # [N, H, L] or [N, H, L, K] float32
    weight: Ref | None = None  # [N, H, L] float32 without the delta rule; beta in raw records
    factor: Ref | None = None  # [N, G, L] float32, the keys' factors in raw records of the delta rule
    payload: Ref | None = None  # of the read-out copy: [N, H, V, K] uint16 or uint8, or [N, H, V, K / 2] uint8
    scale: Ref | None = None  # [N, H, V] or [N, H] float32
    block_scale: Ref | None = None  # [N, H, V, K / 16] uint8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Static sizes of one call."""

    rows: int
    slots: int
    tokens: int
    value_heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    window: int
    max_draft: int
    delta_rule: bool
    channel_gate: bool
    checkpoint_dtype: Any
    record_dtype: Any
    value_dtype: Any
    raw: bool = False  # whether records are inputs, with the delta rule too
    readout: str = "checkpoint"  # format of the copy
    rounding: str = "nearest"
    seed: int = 0

    @property
    def group_size(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def folds_apart(self) -> bool:
        """Whether ``refresh`` folds and ``read`` answers: raw records, a read-out copy or rounding by chance."""
        return self.raw or self.readout != "checkpoint" or self.rounding != "nearest"

    @property
    def halved(self) -> bool:
        """Whether a checkpoint lies in two planes of 16 bits, of which the upper is read as a copy would be."""
        return self.readout == "bf16_plane"

    @property
    def update_dtype(self) -> Any:
        return f32 if self.delta_rule and not self.raw else self.record_dtype

    @property
    def terms(self) -> int:
        """bfloat16 terms that stand for a float32 in a verify's products: two, to 2**-17, or for float32 activations three.

        A channel gate's keys of more than 128 leave no room for three.
        """
        return 3 if self.record_dtype == f32 and not (self.channel_gate and self.key_dim > 128) else 2

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: the largest multiple of 8, at most 64, that divides V."""
        return max(r for r in range(8, TILE_ROWS + 1, 8) if self.value_dim % r == 0)

    @property
    def tiles(self) -> int:
        return self.value_dim // self.tile_rows

    @property
    def readers(self) -> int:
        """Columns that each token reads the state with: its query, and with the delta rule its key."""
        return 2 if self.delta_rule else 1


def load(ref: Ref, layout: Any) -> Array:
    """Reads shared memory into registers. The layouts' own conflict-free path would cost a select per element."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Ref, value: Array) -> None:
    """Writes registers to shared or global memory. Newer JAX wants to be told where a plain way of doing so will do."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def along(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A vector over ``axis`` of a matrix, repeated along the other."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> Array:
    return plgpu.broadcasted_iota(i32, shape, axis, layout=layout)


def column(x: Array, n: int) -> Array:
    """Column ``n`` of a [64, 8 m] array in the state's layout, exactly."""
    eight = x[:, n // 8 * 8 : n // 8 * 8 + 8]
    return jnp.sum(jnp.where(iota(eight.shape, 1, STATE) == n % 8, eight, 0.0), axis=1)


def store_columns(rows: Ref, x: Array, interpret: Interpret) -> None:
    """Stores the columns of a [64, 8 m] array in the state's layout as rows of shared memory [8 m, 64], in float32.

    What else transposes on its way to shared memory takes 16 bits.
    """
    if interpret is not None:
        store(rows, x.T)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), STATE))
    def put(_: Any, rows: Any, x: Any) -> None:
        x.foreach(lambda value, place: memref.store(value, rows, place[::-1]))

    put(rows, x)


def load_columns(rows: Ref, interpret: Interpret) -> Array:
    """The reverse of ``store_columns``: rows of shared memory [8 m, 64] as columns in the state's layout. [64, 8 m]"""
    if interpret is not None:
        return rows[...].T
    zeros = plgpu.layout_cast(jnp.zeros(rows.shape[::-1], rows.dtype), STATE)
    shape = plgpu.ShapeDtypeStruct(zeros.shape, zeros.dtype, layout=STATE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), STATE), return_type=shape)
    def get(_: Any, rows: Any, zeros: Any) -> Any:
        return zeros.foreach(lambda _, place: memref.load(rows, place[::-1]), create_array=True)

    return get(rows, zeros)


def barrier() -> None:
    """All threads of the warpgroup see each other's writes to shared memory.

    ``commit_smem`` would add a fence that only a later TMA or wgmma read of them needs.
    """
    plgpu.inline_mgpu()(lambda context: mgpu_utils.warpgroup_barrier())()


def keep(x: Array, live: Array, axis: int) -> Array:
    """A 16-bit ``x`` where ``live``, a mask over ``axis``, and zero elsewhere: one instruction for two elements."""
    return keep_bits(x, mask_of(live), axis)


def mask_of(live: Array) -> Array:
    """All bits of 16 where ``live``, none elsewhere."""
    return jnp.where(live, -1, 0).astype(jnp.int16)


def keep_bits(x: Array, mask: Array, axis: int) -> Array:
    """``keep`` by a mask from ``mask_of``."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, mask.dtype) & along(mask, x.shape, axis), x.dtype)


def split(x: Array, nearest: bool = False) -> tuple[Array, Array]:
    """float32 as the sum of two bfloat16, to 2**-17, by integer arithmetic, so that packed conversions serve.

    The first is the nearest one, which a product that leaves the smaller terms' product out is the better for, or truncated,
    which takes an instruction less.
    """
    bits = lax.bitcast_convert_type(x, i32) + jnp.int32(0x8000 if nearest else 0)
    high = lax.bitcast_convert_type(bits & jnp.int32(-65536), f32)
    return high.astype(bf16), (x - high).astype(bf16)


def split_exactly(x: Array) -> tuple[Array, Array, Array]:
    """float32 as the sum of three bfloat16."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, i32) & jnp.int32(-65536), f32)
    return high.astype(bf16), *split(x - high)


def split_in(x: Array, count: int, nearest: bool = False) -> tuple[Array, ...]:
    """float32 as the sum of two bfloat16, see ``split``, or of three."""
    return split(x, nearest) if count == 2 else split_exactly(x)


def round_to_checkpoint(x: Array, dtype: Any) -> Array:
    """The one rounding of a flush. Saturates at the dtype's largest value and keeps NaN."""
    if dtype == f32:
        return x
    limit = float(jnp.finfo(dtype).max)
    return jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x)).astype(dtype)
