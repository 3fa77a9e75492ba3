"""An nvfp4 tile times one vector, by the tensor cores' integers: codes stay codes, and their scales meet sums and not numbers.

The vector is cut into four signed digits to base 256, each an operand column of int8. Of a code c, e2m1 in halves, the tensor
cores get c + |c| and -|c|: a byte permutation looks four codes up in a table of the eight sizes, and where the code's sign bit
is set it repeats the entry's sign bit instead, which leaves 0 in the first and is masked away for the second. Products and sums
of 16 columns, a block, are exact. A product takes 32 columns, two blocks, so the digits stand twice among its 8 columns, once
beside zeros for the second block's columns and once beside zeros for the first's.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.hopper import decode, mlir, warps
from pallas_kernels.hopper.tiles import MMA_SUM, TILE_ROWS, VALUES, Array, Interpret, Ref, f32, i32
from pallas_kernels.small_floats import SCALE_BLOCK

ROWS = 5  # of a vector in shared memory: four digits and zeros
_SHIFTS = (24, 16, 8, 0)
UNIT = 2.0**30  # twice what a vector below 2 is multiplied by, for codes in halves

# A tile's words of 8 codes, [64, K / 8]: rows as in ``STATE``, every fourth word a lane's.
WORDS = plgpu.Layout.TILED(plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)
# Digits as the right operand, [4, K]: two times four columns, in each eight neighbouring rows a lane's.
DIGITS = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 32), (8,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(plgpu.Replicated(2), -3, -2), vector_dim=-1
)


def scales_layout(key_dim: int) -> Any:
    """[64, K / 16]: rows as in ``STATE``, a row's scales in each of its lanes."""
    blocks = key_dim // SCALE_BLOCK
    tiling = plgpu.Tiling(((64, blocks), (16, blocks), (8, blocks)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-2, plgpu.Replicated(4)), vector_dim=-1)


def store(ref: Ref, x: Array, interpret: Interpret) -> None:
    """Stores vectors of whole numbers below 2^30 by digit, the highest first, and behind the digits zeros.

    Args:
        ref: result. [4 n, 5, K] int8
        x: in ``warps.columns_layout``. [4 n, K] float32
        interpret: parameters of interpret mode.
    """
    lower = jnp.int32(0x00808080)  # all digits but the highest are from -128 to 127
    digits = (x.astype(i32) + lower) ^ lower
    if interpret is not None:
        for i, shift in enumerate(_SHIFTS):
            ref[:, i] = (digits >> shift).astype(jnp.int8)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), warps.columns_layout(x.shape[1])))
    def put(context: Any, ref: Any, digits: Any) -> None:
        warp, lane = mlir.index(arith.remui(mgpu_utils.warp_idx(sync=False), mlir.word(4))), mlir.index(mlir.lane())
        for (row, block), register in np.ndenumerate(digits.registers.reshape(x.shape[0] // 4, -1)):
            count = ir.VectorType(register.type).shape[0]
            at = arith.addi(arith.muli(lane, mlir.position(count)), mlir.position(32 * count * block))
            words = [arith.shrui(register, vector.broadcast(register.type, mlir.word(shift))) for shift in _SHIFTS]
            words.append(vector.broadcast(register.type, mlir.word(0)))
            for i, word in enumerate(words):
                digit = arith.trunci(ir.VectorType.get((count,), ir.IntegerType.get_signless(8)), word)
                vector.store(digit, ref, [arith.addi(warp, mlir.position(4 * row)), mlir.position(i), at])

    put(ref, digits)


def load(ref: Ref, interpret: Interpret) -> Array:
    """A vector's digits in ``DIGITS``, of which a lane whose column is for the other block gets zeros: [5, K] -> [4, K] int8"""
    if interpret is not None:
        return ref[:4]
    shape = (4, ref.shape[1])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int8), layout=DIGITS)
    )
    def get(context: Any, ref: Any) -> Any:
        eight = ir.VectorType.get((8,), ir.IntegerType.get_signless(8))
        digit, quarter = (arith.andi(arith.shrui(mlir.lane(), mlir.word(shift)), mlir.word(3)) for shift in (2, 0))
        own = arith.cmpi(arith.CmpIPredicate.eq, _at_least(mlir.lane(), 16), _at_least(quarter, 2))
        digit, first = mlir.index(arith.select(own, digit, mlir.word(4))), arith.muli(mlir.index(quarter), mlir.position(8))
        registers = [vector.load(eight, ref, [digit, arith.addi(first, mlir.position(i))]) for i in range(0, shape[1], 32)]
        return mlir.array(registers, DIGITS, shape, is_signed=True)

    return get(ref)


