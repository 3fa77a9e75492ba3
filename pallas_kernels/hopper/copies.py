"""Read-out copies of a tile in registers, bit for bit those of ``replayssm_jax.readout``, whose docstring has the formats.

Axes: V value dim, K key dim; a tile has 64 rows, of which the first ``geometry.tile_rows`` are somebody's.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import chance, small_floats
from pallas_kernels.hopper import encode, mlir
from pallas_kernels.hopper.shared import swizzled
from pallas_kernels.hopper.tiles import (
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Ref,
    along,
    barrier,
    channels_layout,
    f32,
    i32,
    iota,
    load,
    store,
)
from pallas_kernels.small_floats import BFLOAT16, LARGEST_SCALED, LEAST_SCALE, NOT_FINITE, SCALE_BLOCK

_NOTHING = int(np.uint32(0x81000000).view(np.int32))  # zero's magnitude in ``see``
# Of a vector of 8 n entries that a whole tile's layout would not fit: every quarter of a warp holds all of it.
_EIGHTS = plgpu.Layout.TILED(
    plgpu.Tiling(((8,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(plgpu.Replicated(4), -2), vector_dim=-1
)
_EIGHT_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 2),)), warp_dims=(plgpu.Replicated(4),), lane_dims=(plgpu.Replicated(4), -2), vector_dim=-1
)


def scratch(g: Geometry, held: int) -> dict[str, Any]:
    """Shared memory for the copies of ``held`` tiles, or of nvfp4 for that of one which is not whole."""
    if g.readout == "checkpoint" or g.halved or (g.readout == "nvfp4" and g.tile_rows == TILE_ROWS):
        return {}
    if g.readout == "bf16":
        return {"codes": plgpu.SMEM((held, TILE_ROWS, g.key_dim), jnp.uint16, transforms=swizzled(jnp.uint16))}
    if g.readout == "fp8_e4m3":
        return {"codes": plgpu.SMEM((held, TILE_ROWS, g.key_dim), jnp.uint8, transforms=swizzled(jnp.uint8))}
    return {
        "codes": plgpu.SMEM((TILE_ROWS, g.key_dim // 2), jnp.uint8),
        "block_scales": plgpu.SMEM((TILE_ROWS, g.key_dim // SCALE_BLOCK), jnp.uint8),
    }


def nothing_seen() -> Array:
    """The magnitudes of no numbers, for ``see``. [64] int32"""
    return plgpu.layout_cast(jnp.full((TILE_ROWS,), _NOTHING, i32), VALUES)


def see(seen: Array, x: Array) -> Array:
    """The largest magnitude of each row, some more columns taken in. What is not finite does not count.

    Magnitudes m as 2 m + 2^24 are unsigned numbers, ordered alike, in which infinity and NaN come round to the lowest; with the
    top bit turned they are signed ones.

    Args:
        seen: so far. [64] int32
        x: more columns. [64, n] float32

    Returns:
        [64] int32
    """
    return jnp.maximum(seen, jnp.max(lax.bitcast_convert_type(x, i32) * 2 + _NOTHING, axis=1))


def largest(seen: Array, g: Geometry) -> Array:
    """Bits of the largest magnitude of each row as scales see it, 0 in rows that are nobody's. [64] int32"""
    magnitude = jnp.minimum(lax.shift_right_logical(seen - _NOTHING, 1), LARGEST_SCALED)
    return jnp.where(iota(magnitude.shape, 0, VALUES) < g.tile_rows, magnitude, 0)


def load_piece(tile: Ref, columns: Any) -> Array:
    """Columns of a tile [64, K], or of one of which halves are kept, [2, 64, K] uint16, upper and lower ones. In ``STATE``."""
    if len(tile.shape) == 2:
        return load(tile.at[:, columns], STATE)
    upper, lower = (load(tile.at[n, :, columns], STATE).astype(i32) for n in range(2))
    return lax.bitcast_convert_type(small_floats.join_halves(upper, lower), f32)


def store_piece(tile: Ref, columns: Any, x: Array) -> None:
    """The reverse of ``load_piece``; of halves all NaN are alike."""
    if len(tile.shape) == 2:
        store(tile.at[:, columns], x)
        return
    bits = jnp.where(_magnitude(x) > NOT_FINITE, 0x7FC00000, lax.bitcast_convert_type(x, i32))
    for n, half in enumerate((small_floats.upper_half(bits), bits & 0xFFFF)):
        store(tile.at[n, :, columns], half.astype(jnp.uint16))


def encode_bf16(tile: Ref, codes: Ref) -> None:
    """A tile [64, K] -> [64, K] uint16"""

    def one(first: Array, x: Array, carry: None) -> None:
        patterns = jnp.where(_magnitude(x) < NOT_FINITE, _round_to(x, BFLOAT16), BFLOAT16.nan)
        store(codes.at[:, pl.ds(first, SWIZZLED)], patterns.astype(jnp.uint16))

    _each_piece(tile, one, None)


