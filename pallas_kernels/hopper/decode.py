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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels.hopper.tiles import STATE, TILE_ROWS, Array, Interpret, Ref, f32, i32, swizzled

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


def columns_layout(key_dim: int) -> Any:
    """[4 n, K]: a row a warp; a lane has neighbouring columns."""
    block = min(key_dim, 128)
    tiling = plgpu.Tiling(((4, block), (block // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def store_plane(form: str, plane: Ref, x: Array, interpret: Interpret) -> None:
    """Stores columns for the tensor cores, in the order in which a tile in this format stands. No register moves.

    Args:
        form: of the read-out.
        plane: rows past those of x keep what they hold. [8 n, K] of 16 bits, ``swizzled``
        x: in ``columns_layout``. [4 m, K]
        interpret: parameters of interpret mode.
    """
    shape, block = plane.shape, min(x.shape[1], 128)
    before, after = (names.split() for names in _FIELDS.get((form, block), ("", "")))
    if interpret is not None:
        plane[...] = jnp.pad(_ordered(form, x), ((0, shape[0] - x.shape[0]), (0, 0)))
        return
    layout, transforms = columns_layout(shape[1]), swizzled(x.dtype)
    if before:
        tiling = plgpu.Tiling(((4, block), *((block >> k,) for k in range(1, len(after) + 1))))
        place = {name: k - len(after) - 1 for k, name in enumerate(after)}
        lanes = tuple(place[name] for name in before[:_LANE_BITS])
        layout = plgpu.Layout.TILED(tiling, warp_dims=(-len(after) - 2,), lane_dims=lanes, vector_dim=-1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), columns_layout(shape[1])))
    def put(context: Any, plane: Any, x: Any) -> None:
        target = layout.to_mgpu()
        registers = list(x.registers.flat)
        if before:
            one = ir.VectorType.get((1,), x.mlir_dtype)
            registers = [vector.extract_strided_slice(one, r, [i], [1], [1]) for r in registers for i in range(block // 32)]
        every = np.full(math.prod(target.registers_shape(shape)), None, dtype=object)
        every[: len(registers)] = registers
        every = every.reshape(target.registers_shape(shape))
        moves = fragmented_array.FragmentedArray.transfer_tiled(plane, transforms[1].swizzle, target, shape, optimized=False)
        for pick, _, _, address in moves:
            if (register := pick(every)) is not None:
                llvm.store(register, address)

    put(plane, x)


def _ordered(form: str, x: Array) -> Array:
    """Columns of an array [n, K] in the order of a format, in interpret mode."""
    block = min(x.shape[1], 128)
    before, after = (names.split() for names in _FIELDS.get((form, block), ("", "")))
    bits = x.reshape(x.shape[0], -1, *(2,) * len(before), block >> len(before))
    return bits.transpose(0, 1, *(2 + before.index(name) for name in after), bits.ndim - 1).reshape(x.shape)


def load_column(column: Ref, rows: int, layout: Any, interpret: Interpret) -> Array:
    """A column [n, 1] of float32 in shared memory, n <= rows, by row of ``columns_layout``; rows past n are anything finite.

    Each warp loads the one number of its row, for which ``load`` has no layout.
    """
    count = column.shape[0]
    if interpret is not None:
        return jnp.pad(column[...][:, 0], (0, rows - count))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((rows,), jnp.dtype(f32), layout=layout))
    def of_warps(context: Any, column: Any) -> Any:
        target, index = layout.to_mgpu(), ir.IndexType.get()
        warp = arith.index_cast(index, mgpu_utils.warp_idx(sync=False))
        warp = arith.remui(warp, mgpu.c(4, index))
        registers = []
        for first in range(0, rows, 4):
            row = arith.minui(arith.addi(warp, mgpu.c(first, index)), mgpu.c(count - 1, index))
            number = memref.load(column, [row, mgpu.c(0, index)])
            registers.append(vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), number))
        array = np.empty(len(registers), dtype=object)
        array[:] = registers
        shape = target.registers_shape((rows,))
        return fragmented_array.FragmentedArray(_registers=array.reshape(shape), _layout=target, _is_signed=None)

    return of_warps(column)


def decode_fp8(words: Array, interpret: Interpret) -> Array:
    """A tile [64, K] float16 of words [64, K / 4] in ``words_layout``; of codes [64, K] uint8 in interpret mode."""
    if interpret is not None:
        return _ordered("fp8_e4m3", lax.bitcast_convert_type(words, jnp.float8_e4m3fn).astype(f16))

    def two(pair: Any) -> Any:
        i16, word = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
        both = llvm.inline_asm(word, [arith.trunci(i16, pair)], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        return mgpu_utils.bitcast(both, ir.VectorType.get((2,), ir.F16Type.get()))

    def four(word: Any, scale: Any) -> list[Any]:
        del scale
        return [two(word), two(arith.shrui(word, _constant(16)))]

    return _decode(words, None, words.shape[1] * 4, four)


def decode_nvfp4(words: Array, scales: Array, interpret: Interpret) -> Array:
    """A tile [64, K] float16, times ``UNIT`` and over the head's scale, of words [64, K / 8] in ``words_layout``.

    Args:
        words: codes; [64, K / 2] uint8 in interpret mode.
        scales: of blocks, in ``block_scales_layout``. [64, K / 16] uint8
        interpret: parameters of interpret mode.
    """
    if interpret is not None:
        codes = jnp.stack([words & 15, words >> 4], axis=-1).reshape(TILE_ROWS, -1).astype(i32)
        exponent, mantissa = (codes >> 1) & 3, codes & 1
        halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
        sizes = 0.5 * halves.astype(f32)
        unit = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(f32) * UNIT["nvfp4"]
        values = jnp.where(codes >= 8, -sizes, sizes) * jnp.repeat(unit, 16, axis=1)
        return _ordered("nvfp4", values.astype(f16))

    def eight(word: Any, scale: Any) -> list[Any]:
        pairs = []
        for by_size, by_sign in ((9, 12), (5, 8), (1, 4), (-3, 0)):
            size = arith.andi(_shifted(word, by_size), _constant(0x0E000E00))
            sign = arith.andi(_shifted(word, by_sign), _constant(-0x7FFF8000))
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
                    done += pairs(_element(vector_of_words, i), unit)
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
        code = arith.extui(word, _element(scales, i))
        both = arith.muli(code, _constant(0x00800080))  # the code's bits at the place of a float16's, twice
        unit = arith.mulf(mgpu_utils.bitcast(both, pair), lift)
        nan = arith.cmpi(arith.CmpIPredicate.eq, code, _constant(0x7F))
        units.append(arith.select(nan, mgpu_utils.bitcast(_constant(0x7E007E00), pair), unit))
    return units


def _element(x: Any, i: int) -> Any:
    return vector.extract(x, dynamic_position=[], static_position=[i])


def _constant(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _shifted(word: Any, left: int) -> Any:
    if left == 0:
        return word
    return arith.shli(word, _constant(left)) if left > 0 else arith.shrui(word, _constant(-left))