def multiply(words: Array, scales: Array, digits: Array, unit: Array, zero: Array, interpret: Interpret) -> Array:
    """A tile times the vector, over ``UNIT``: the sums of the rows of the result. [64, 8] float32

    Args:
        words: codes in ``WORDS``, [64, K / 8] int32; [64, K / 2] uint8 in interpret mode.
        scales: of blocks, in ``scales_layout``. [64, K / 16] uint8
        digits: from ``load``. [4, K] int8
        unit: what the result is multiplied by.
        zero: an int32 of which the compiler does not know that it is 0. It would make tables anew wherever they are looked up.
        interpret: parameters of interpret mode.
    """
    if interpret is not None:
        x = sum(digit.astype(f32) * 256.0 ** (3 - i) for i, digit in enumerate(digits))
        answers = jnp.dot(decode.nvfp4_numbers(words, scales), x, precision="highest") * (2 * unit / UNIT)
        return jnp.pad(answers[:, None], ((0, 0), (0, 7)))
    shape = (TILE_ROWS, 8)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(f32), layout=MMA_SUM)

    @plgpu.inline_mgpu(arg_types=(WORDS, scales_layout(digits.shape[1]), DIGITS, VALUES, VALUES), return_type=result)
    def of_tile(context: Any, words: Any, scales: Any, digits: Any, unit: Any, zero: Any) -> Any:
        lane, tables = arith.andi(mlir.lane(), mlir.word(3)), _tables(mlir.element(zero.registers.flat[0], 0))
        second, lower = _at_least(lane, 2), _at_least(arith.andi(lane, mlir.word(1)), 1)
        units = [_units(row, second) for row in scales.registers.flat]
        right = [mgpu_utils.bitcast(eight, ir.VectorType.get((2,), mlir.word_type())) for eight in digits.registers.flat]
        answers: list[Any] = [None, None]
        for four, columns, *by_row in zip(words.registers.reshape(-1, 2), right, *units, strict=True):
            sums = _sums([mlir.element(word, 0) for word in four], [mlir.element(columns, i) for i in range(2)], tables)
            for row, scale in enumerate(by_row):
                both = arith.addi(arith.shli(sums[2 * row], mlir.word(8)), sums[2 * row + 1])
                answers[row] = _add_product(arith.sitofp(ir.F32Type.get(), both), scale, answers[row])
        unit = arith.mulf(
            mlir.element(unit.registers.flat[0], 0), arith.select(lower, mlir.number(1 / UNIT), mlir.number(2.0**16 / UNIT))
        )
        return mlir.array([_beside_zero(arith.mulf(answer, unit)) for answer in answers], MMA_SUM, shape)

    def splat(x: Array) -> Array:
        return plgpu.layout_cast(jnp.full((TILE_ROWS,), x), VALUES)

    return of_tile(words, scales, digits, splat(unit), splat(zero))


def _sums(words: list[Any], columns: list[Any], tables: list[tuple[Any, Any]]) -> list[Any]:
    """32 columns of 16 rows, a word of each of a lane's two rows, times 8 columns: two sums of either row."""
    sums = [mlir.word(0)] * 4
    for table, mask in zip(tables, (0x77777777, 0xFFFFFFFF), strict=True):
        codes = [arith.andi(word, mlir.word(mask)) for word in words]
        left = [_permute(*table, arith.shrui(code, mlir.word(shift))) for shift in (0, 16) for code in codes]
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([mlir.word_type()] * 4),
            [*left, *columns, *sums],
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=r,=r,=r,=r" + ",r" * 10,
        )
        sums = [llvm.extractvalue(mlir.word_type(), struct, [i]) for i in range(4)]
    return sums


def _tables(zero: Any) -> list[tuple[Any, Any]]:
    """Bytes by the size of a code, for four sizes each: -|c|, which no sign bit may reach, and 2 |c|, in halves."""
    return [
        (arith.addi(mlir.word(low), zero), mlir.word(high))
        for low, high in ((0xFDFEFF00, 0xF4F8FAFC), (0x06040200, 0x18100C08))
    ]


def _units(scales: Any, second: Any) -> list[Any]:
    """Scales of a row as float32, of either the first or the second of every two blocks."""
    count = ir.VectorType(scales.type).shape[0]
    words = mgpu_utils.bitcast(scales, ir.VectorType.get((count // 4,), mlir.word_type()))
    bytes_of_two = arith.select(second, mlir.word(0x7531), mlir.word(0x6420))
    units = []
    for first in range(0, count // 4, 2):
        low, high = (mlir.element(words, min(first + i, count // 4 - 1)) for i in range(2))
        four = _permute(low, high, bytes_of_two)
        halves = [decode.two_e4m3(four), decode.two_e4m3(arith.shrui(four, mlir.word(16)))]
        units += [arith.extf(ir.F32Type.get(), mlir.element(pair, i)) for pair in halves for i in range(2)]
    return units[: count // 2]


def _permute(low: Any, high: Any, selectors: Any) -> Any:
    return llvm.inline_asm(mlir.word_type(), [low, high, selectors], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _add_product(x: Any, y: Any, total: Any) -> Any:
    return arith.mulf(x, y) if total is None else mlir_math.fma(x, y, total)


def _beside_zero(x: Any) -> Any:
    zeros = vector.broadcast(ir.VectorType.get((2,), ir.F32Type.get()), mlir.number(0.0))
    return vector.insert(x, zeros, dynamic_position=[], static_position=[0])


def _at_least(x: Any, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.uge, x, mlir.word(bound))
