"""Sums of products on the tensor cores."""

from collections.abc import Iterable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.tiles import TILE_ROWS, Array, Interpret, Ref, f32

# An operand of the tensor cores in registers, [64, k], another's plane in shared memory, [N, ...], and its k columns.
Product = tuple[Array, Ref, Any]


def pairs(terms: Iterable[Array], planes: list[Ref], count: int = 3) -> list[tuple[Array, Ref]]:
    """Terms and planes whose product counts where ``count`` terms stand for a float32: all but those of the smaller ones."""
    return [(x, plane) for i, x in enumerate(terms) for j, plane in enumerate(planes) if i + j < count]


def sum_products(products: Iterable[list[Product]], n: int, interpret: Interpret) -> Array:
    """The sum of all x @ plane[:, columns]^T, [64, n] float32, list after list.

    The first operand is in registers, which interpret mode knows from shared memory only.
    """
    if interpret is not None:
        pairs = [(x, plane[:, columns]) for some in products for x, plane, columns in some]
        parts = [jnp.dot(x.astype(f32), y.astype(f32).T, precision="highest") for x, y in pairs]
        return sum(parts[1:], parts[0])

    def accumulate(total: Ref) -> Array:
        for some in products:
            for x, plane, columns in some:
                plgpu.wgmma(total, x, plane.at[:, columns].T)
            plgpu.wgmma_wait(1)  # or all first operands would be held in registers
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((TILE_ROWS, n), f32))
