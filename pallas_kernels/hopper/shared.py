"""Shared memory of a block: what buffers there are, which of them take the same place, how much they take together."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper.tiles import SWIZZLED, TILE_ROWS, Geometry, bf16, f32


def state_tile(geometry: Geometry) -> Any:
    """Shared memory for one tile of the state."""
    dtype = jnp.dtype(geometry.checkpoint_dtype)
    return plgpu.SMEM((TILE_ROWS, geometry.key_dim), dtype, transforms=swizzled(dtype))


def with_terms(name: str, rows: int, dtype: Any, count: int = 2) -> dict[str, Any]:
    """Shared memory for [rows, 64] and, unless it is of bfloat16, for ``count`` such terms that are its sum, "..._terms"."""
    array, terms = plgpu.SMEM((rows, TILE_ROWS), jnp.dtype(dtype)), [plgpu.SMEM((rows, TILE_ROWS), bf16)] * count
    return {name: array} if dtype == bf16 else {name: array, f"{name}_terms": terms}


def one_of(buffers: dict[str, Any]) -> dict[str, Any]:
    """The same shared memory for several buffers, under names that ``named`` takes apart: the last one written has a value.

    The buffers of a dictionary among them lie one behind the other.
    """
    if len(buffers) == 1:
        return buffers
    groups = {"+".join(x) if isinstance(x, dict) else name: x for name, x in buffers.items()}
    together = (list(x.values()) if isinstance(x, dict) else [x] for x in groups.values())
    return {"|".join(groups): plgpu.RefUnion(*(x if len(x) > 1 else x[0] for x in together))}


def named(scratch: dict[str, Any]) -> dict[str, Any]:
    """Shared memory by name."""
    return {name: ref for names, refs in scratch.items() for name, ref in _pairs(names, refs)}


def _pairs(names: str, refs: Any) -> Iterator[tuple[str, Any]]:
    for mark in "|+":
        if mark in names:
            for some, ref in zip(names.split(mark), refs, strict=True):
                yield from _pairs(some, ref)
            return
    yield names, refs


def kilobytes(scratch: dict[str, Any], reductions: bool) -> int:
    """Shared memory: every buffer is padded to a KB, one more holds barriers and the like, one what reduces to a scalar."""

    def is_buffer(x: Any) -> bool:
        return hasattr(x, "shape") and hasattr(x, "dtype")

    buffers: list[Any] = [x for x in jax.tree.leaves(scratch, is_leaf=is_buffer) if is_buffer(x)]
    return 1 + reductions + sum(-(-math.prod(x.shape) * jnp.dtype(x.dtype).itemsize // 1024) for x in buffers)


def decays(g: Geometry) -> dict[str, Any]:
    """Shared memory for a channel gate: the ring's log decays, and in their place the terms of the decayed keys.

    Three terms are exact. Two (see ``Geometry.terms``) are so to 2**-17, and leave another warpgroup of a verify its room.
    """
    log_decays = plgpu.SMEM((g.window, g.key_dim), f32)
    terms = [plgpu.SMEM((g.window, g.key_dim), bf16, transforms=swizzled(bf16))]
    terms = terms * (g.terms if g.tokens > 1 and g.checkpoint_dtype == f32 else 3)
    # Where every warp does all channels, none may overwrite what another has yet to read.
    return one_of({"decays": log_decays, "decayed": terms}) | ({"since": log_decays} if g.key_dim % 128 else {})


def swizzled(dtype: Any, columns: int = SWIZZLED) -> tuple[Any, Any]:
    """Transforms of an [8 m, 32 n] array in shared memory: what a warp or the tensor cores read without bank conflicts."""
    width = columns * jnp.dtype(dtype).itemsize
    # "abstract" only because their base class has a method without a body
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(width)  # type: ignore[abstract]
