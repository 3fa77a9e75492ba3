"""How a tile becomes nvfp4: a thread takes whole blocks of 16, so that a scale is worked out once and nothing crosses lanes.

With s = |x| / scale, exact, and r the block's scale, a code of e2m1 is the quotient q = s / r, stretched piece by piece and
rounded to an integer, ties to even:

    code = round(min(2 q, q + 2, q / 2 + 4, 7))

which adding 1.5 * 2^23 does. Where s is r times a halfway point, q has to be that point exactly, and nowhere else: with 1 / r
as the sum of two float32 and one fused multiply-add, q is s / r rounded correctly, and as r has only four significant bits, no
other s is close enough to share a q that has as few.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.hopper import mlir
from pallas_kernels.hopper.tiles import TILE_ROWS, VALUES, Array, Interpret
from pallas_kernels.small_floats import E2M1_HALFWAY, E4M3, LARGEST_SCALED, NOT_FINITE, SCALE_BLOCK, round_to

_ROUND = 1.5 * 2.0**23  # floats from here on are integers, so that adding it rounds
_ROUND_BITS = int(np.float32(_ROUND).view(np.int32))
_PACKED = 8  # codes of four bits in a word of 32
_ROUNDS_PACKED = int(np.uint32(sum(_ROUND_BITS << (4 * i) for i in range(_PACKED)) % 2**32).view(np.int32))
_LIMIT = float(np.int32(LARGEST_SCALED).view(np.float32))


def columns_at_once(key_dim: int) -> int:
    """Columns of a tile [64, K] that are encoded together: two blocks for each thread, or one."""
    return 32 if key_dim % 64 else 64


def blocks_layout(columns: int) -> Any:
    """[64, columns]: eight neighbouring lanes have blocks of eight rows, one below the other, as swizzled memory likes it."""
    if columns == 64:
        return _tiled(((32, 64), (8, 64), (8, 16), (4,)), (-4, -3), -7)
    return _tiled(((64, 32), (16, 32), (8, 16), (4,)), (-5, -4, -3), -7)


def _bytes_layout(columns: int, block: int) -> Any:
    """What becomes of ``columns``, ``block`` bytes of each block."""
    if columns == 64:
        return _tiled(((32, 4 * block), (8, 4 * block), (8, block)), (-3, -2), -6)
    return _tiled(((64, 2 * block), (16, 2 * block), (8, block)), (-4, -3, -2), -6)


def _tiled(tiles: tuple[tuple[int, ...], ...], lanes: tuple[int, ...], warps: int) -> Any:
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(warps,), lane_dims=lanes, vector_dim=-1)


def encode_nvfp4(x: Array, inverse: Array, interpret: Interpret) -> tuple[Array, Array]:
    """Some columns of a tile as codes and block scales.

    Args:
        x: in ``blocks_layout``. [64, n] float32
        inverse: 1 / scale of the head, alike everywhere. [64] float32
        interpret: parameters of interpret mode.

    Returns:
        [64, n / 2] and [64, n / 16] uint8.
    """
    n = x.shape[1]
    if interpret is not None:
        return _encode_by_comparing(x, inverse[0])

    def like(block: int) -> Any:
        shape = (TILE_ROWS, n // SCALE_BLOCK * block)
        return plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.uint8), layout=_bytes_layout(n, block))

    @plgpu.inline_mgpu(arg_types=(blocks_layout(n), VALUES), return_type=(like(8), like(1)))
    def encode(context: Any, x: Any, inverse: Any) -> Any:
        inverse = mlir.element(inverse.registers.flat[0], 0)
        blocks = [[mlir.element(four, i) for four in fours for i in range(4)] for fours in x.registers.reshape(-1, 4)]
        codes, scales = zip(*(_encode_block(block, inverse) for block in blocks), strict=True)
        made = ((codes, like(8)), (scales, like(1)))
        return tuple(mlir.array(registers, x.layout, x.shape, is_signed=False) for registers, x in made)

    return encode(x, inverse)


def _encode_by_comparing(x: Array, inverse: Array) -> tuple[Array, Array]:
    """``encode_nvfp4`` as ``replayssm_jax.readout`` has it."""
    sizes = jnp.abs(x * inverse).reshape(TILE_ROWS, -1, SCALE_BLOCK)
    largest = jnp.max(sizes, axis=-1)
    codes = round_to(jnp.minimum(largest, _LIMIT * inverse) * np.float32(1 / 6), E4M3)
    scales = jnp.where(largest < jnp.inf, codes, E4M3.nan).astype(jnp.uint8)
    unit = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)[..., None]
    past = [sizes > unit * half if n % 2 == 0 else sizes >= unit * half for n, half in enumerate(E2M1_HALFWAY)]
    sign = lax.bitcast_convert_type(x, jnp.uint32).reshape(sizes.shape) >> 31
    code = jnp.where(unit > 0, sum(p.astype(jnp.uint32) for p in past) | (sign << 3), 0).reshape(TILE_ROWS, -1, 2)
    return (code[..., 0] | (code[..., 1] << 4)).astype(jnp.uint8), scales


def _largest(sizes: list[Any]) -> Any:
    """Bits of the largest; as integers they are ordered like the sizes, with infinity and NaN behind."""
    bits = [_bits(size) for size in sizes]
    while len(bits) > 1:
        bits = [arith.maxsi(*two) for two in zip(bits[::2], bits[1::2], strict=True)]
    return bits[0]


def _encode_block(numbers: list[Any], inverse: Any) -> tuple[Any, Any]:
    """Codes and scale of a block: 16 x float32, 1 / scale of the head -> 8 bytes, 1 byte"""
    sizes = [math.absf(arith.mulf(number, inverse)) for number in numbers]
    largest = _largest(sizes)
    finite = arith.cmpi(arith.CmpIPredicate.slt, largest, mlir.word(NOT_FINITE))
    largest = arith.minsi(largest, _bits(arith.mulf(mlir.number(_LIMIT), inverse)))
    scale = _to_e4m3(arith.mulf(_float(largest), mlir.number(1 / 6)))
    codes, byte = _block_codes(numbers, sizes, _from_e4m3(scale), finite), ir.IntegerType.get_signless(8)
    scale = arith.select(finite, arith.trunci(byte, scale), mgpu.c(E4M3.nan, byte))
    return codes, vector.broadcast(ir.VectorType.get((1,), byte), scale)


def _block_codes(numbers: list[Any], sizes: list[Any], unit: Any, finite: Any) -> Any:
    """Codes of a block's numbers, of which ``sizes`` are magnitudes over the head's scale: 16 x float32 -> 8 bytes"""
    inverse = llvm.inline_asm(unit.type, [unit], "rcp.approx.ftz.f32 $0, $1;", "=f,f")
    rest = arith.mulf(math.fma(arith.negf(unit), inverse, mlir.number(1.0)), inverse)
    live = arith.andi(finite, arith.cmpf(arith.CmpFPredicate.OGT, unit, mlir.number(0.0)))
    words = []
    for first in range(0, SCALE_BLOCK, _PACKED):
        word = mlir.word(0)
        for i in reversed(range(first, first + _PACKED)):
            code = _rounded(math.fma(sizes[i], inverse, arith.mulf(sizes[i], rest)))
            word = llvm.intr_fshl(word, _bits(numbers[i]), mlir.word(1))  # the sign from below
            word = arith.addi(arith.shli(word, mlir.word(3)), code)
        words.append(arith.select(live, arith.subi(word, mlir.word(_ROUNDS_PACKED)), mlir.word(0)))
    pair = vector.from_elements(ir.VectorType.get((2,), words[0].type), words)
    return vector.bitcast(ir.VectorType.get((8,), ir.IntegerType.get_signless(8)), pair)


def _rounded(quotient: Any) -> Any:
    """The code plus ``_ROUND_BITS`` of a quotient that is not negative."""
    lines = (
        math.fma(quotient, mlir.number(2.0), mlir.number(_ROUND)),
        arith.addf(quotient, mlir.number(_ROUND + 2)),
        math.fma(quotient, mlir.number(0.5), mlir.number(_ROUND + 4)),
    )
    code = mlir.word(_ROUND_BITS + 7)
    for line in lines:
        code = arith.minsi(_bits(line), code)
    return code


def _to_e4m3(x: Any) -> Any:
    word = ir.IntegerType.get_signless(16)
    return llvm.inline_asm(word, [x], "cvt.rn.satfinite.e4m3x2.f32 $0, 0f00000000, $1;", "=h,f")


def _from_e4m3(code: Any) -> Any:
    word, pair = mlir.word_type(), ir.VectorType.get((2,), ir.F16Type.get())
    both = mgpu_utils.bitcast(llvm.inline_asm(word, [code], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h"), pair)
    return arith.extf(ir.F32Type.get(), mlir.element(both, 0))


def _bits(x: Any) -> Any:
    return arith.bitcast(mlir.word_type(), x)


def _float(bits: Any) -> Any:
    return arith.bitcast(ir.F32Type.get(), bits)
