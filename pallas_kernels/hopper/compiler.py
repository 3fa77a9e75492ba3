"""What the compilers are told, and what is kept from them."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper import mlir
from pallas_kernels.hopper.tiles import Array


def recompute_in_loop() -> None:
    """Called in the body of a loop: what does not change in it is computed there anew.

    Otherwise addresses and masks of all layouts are computed before the loop, and keep registers for which a warpgroup less
    fits a multiprocessor.
    """

    def annotate(_: Any) -> None:
        loop: Any = ir.InsertionPoint.current.block.owner
        while loop is not None and loop.name != "scf.for":
            loop = loop.parent
        if loop is None:  # one turn, and no loop
            return
        stay = ir.Attribute.parse("#llvm.loop_annotation<licm = <disable = true>>")
        loop.operation.attributes["loop_annotation"] = stay

    plgpu.inline_mgpu()(annotate)()


def opaque(x: Array, layout: Any) -> Array:
    """A vector of pairs of 16 bits of which the compiler forgets how it was made: it would take masks for conditions."""
    shape = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=shape)
    def same(context: Any, x: Any) -> Any:
        word = mlir.word_type()
        registers = np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            moved = llvm.inline_asm(word, [mgpu_utils.bitcast(register, word)], "mov.b32 $0, $1;", "=r,r")
            registers[at] = mgpu_utils.bitcast(moved, register.type)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return same(x)


def compiler_params(scalar_reductions: bool) -> Any:
    """Barriers are placed by hand, where data crosses threads. No reduction crosses warps, and the default scratch for those
    (2 KB) would cost residency; 16 bytes, padded to 1 KB, are what the lowering of a reduction to a scalar asks for.
    """
    scratch = 16 if scalar_reductions else 0
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=scratch)
