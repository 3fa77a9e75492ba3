"""How a tile of a read-out copy reaches the tensor cores: as float16 or bfloat16 in registers, exactly, in an order of its own.

The tensor cores multiply a tile [64, K] with columns x [K]. Which column of the tile stands where is free as long as x agrees,
so a thread takes whole words of codes, which are neighbours in a row, and x is permuted. Of each block of 128 columns (64 if
K = 64) the bits of a column's number are named, from high to low,

    nvfp4       t t w w e i i       and stand at       w w i i t t e
    fp8_e4m3    c t t w w j e                          c w w j t t e

where t is the lane's place among four, w (and c) its word, and i, j and e the code within. Other formats keep their order.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper import mlir, warps
from pallas_kernels.hopper.shared import swizzled
from pallas_kernels.hopper.tiles import STATE, TILE_ROWS, Array, Interpret, Ref, f32, i32
from pallas_kernels.small_floats import SCALE_BLOCK

f16 = jnp.float16

# What a tile's numbers are multiplied by on their way, so that float16 holds all of them.
UNIT = {"nvfp4": 2.0**-8}

_FIELDS = {
    ("nvfp4", 128): ("t1 t0 w1 w0 e i1 i0", "w1 w0 i1 i0 t1 t0 e"),
    ("nvfp4", 64): ("t1 t0 w0 e i1 i0", "w0 i1 i0 t1 t0 e"),
    ("fp8_e4m3", 128): ("c t1 t0 w1 w0 j e", "c w1 w0 j t1 t0 e"),
    ("fp8_e4m3", 64): ("t1 t0 w1 w0 j e", "w1 w0 j t1 t0 e"),
}
_LANE_BITS = 5


def words_layout(words: int) -> Any:
    """A tile's codes as words of 32 bits, [64, words]: rows as in ``STATE``, neighbouring words in a lane."""
    return plgpu.Layout.WGMMA if words == 8 else plgpu.Layout.WGMMA_8BIT


def block_scales_layout(key_dim: int) -> Any:
    """[64, K / 16] of nvfp4: in each lane the scales of its words."""
    if key_dim > 64:
        return plgpu.Layout.WGMMA
    tiling = plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