def encode_fp8(tile: Ref, largest: Array, codes: Ref, scales: Ref) -> None:
    """A tile [64, K], the largest magnitudes' bits in its rows [64] -> [64, K] uint8, [64] float32"""
    scale, inverse = power_of_two_scale(largest, 448.0)
    store(scales, scale)
    limit = 2.0**127

    def one(first: Array, x: Array, carry: None) -> None:
        inside = jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x))
        numbers = jnp.where(_magnitude(x) < NOT_FINITE, inside * along(inverse, x.shape, 0), jnp.nan)
        patterns = lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.uint8)
        store(codes.at[:, pl.ds(first, SWIZZLED)], patterns)

    _each_piece(tile, one, None)


def encode_nvfp4(tile: Ref, inverse: Array, codes: Ref, block_scales: Ref, interpret: Interpret) -> None:
    """A tile [64, K] and 1 / scale of its head, alike [64] float32 -> [64, K / 2] and [64, K / 16] uint8, in any memory"""
    n = encode.columns_at_once(tile.shape[1])

    def one(i: Array, carry: None) -> None:
        x = load(tile.at[:, pl.ds(i * n, n)], encode.blocks_layout(n)).astype(f32)
        some_codes, some_scales = encode.encode_nvfp4(x, inverse, interpret)
        store(codes.at[:, pl.ds(i * (n // 2), n // 2)], some_codes)
        store(block_scales.at[:, pl.ds(i * (n // SCALE_BLOCK), n // SCALE_BLOCK)], some_scales)

    lax.fori_loop(0, tile.shape[1] // n, one, None)


def _each_piece[T](tile: Ref, one: Callable[[Array, Array, T], T], carry: T) -> T:
    """``carry = one(first column, [64, 32] float32, carry)`` for 32 columns of a tile at a time.

    All of it at once would not fit into registers with what it becomes.
    """

    def piece(i: Array, carry: T) -> T:
        first = i * SWIZZLED
        return one(first, load(tile.at[:, pl.ds(first, SWIZZLED)], STATE).astype(f32), carry)

    return lax.fori_loop(0, tile.shape[1] // SWIZZLED, piece, carry)


def power_of_two_scale(largest: Array, limit: float) -> tuple[Array, Array]:
    """The least 2^e, e >= -110, with ``largest <= limit * 2^e``, and 2^-e; 0 and 0 for zero. int32 bits -> float32"""
    top, top_fraction = divmod(int(np.float32(limit).view(np.int32)), 1 << 23)
    field, fraction = largest >> 23, largest & 0x7FFFFF
    exponent = field + 127 + jnp.where(fraction > top_fraction, 1, 0)
    exponent = jnp.maximum(exponent, top + LEAST_SCALE) - top
    scale, inverse = (_float(jnp.where(field > 0, bits << 23, 0)) for bits in (exponent, 254 - exponent))
    return scale, inverse


def most(largest: Array, line: Ref, interpret: Interpret) -> Array:
    """The largest of a tile's rows, in all of them. [64] int32, not negative, by way of a line [64] float32 -> [64] int32"""
    store(line, _float(largest))
    barrier()
    layout = channels_layout(TILE_ROWS)
    bits = lax.bitcast_convert_type(load(line, layout), i32)
    if interpret is not None:
        return jnp.full((TILE_ROWS,), jnp.max(bits))

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.dtype(i32), layout=VALUES))
    def of_warp(context: Any, bits: Any) -> Any:
        first, second = (mlir.element(x, 0) for x in bits.registers.flat)
        both = arith.maxsi(first, second)
        top = llvm.inline_asm(both.type, [both], "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(top, (TILE_ROWS,), VALUES.to_mgpu(), is_signed=True)

    return of_warp(bits)


def store_first(source: Ref, target: Ref) -> None:
    """The first rows of shared memory [64, 2 m] bytes to the target [8 n, 2 m], in global memory."""
    store(target, load(source.at[pl.ds(0, target.shape[0])], _EIGHT_ROWS))


def store_rows(source: Ref, target: Ref) -> None:
    """Shared memory [64] to the target [8 n], in global memory."""
    rows = target.shape[0]
    store(target, load(source, VALUES) if rows == TILE_ROWS else load(source.at[0:rows], _EIGHTS))


def _magnitude(x: Array) -> Array:
    return lax.bitcast_convert_type(x, i32) & 0x7FFFFFFF


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, f32)


def request_streams(g: Geometry, request: Array) -> Array:
    """What kernels need of the slots' requests and the seed, which is no part of a kernel. [N] int32 -> [N] int32"""
    if g.rounding == "nearest":
        return request
    return lax.bitcast_convert_type(chance.request_stream(g.seed, request), i32)


def round_by_chance(x: Array, g: Geometry, stream: Array, position: Array, head: Array, element: Array) -> Array:
    """``rounding.round_checkpoint`` of elements [...] int32 of a head. [...] float32 -> checkpoint dtype"""
    noise = chance.element_noise(stream.astype(jnp.uint32), position, head, element.astype(jnp.uint32))
    return chance.round_by_chance(x, g.checkpoint_dtype, noise)


def _round_to(x: Array, target: small_floats.SmallFloat) -> Array:
    """``small_floats.round_to``, as int32."""
    return small_floats.round_to(x, target).astype(i32)
