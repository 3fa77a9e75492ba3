"""Read-out copies of a tile in registers, bit for bit those of ``replayssm_jax.readout``, whose docstring has the formats.

Integer arithmetic on the state's register layout: what a row or a block of 16 needs lies in four neighbouring lanes.
Axes: V value dim, K key dim; a tile has 64 rows, of which the first ``geometry.tile_rows`` are somebody's.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import chance, small_floats
from pallas_kernels.hopper.tiles import (
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Ref,
    along,
    barrier,
    channels_layout,
    f32,
    i32,
    iota,
    load,
    store,
    swizzled,
)
from pallas_kernels.small_floats import BFLOAT16, E2M1_HALFWAY, E4M3, LARGEST_SCALED, LEAST_SCALE, NOT_FINITE, SCALE_BLOCK

_PACKED = 8  # codes of four bits in a word of 32
# Of a vector of 8 n entries that a whole tile's layout would not fit: every quarter of a warp holds all of it.
_EIGHTS = plgpu.Layout.TILED(
    plgpu.Tiling(((8,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(plgpu.Replicated(4), -2), vector_dim=-1
)


def scratch(g: Geometry) -> dict[str, Any]:
    """Shared memory for the copy of one tile."""
    if g.readout == "checkpoint":
        return {}
    if g.readout == "bf16":
        return {"codes": plgpu.SMEM((TILE_ROWS, g.key_dim), jnp.uint16, transforms=swizzled(jnp.uint16))}
    if g.readout == "fp8_e4m3":
        return {"codes": plgpu.SMEM((TILE_ROWS, g.key_dim), jnp.uint8, transforms=swizzled(jnp.uint8))}
    return {
        "codes": plgpu.SMEM((TILE_ROWS, g.key_dim // 2), jnp.uint8),
        "block_scales": plgpu.SMEM((g.key_dim // SCALE_BLOCK, TILE_ROWS), jnp.uint8),
    }


def largest_by_row(tile: Ref, g: Geometry) -> Array:
    """Largest magnitude of each row as scales see it, 0 in rows that are nobody's. A tile [64, K] -> [64] int32, its bits"""

    def one(first: Array, x: Array, largest: Array) -> Array:
        return jnp.maximum(largest, jnp.max(_counted(_magnitude(x)), axis=1))

    largest = _each_piece(tile, one, plgpu.layout_cast(jnp.zeros((TILE_ROWS,), i32), VALUES))
    return jnp.where(iota(largest.shape, 0, VALUES) < g.tile_rows, largest, 0)


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
        patterns = _round_to(inside * along(inverse, x.shape, 0), E4M3)
        patterns = jnp.where(_magnitude(x) < NOT_FINITE, patterns, E4M3.nan)
        store(codes.at[:, pl.ds(first, SWIZZLED)], patterns.astype(jnp.uint8))

    _each_piece(tile, one, None)