def store_plane(form: str, planes: Ref, first: int, x: Array, heads: int, interpret: Interpret) -> None:
    """Stores columns for the tensor cores, in the order in which a tile in this format stands. No register moves.

    Args:
        form: of the read-out.
        planes: result, in rows from ``first`` on. [R, N, K] of 16 bits, ``swizzled``
        first: a multiple of 8.
        x: row i R + h is row i of plane h, in ``warps.columns_layout``. [4 m, K]
        heads: R.
        interpret: parameters of interpret mode.
    """
    shape, transforms, (rows, key_dim) = planes.shape[1:], swizzled(x.dtype), x.shape
    if interpret is not None:
        planes[:, pl.ds(first, rows // heads)] = _ordered(form, x).reshape(-1, heads, key_dim).swapaxes(0, 1)
        return
    block, together = min(key_dim, 128), max(1, 4 // heads)  # rows of one plane among four
    target = _plane_layout(form, block, together)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), warps.columns_layout(key_dim)))
    def put(context: Any, planes: Any, x: Any) -> None:
        registers = np.array(_in_order(form, block, x), dtype=object).reshape(rows // 4, key_dim // block, -1)
        for i, four_rows in enumerate(registers):
            every = np.full((shape[0] // together, *four_rows.shape), None, dtype=object)
            every[(first + 4 * i // heads) // together] = four_rows
            every = every.reshape(target.registers_shape(shape))
            plane = mgpu_utils.memref_slice(planes, warps.place_of_row(4 * i, heads)[1])
            moves = fragmented_array.FragmentedArray.transfer_tiled(
                plane, transforms[1].swizzle, target, shape, optimized=False
            )
            for pick, _, _, address in moves:
                if (register := pick(every)) is not None:
                    llvm.store(register, address)

    put(planes, x)


def _plane_layout(form: str, block: int, rows: int) -> Any:
    """Columns in the order of a format, a lane's those of ``warps.columns_layout``; each of the rows is 4 // rows warps'."""
    before, after = (names.split() for names in _FIELDS.get((form, block), ("", "")))
    bits = [(block >> k,) for k in range(1, len(after) + 1)] or [(block // 32,)]
    place = {name: k - len(after) - 1 for k, name in enumerate(after)}
    lanes = tuple(place[name] for name in before[:_LANE_BITS]) or (-2,)
    warps = [*([-len(bits) - 2] if rows > 1 else []), *([plgpu.Replicated(4 // rows)] if rows < 4 else [])]
    tiling = plgpu.Tiling(((rows, block), *bits))
    return plgpu.Layout.TILED(tiling, warp_dims=tuple(warps), lane_dims=lanes, vector_dim=-1).to_mgpu()


def _in_order(form: str, block: int, x: Any) -> list[Any]:
    """Registers of ``warps.columns_layout`` as those of ``_plane_layout``."""
    registers = list(x.registers.flat)
    if (form, block) not in _FIELDS:
        return registers
    one = ir.VectorType.get((1,), x.mlir_dtype)
    return [vector.extract_strided_slice(one, r, [i], [1], [1]) for r in registers for i in range(block // 32)]


def _ordered(form: str, x: Array) -> Array:
    """Columns of an array [n, K] in the order of a format, in interpret mode."""
    block = min(x.shape[1], 128)
    before, after = (names.split() for names in _FIELDS.get((form, block), ("", "")))
    bits = x.reshape(x.shape[0], -1, *(2,) * len(before), block >> len(before))
    return bits.transpose(0, 1, *(2 + before.index(name) for name in after), bits.ndim - 1).reshape(x.shape)


def decode_fp8(words: Array, interpret: Interpret) -> Array:
    """A tile [64, K] float16 of words [64, K / 4] in ``words_layout``; of codes [64, K] uint8 in interpret mode."""
    if interpret is not None:
        return _ordered("fp8_e4m3", lax.bitcast_convert_type(words, jnp.float8_e4m3fn).astype(f16))

    def four(word: Any, scale: Any) -> list[Any]:
        del scale
        return [two_e4m3(word), two_e4m3(arith.shrui(word, mlir.word(16)))]

    return _decode(words, None, words.shape[1] * 4, four)


def two_e4m3(word: Any) -> Any:
    """The low two e4m3 of a word of 32 bits as a pair of float16."""
    i16, i32_ = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    both = llvm.inline_asm(i32_, [arith.trunci(i16, word)], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
    return mgpu_utils.bitcast(both, ir.VectorType.get((2,), ir.F16Type.get()))


def nvfp4_numbers(codes: Array, scales: Array) -> Array:
    """Numbers [n, K] float32 of codes [n, K / 2] and block scales [n, K / 16] uint8, over the head's scale."""
    codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1).astype(i32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    sizes = 0.5 * halves.astype(f32)
    units = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(f32)
    return jnp.where(codes >= 8, -sizes, sizes) * jnp.repeat(units, SCALE_BLOCK, axis=1)


def decode_nvfp4(words: Array, scales: Array, interpret: Interpret) -> Array:
    """A tile [64, K] float16, times ``UNIT`` and over the head's scale, of words [64, K / 8] in ``words_layout``.

    Args:
        words: codes; [64, K / 2] uint8 in interpret mode.
        scales: of blocks, in ``block_scales_layout``. [64, K / 16] uint8
        interpret: parameters of interpret mode.
    """
    if interpret is not None:
        return _ordered("nvfp4", (nvfp4_numbers(words, scales) * UNIT["nvfp4"]).astype(f16))

    def eight(word: Any, scale: Any) -> list[Any]:
        pairs = []
        for by_size, by_sign in ((9, 12), (5, 8), (1, 4), (-3, 0)):
            size = arith.andi(_shifted(word, by_size), mlir.word(0x0E000E00))
            sign = arith.andi(_shifted(word, by_sign), mlir.word(-0x7FFF8000))
            pair = mgpu_utils.bitcast(arith.ori(size, sign), ir.VectorType.get((2,), ir.F16Type.get()))
            pairs.append(arith.mulf(pair, scale))
        return pairs

    return _decode(words, scales, words.shape[1] * 8, eight)


def _decode(words: Array, scales: Array | None, key_dim: int, pairs: Callable[[Any, Any], list[Any]]) -> Array:
    """Each word as pairs of float16, in the tensor cores' registers."""
    shape, result = (TILE_ROWS, key_dim), STATE
    layouts = [words_layout(words.shape[1])]
    if scales is not None:
        layouts.append(block_scales_layout(key_dim))

    @plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(f16), layout=result))
    def unpack(context: Any, words: Any, scales: Any = None) -> Any:
        target = result.to_mgpu()
        registers = np.empty(math.prod(target.registers_shape(shape)), dtype=object)
        columns = words.registers.reshape(-1, 2)  # vectors of words; two rows a thread
        for row in range(2):
            by_vector = [None] * columns.shape[0] if scales is None else scales.registers.reshape(-1, 2)[:, row]
            done: list[Any] = []
            for vector_of_words, own in zip(columns[:, row], by_vector, strict=True):
                count = ir.VectorType(vector_of_words.type).shape[0]
                units = _block_units(own)
                for i in range(count):
                    unit = units[i * len(units) // count] if units else None
                    done += pairs(mlir.element(vector_of_words, i), unit)
            registers[row::2] = done
        return fragmented_array.FragmentedArray(
            _registers=registers.reshape(target.registers_shape(shape)), _layout=target, _is_signed=None
        )

    return unpack(words) if scales is None else unpack(words, scales)


def _block_units(scales: Any) -> list[Any]:
    """Block scales (a vector of bytes) as pairs of float16, times ``UNIT`` and 2^14, which the codes lack."""
    if scales is None:
        return []
    word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F16Type.get())
    lift = vector.broadcast(pair, mgpu.c(2.0**14, ir.F16Type.get()))
    units = []
    for i in range(ir.VectorType(scales.type).shape[0]):
        code = arith.extui(word, mlir.element(scales, i))
        both = arith.muli(code, mlir.word(0x00800080))  # the code's bits at the place of a float16's, twice
        unit = arith.mulf(mgpu_utils.bitcast(both, pair), lift)
        nan = arith.cmpi(arith.CmpIPredicate.eq, code, mlir.word(0x7F))
        units.append(arith.select(nan, mgpu_utils.bitcast(mlir.word(0x7E007E00), pair), unit))
    return units


def _shifted(word: Any, left: int) -> Any:
    if left == 0:
        return word
    return arith.shli(word, mlir.word(left)) if left > 0 else arith.shrui(word, mlir.word(-left))
