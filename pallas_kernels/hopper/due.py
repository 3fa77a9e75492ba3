"""Which rows of a call have records to fold, found by every block for itself: one look at all rows costs less than a kernel.

Of up to 1,024 rows at a time, row 32 r + l is bit r of lane l's word, in every warp; rows are counted word by word.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from pallas_kernels.hopper import mlir
from pallas_kernels.hopper.tiles import Array, Geometry, Interpret, Rows, channels_layout, i32

_LANES = 32
ROWS_AT_ONCE = 32 * _LANES
_WORDS = channels_layout(_LANES)


def due_rows(rows: Rows, first: Array, g: Geometry, more_than: int, interpret: Interpret) -> Array:
    """Rows from ``first`` on that are to be folded, as words. [32] int32

    Args:
        rows: of the call.
        first: row of bit 0 of the first word.
        g: sizes of the call.
        more_than: records that a row may have and be left alone.
        interpret: parameters of interpret mode.
    """
    bits = min(-(-g.rows // _LANES), ROWS_AT_ONCE // _LANES)
    if interpret is not None:
        row = first + jnp.arange(bits * _LANES)
        known = jnp.minimum(row, g.rows - 1)
        slots = rows.slots[...][known]
        wanted = (row < g.rows) & (slots >= 0) & (slots < g.slots) & (rows.lengths[...][known] > 0)
        due = wanted & (rows.length[...][jnp.clip(slots, 0, g.slots - 1)] > more_than)
        return jnp.sum(due.reshape(bits, _LANES).astype(i32) << jnp.arange(bits)[:, None], axis=0, dtype=i32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 3 + (plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((_LANES,), jnp.dtype(i32), layout=_WORDS),
    )
    def look(context: Any, slots: Any, lengths: Any, length: Any, first: Any) -> Any:
        first = arith.addi(first.registers.item(), mlir.lane())
        word = mlir.word(0)
        for bit in range(bits):
            row = arith.addi(first, mlir.word(bit * _LANES))
            known = arith.minsi(row, mlir.word(g.rows - 1))
            slot = _number(slots, known)
            wanted = arith.cmpi(arith.CmpIPredicate.ult, slot, mlir.word(g.slots))
            wanted = arith.andi(wanted, arith.cmpi(arith.CmpIPredicate.slt, row, mlir.word(g.rows)))
            wanted = arith.andi(wanted, arith.cmpi(arith.CmpIPredicate.sgt, _number(lengths, known), mlir.word(0)))
            count = _number(length, arith.select(wanted, slot, mlir.word(0)))
            due = arith.andi(wanted, arith.cmpi(arith.CmpIPredicate.sgt, count, mlir.word(more_than)))
            word = arith.ori(word, arith.shli(arith.extui(word.type, due), mlir.word(bit)))
        register = vector.broadcast(ir.VectorType.get((1,), word.type), word)
        return mlir.array([register], _WORDS, (_LANES,), is_signed=True)

    return look(rows.slots, rows.lengths, rows.length, first)


def count_rows(words: Array, interpret: Interpret) -> Array:
    """How many bits of the words are set."""
    if interpret is not None:
        return jnp.sum(lax.population_count(words))

    @plgpu.inline_mgpu(
        arg_types=(_WORDS,), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(i32), layout=plgpu.Layout.WG_SPLAT)
    )
    def count(context: Any, words: Any) -> Any:
        return _scalar(_sum_of_lanes(math.ctpop(mlir.element(words.registers.item(), 0))))

    return count(words)


def nth_row(words: Array, n: Array, interpret: Interpret) -> Array:
    """The row of the n-th set bit, counted from the words' first."""
    if interpret is not None:
        bits = (words[:, None] >> jnp.arange(32)) & 1
        found = jnp.argmax(jnp.cumsum(bits.reshape(-1)) > n)
        return (found % 32) * _LANES + found // 32

    @plgpu.inline_mgpu(
        arg_types=(_WORDS, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(i32), layout=plgpu.Layout.WG_SPLAT),
    )
    def find(context: Any, words: Any, n: Any) -> Any:
        word, lane = mlir.element(words.registers.item(), 0), mlir.lane()
        own = math.ctpop(word)
        upto = own
        for step in (1, 2, 4, 8, 16):
            below = _across_lanes(f"shfl.sync.up.b32 $0, $1, {step}, 0, 0xffffffff;", upto)
            upto = arith.addi(
                upto, arith.select(arith.cmpi(arith.CmpIPredicate.sge, lane, mlir.word(step)), below, mlir.word(0))
            )
        nth = arith.subi(n.registers.item(), arith.subi(upto, own))
        mine = arith.cmpi(arith.CmpIPredicate.ult, nth, own)
        bit = llvm.inline_asm(word.type, [word, arith.addi(nth, mlir.word(1))], "fns.b32 $0, $1, 0, $2;", "=r,r,r")
        row = arith.addi(arith.shli(bit, mlir.word(5)), lane)
        return _scalar(_sum_of_lanes(arith.select(mine, row, mlir.word(0))))

    return find(words, n)


def _number(ref: Any, index: Any) -> Any:
    return memref.load(ref, [mlir.index(index)])


def _sum_of_lanes(x: Any) -> Any:
    return _across_lanes("redux.sync.add.s32 $0, $1, 0xffffffff;", x)


def _across_lanes(instruction: str, x: Any) -> Any:
    return llvm.inline_asm(x.type, [x], instruction, "=r,r", has_side_effects=True)


def _scalar(x: Any) -> Any:
    return fragmented_array.FragmentedArray.splat(x, (), is_signed=True)
