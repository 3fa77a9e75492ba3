"""Arrays of 16 or 32 rows as the tensor cores multiply them: repeated until they fill a warpgroup's 64."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_kernels.hopper.tiles import STATE, TILE_ROWS, Array, Interpret, Ref, load


def _repeated_layout(rows: int) -> Any:
    """[rows, 8 n], in every warp or in every other one as ``STATE`` has 16 rows."""
    warps: tuple[Any, ...] = (plgpu.Replicated(4),) if rows == 16 else (plgpu.Replicated(2), -7)
    tiling = plgpu.Tiling(((rows, 8), *(((16, 8),) if rows > 16 else ()), (8, 8), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-3, -2), vector_dim=-1)


def repeated(rows: Ref, interpret: Interpret) -> Array:
    """Rows of shared memory over and over. [L, n] -> [64, n]"""
    if rows.shape[0] == TILE_ROWS:
        return load(rows, STATE)
    shape, layout = (TILE_ROWS, rows.shape[1]), _repeated_layout(rows.shape[0])
    if interpret is not None:
        return jnp.tile(rows[...], (TILE_ROWS // rows.shape[0], 1))
    return _renamed(load(rows, layout), layout, STATE, shape)


def first_rows(x: Array, rows: int, interpret: Interpret) -> Array:
    """The first rows of an array [64, n] that repeats them."""
    if rows == TILE_ROWS:
        return x
    if interpret is not None:
        return x[:rows]
    return _renamed(x, STATE, _repeated_layout(rows), (rows, x.shape[1]))


def _renamed(x: Array, layout: Any, target: Any, shape: tuple[int, int]) -> Array:
    """The same registers as another array."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, x.dtype, layout=target))
    def rename(context: Any, x: Any) -> Any:
        registers = x.registers.reshape(target.to_mgpu().registers_shape(shape))
        return fragmented_array.FragmentedArray(_registers=registers, _layout=target.to_mgpu(), _is_signed=None)

    return rename(x)
