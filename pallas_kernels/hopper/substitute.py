"""Inverts a unit lower triangular matrix in shared memory by substitution, in blocks."""

from collections.abc import Iterable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, memref

from pallas_kernels.hopper import mlir
from pallas_kernels.hopper.tiles import Array, Interpret, Ref

_SOLVED = 8  # records that are solved one by one
_THREADS = 128


def substitute(system: Ref, start: Array, interpret: Interpret) -> None:
    """A becomes (I + A)^-1, with anything above the diagonal. [L, L], of which row ``start`` is the first

    Blocks of 8 on the diagonal are solved record by record, those below follow as of [I + A, 0; C, I + B] the inverse is
    [X, 0; -Y C X, Y], where X and Y are those of I + A and I + B.
    """
    window = system.shape[0]
    if interpret is not None:
        order = (start + jnp.arange(window)) & (window - 1)
        x = jnp.eye(window)
        for i in range(1, window):
            x = x.at[order[i]].add(-system[...][order[i], order[:i]] @ x[order[:i]])
        system[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def invert(_: Any, system: Any, start: Any) -> None:
        system, start = _Wrapped(system), start.registers.item()
        _solve_blocks(system, start)
        size = _SOLVED
        while size < window:
            _join_blocks(system, start, size)
            size *= 2

    invert(system, start)


class _Wrapped:
    """A square of shared memory in inline code, whose rows and columns are numbered modulo its size."""

    def __init__(self, ref: Any):
        self.ref, self.size = ref, ir.MemRefType(ref.type).shape[0]

    def _place(self, numbers: tuple[Any, Any]) -> list[Any]:
        return [mlir.index(arith.andi(number, mlir.word(self.size - 1))) for number in numbers]

    def __getitem__(self, numbers: tuple[Any, Any]) -> Any:
        return memref.load(self.ref, self._place(numbers))

    def __setitem__(self, numbers: tuple[Any, Any], x: Any) -> None:
        memref.store(x, self.ref, self._place(numbers))


def _solve_blocks(system: _Wrapped, start: Any) -> None:
    """Inverts the blocks on the diagonal: each lane, in every warp, finds a column of one."""
    column = mgpu_utils.thread_idx()
    own = _bits(arith.subi(column, start), 1, _SOLVED)
    rows = _following(arith.subi(column, own), _SOLVED)
    solved: list[Any] = []
    for i, row in enumerate(rows):
        x = arith.uitofp(ir.F32Type.get(), arith.cmpi(arith.CmpIPredicate.eq, own, mlir.word(i)))
        for other, known in zip(rows, solved, strict=False):
            x = math.fma(arith.negf(system[row, other]), known, x)
        solved.append(x)
    mgpu_utils.warpgroup_barrier()  # everybody has read what the solution overwrites
    for row, x in zip(rows, solved, strict=True):
        system[row, column] = x
    mgpu_utils.warpgroup_barrier()


def _join_blocks(system: _Wrapped, start: Any, size: int) -> None:
    """Makes inverted blocks twice the size: every thread finds some elements of what is below the diagonal of one.

    The product of two of the three factors is put far above the diagonal, where nothing is looked for.
    """
    half, places = system.size // 2, []
    thread = arith.addi(mgpu_utils.thread_idx(), start)  # or all of this would be known beforehand, and held in registers
    for n in range(0, half * size, _THREADS):
        element = arith.addi(thread, mlir.word(n))
        row, column = _bits(element, size, size), _bits(element, 1, size)
        block = arith.muli(_bits(element, size * size, half // size), mlir.word(size))
        first = arith.addi(arith.addi(start, block), block)
        beyond = arith.addi(arith.addi(start, block), row), arith.addi(arith.addi(start, mlir.word(half)), column)
        places.append((_following(first, size), _following(arith.addi(first, mlir.word(size)), size), row, column, beyond))
    for upper, lower, row, column, beyond in places:
        below, beside = arith.addi(lower[0], row), arith.addi(upper[0], column)
        system[beyond] = _sum_of((system[below, i], system[i, beside]) for i in upper)
    mgpu_utils.warpgroup_barrier()
    for upper, lower, row, column, (across, beside) in places:
        below, first = arith.addi(lower[0], row), arith.subi(across, row)
        x = _sum_of((system[below, i], system[j, beside]) for i, j in zip(lower, _following(first, size), strict=True))
        system[below, arith.addi(upper[0], column)] = arith.negf(x)
    mgpu_utils.warpgroup_barrier()


def _bits(x: Any, unit: int, count: int) -> Any:
    """x // unit modulo count, both powers of two, in inline code."""
    return arith.andi(arith.shrui(x, mlir.word(unit.bit_length() - 1)), mlir.word(count - 1))


def _following(first: Any, count: int) -> list[Any]:
    return [arith.addi(first, mlir.word(i)) for i in range(count)]


def _sum_of(products: Iterable[tuple[Any, Any]]) -> Any:
    total = mlir.number(0.0)
    for x, y in products:
        total = math.fma(x, y, total)
    return total
