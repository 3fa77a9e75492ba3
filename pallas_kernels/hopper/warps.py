"""Heads' vectors and numbers in shared memory as arrays of which each warp has its own rows, for which ``load`` has no layout.

A row i R + h is of token i and head h of R.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.hopper import mlir
from pallas_kernels.hopper.tiles import COLUMNS, Array, Interpret, Ref, f32


def columns_layout(key_dim: int) -> Any:
    """[4 n, K]: a row a warp; a lane has neighbouring columns."""
    block = min(key_dim, 128)
    tiling = plgpu.Tiling(((4, block), (block // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load_rows(ref: Ref, rows: int, heads: int, interpret: Interpret) -> Array:
    """Vectors [t, n, K] in shared memory as rows i R + h of token i and head h of R, in ``columns_layout``. [rows, K]

    The last token and the last head are repeated, so t and n may be 1.
    """
    count, key_dim = ref.shape[:2], ref.shape[2]
    if interpret is not None:
        more = (rows // heads - count[0], heads - count[1], 0)
        return jnp.pad(ref[...], [(0, n) for n in more], mode="edge").reshape(rows, key_dim)
    layout, shape = columns_layout(key_dim), (rows, key_dim)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout))
    def of_warps(context: Any, ref: Any) -> Any:
        block = min(key_dim, 128)
        some = ir.VectorType.get((block // 32,), ir.MemRefType(ref.type).element_type)
        lane = arith.remui(mlir.index(mgpu_utils.thread_idx()), mlir.position(32))
        column, registers = arith.muli(lane, mlir.position(block // 32)), []
        for i in range(0, rows, 4):
            row = [arith.minui(place, mlir.position(n - 1)) for place, n in zip(place_of_row(i, heads), count, strict=True)]
            registers += [
                vector.load(some, ref, [*row, arith.addi(column, mlir.position(first))]) for first in range(0, key_dim, block)
            ]
        return mlir.array(registers, layout, shape)

    return of_warps(ref)


def load_column(ref: Ref, rows: int, heads: int, layout: Any, interpret: Interpret) -> Array:
    """Numbers [n, t] float32 in shared memory as ``load_rows`` has rows: each warp loads its own. [rows]"""
    count = ref.shape[::-1]
    if interpret is not None:
        more = (rows // heads - count[0], heads - count[1])
        return jnp.pad(ref[...].T, [(0, n) for n in more], mode="edge").reshape(rows)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((rows,), jnp.dtype(f32), layout=layout))
    def of_warps(context: Any, ref: Any) -> Any:
        one, registers = ir.VectorType.get((1,), ir.F32Type.get()), []
        for i in range(0, rows, 4):
            token, head = (
                arith.minui(place, mlir.position(n - 1)) for place, n in zip(place_of_row(i, heads), count, strict=True)
            )
            registers.append(vector.broadcast(one, memref.load(ref, [head, token])))
        return mlir.array(registers, layout, (rows,))

    return of_warps(ref)


def store_column(ref: Ref, x: Array, layout: Any, heads: int, interpret: Interpret) -> None:
    """Stores numbers, as ``load_rows`` has rows, by head and token.

    Args:
        ref: result in shared memory, N at least as many as x has for a head; a third axis may have size 1. [R, N] float32
        x: [4 m] float32
        layout: of x.
        heads: R.
        interpret: parameters of interpret mode.
    """
    if interpret is not None:
        x = x.reshape(-1, heads).T
        target = (slice(None), pl.ds(0, x.shape[1]))
        ref[target] = x.reshape(*x.shape, *ref.shape[2:])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def of_warps(context: Any, ref: Any, x: Any) -> None:
        for i, register in enumerate(x.registers.flat):
            token, head = place_of_row(4 * i, heads)
            number = mlir.element(register, 0)
            memref.store(number, ref, [head, token] + [mlir.position(0)] * (ir.MemRefType(ref.type).rank - 2))

    of_warps(ref, x)


def place_of_row(first: int, heads: int) -> tuple[Any, Any]:
    """Token and head of a warp's row among the four from ``first`` on."""
    row = arith.addi(_warp(), mlir.position(first % heads if heads >= 4 else first))
    if heads >= 4:
        return mlir.position(first // heads), row
    return arith.divui(row, mlir.position(heads)), arith.remui(row, mlir.position(heads))


def load_columns(column: Ref, interpret: Interpret) -> Array:
    """A column [8 n, 1] of float32 in shared memory as one of ``COLUMNS``, for which ``load`` has no way across rows."""
    count = column.shape[0]
    if interpret is not None:
        return column[...][:, 0]
    shape = plgpu.ShapeDtypeStruct((count,), jnp.dtype(f32), layout=COLUMNS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def of_lanes(context: Any, column: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        lane = arith.remui(mlir.index(mgpu_utils.thread_idx()), mlir.position(4))
        first, registers = arith.muli(lane, mlir.position(2)), []
        for i in range(0, count, 8):
            rows = [arith.addi(first, mlir.position(i + j)) for j in range(2)]
            numbers = [memref.load(column, [row, mlir.position(0)]) for row in rows]
            registers.append(vector.from_elements(pair, numbers))
        return mlir.array(registers, COLUMNS, (count,))

    return of_lanes(column)


def _warp() -> Any:
    return arith.remui(mlir.index(mgpu_utils.warp_idx(sync=False)), mlir.position(4))