def encode_nvfp4(tile: Ref, largest: Array, codes: Ref, block_scales: Ref) -> None:
    """A tile [64, K], its head's largest magnitude's bits, alike [64] -> [64, K / 2] and [K / 16, 64] uint8"""
    scale, inverse = power_of_two_scale(largest, 6.0 * 448.0)
    byte = iota((TILE_ROWS, 8), 1, STATE)

    def one(first: Array, x: Array, carry: None) -> None:
        for block in range(SWIZZLED // SCALE_BLOCK):
            scale_code, words = _encode_block(x[:, block * SCALE_BLOCK : (block + 1) * SCALE_BLOCK], scale, inverse)
            store(block_scales.at[first // SCALE_BLOCK + block], scale_code)
            low, high = (along(word, byte.shape, 0) for word in words)
            eight = lax.shift_right_logical(jnp.where(byte < 4, low, high), (byte & 3) * 8) & 0xFF
            store(codes.at[:, pl.ds(first // 2 + 8 * block, 8)], eight.astype(jnp.uint8))

    _each_piece(tile, one, None)


def _each_piece[T](tile: Ref, one: Callable[[Array, Array, T], T], carry: T) -> T:
    """``carry = one(first column, [64, 32] float32, carry)`` for 32 columns of a tile at a time.

    All of it at once would not fit into registers with what it becomes.
    """

    def piece(i: Array, carry: T) -> T:
        first = i * SWIZZLED
        return one(first, load(tile.at[:, pl.ds(first, SWIZZLED)], STATE).astype(f32), carry)

    return lax.fori_loop(0, tile.shape[1] // SWIZZLED, piece, carry)


def _encode_block(x: Array, scale: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    """[64, 16] float32 and the head's scale [64] -> block scales [64] uint8, two words of eight codes each, [64] int32"""
    magnitude = _magnitude(x)
    counted = _counted(magnitude)
    sixth = _float(jnp.max(counted, axis=1)) * inverse * np.float32(1 / 6)
    finite = jnp.max(magnitude, axis=1) < NOT_FINITE
    scale_code = jnp.where(finite, _round_to(sixth, E4M3), E4M3.nan)
    unit = jnp.where(finite, _e4m3(scale_code) * scale, 0.0)
    code, size = jnp.zeros(x.shape, i32), _float(counted)
    for n, half in enumerate(E2M1_HALFWAY):  # exact, so that comparing rounds as an exact quotient would
        edge = along(unit * half, x.shape, 0)
        code = code + jnp.where(size > edge if n % 2 == 0 else size >= edge, 1, 0)
    sign = lax.shift_right_logical(lax.bitcast_convert_type(x, i32), 31) << 3
    code = jnp.where(along(unit, x.shape, 0) > 0, code | sign, 0)
    shifted = code << ((iota(x.shape, 1, STATE) & (_PACKED - 1)) * 4)
    low, high = (jnp.sum(shifted[:, n : n + _PACKED], axis=1) for n in (0, _PACKED))
    return scale_code.astype(jnp.uint8), (low, high)


def power_of_two_scale(largest: Array, limit: float) -> tuple[Array, Array]:
    """The least 2^e, e >= -110, with ``largest <= limit * 2^e``, and 2^-e; 0 and 0 for zero. int32 bits -> float32"""
    top, top_fraction = divmod(int(np.float32(limit).view(np.int32)), 1 << 23)
    field, fraction = largest >> 23, largest & 0x7FFFFF
    exponent = field + 127 + jnp.where(fraction > top_fraction, 1, 0)
    exponent = jnp.maximum(exponent, top + LEAST_SCALE) - top
    scale, inverse = (_float(jnp.where(field > 0, bits << 23, 0)) for bits in (exponent, 254 - exponent))
    return scale, inverse


def most(largest: Array, line: Ref) -> Array:
    """The largest of a tile's rows, in all of them. [64] int32 bits, through shared memory [64] float32 -> [64] int32"""
    store(line, _float(largest))
    barrier()
    top = jnp.max(load(line, channels_layout(TILE_ROWS)))
    return lax.bitcast_convert_type(lax.broadcast_in_dim(top, (TILE_ROWS,), ()), i32)


def store_rows(source: Ref, target: Ref) -> None:
    """Shared memory [64] to the target [8 n], in global memory, which may be a column."""
    rows = target.shape[0]
    store(target, load(source, VALUES) if rows == TILE_ROWS else load(source.at[0:rows], _EIGHTS))


def _magnitude(x: Array) -> Array:
    return lax.bitcast_convert_type(x, i32) & 0x7FFFFFFF


def _counted(magnitude: Array) -> Array:
    return jnp.where(magnitude < NOT_FINITE, jnp.minimum(magnitude, LARGEST_SCALED), 0)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, f32)


def _e4m3(pattern: Array) -> Array:
    """Numbers of patterns that are neither negative nor NaN. int32 -> float32"""
    small = (pattern & 7).astype(f32) * math.ldexp(1.0, -9)
    return jnp.where(pattern < 1 << E4M3.mantissa, small, _float((pattern << 20) + ((127 - E4M3.bias) << 23)))


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
