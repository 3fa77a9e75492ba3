"""What the kernels' inline parts are put together from: constants, lanes, elements of vectors, arrays of registers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector


def word_type() -> Any:
    return ir.IntegerType.get_signless(32)


def word(value: int) -> Any:
    """A constant of 32 bits, from -2^31 to 2^32 - 1."""
    return mgpu.c(value - 2**32 if value >= 2**31 else value, word_type())


def number(value: float) -> Any:
    """A float32 constant."""
    return mgpu.c(float(np.float32(value)), ir.F32Type.get())


def position(value: int) -> Any:
    """A constant index."""
    return mgpu.c(value, ir.IndexType.get())


def index(x: Any) -> Any:
    """An integer as an index."""
    return arith.index_cast(ir.IndexType.get(), x)


def lane() -> Any:
    """The thread's place in its warp, 32 bits."""
    return arith.andi(mgpu_utils.thread_idx(), word(31))


def element(x: Any, i: int) -> Any:
    """An element of a vector."""
    return vector.extract(x, dynamic_position=[], static_position=[i])


def array(registers: Sequence[Any], layout: Any, shape: tuple[int, ...], is_signed: bool | None = None) -> Any:
    """A fragmented array of registers in the order of its layout."""
    target, every = layout.to_mgpu(), np.empty(len(registers), dtype=object)
    every[:] = registers
    every = every.reshape(target.registers_shape(shape))
    return fragmented_array.FragmentedArray(_registers=every, _layout=target, _is_signed=is_signed)
