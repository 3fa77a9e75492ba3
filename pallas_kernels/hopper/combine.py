"""What one tile of the state answers to T drafts: products on the tensor cores of tile, records and drafts with their weights.

See ``verify.py`` for the equations, ``readers.py`` for the weights.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper import readers, records
from pallas_kernels.hopper.products import Product, pairs, sum_products
from pallas_kernels.hopper.readers import DRAFTS
from pallas_kernels.hopper.repeated import repeated
from pallas_kernels.hopper.stream import Stream
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    SWIZZLED,
    TILE_ROWS,
    Array,
    Geometry,
    Interpret,
    Ref,
    along,
    bf16,
    f32,
    iota,
    load,
    load_columns,
    split_in,
)


def combine(stream: Stream, reads: Array) -> Array:
    """Outputs and updates of one tile, [64, N]: the weighted sum of what the state answers, the records and the drafts."""
    g, s, n, ring = stream.g, stream.scratch, readers.count(stream.g), stream.present
    of_state = load(s["numbers"].at[readers.OF_STATE, pl.ds(0, n)], COLUMNS)
    reads = reads * along(of_state, reads.shape, 1)
    recorded = records.sources(
        ring.update, s.get("updates_terms"), lambda x: ring.age(x) < ring.count, ring.count, not g.delta_rule
    )
    weights = [s["weights"].at[pl.ds(i * n, n)] for i in range(g.terms)]
    products = []
    for first, terms in ((0, recorded), (g.window, _drafts_sources(stream, reads))):
        for at in range(0, terms[0].shape[1], DRAFTS):
            columns = pl.ds(first + at, DRAFTS)
            pieces = [term[:, at : at + DRAFTS] for term in terms]
            products.append([(x, plane, columns) for x, plane in pairs(pieces, weights, g.terms)])
    is_query = iota((n,), 0, COLUMNS) < readers.first_key(g)
    return jnp.where(along(is_query, reads.shape, 1), reads, 0.0) + sum_products(products, n, stream.call.interpret)


def _drafts_sources(stream: Stream, reads: Array) -> list[Array]:
    """Of each draft its value, or with the delta rule beta_j (v_j - X^k_j), as a sum of bfloat16. [64, 16] each"""
    g, s, length = stream.g, stream.scratch, stream.length
    if not g.delta_rule:
        live = functools.partial(_live_drafts, 0, length)
        return records.sources(s["values"], s.get("values_terms"), live, length, False)
    n, shape = reads.shape[1], (TILE_ROWS, DRAFTS)
    beta = along(load(s["numbers"].at[readers.BETA, pl.ds(n - DRAFTS, DRAFTS)], COLUMNS), shape, 1)
    seen = along(_live_drafts(readers.first_draft(g), length, COLUMNS), shape, 1)
    sources = load_columns(s["values"], stream.call.interpret).astype(f32) * beta + reads[:, n - DRAFTS :]
    return list(split_in(jnp.where(seen, sources, 0.0), g.terms, nearest=True))


def _live_drafts(first: int, length: Array, layout: Any) -> Array:
    """Which of 16 are drafts of the row, the first of them ``first``. [16] bool"""
    draft = iota((DRAFTS,), 0, layout) - first
    return (draft >= 0) & (draft < length)


def multiply(tile: Ref, remains: Ref | None, planes: Ref, g: Geometry, interpret: Interpret) -> Array:
    """A tile of the state, or what remains of each channel [K] of it, or keys that repeat, times the readers, [64, N] float32.

    Both are cut into bfloat16 terms, the product of the smaller ones is left out.
    """

    def terms(columns: Any) -> tuple[Array, ...]:
        state = repeated(tile.at[:, columns], interpret)
        if remains is not None:
            state = state.astype(f32) * along(load(remains.at[columns], COLUMNS), state.shape, 1)
        return (state,) if state.dtype == bf16 else split_in(state.astype(f32), g.terms)

    def products() -> Iterator[list[Product]]:
        for first in range(0, g.key_dim, SWIZZLED):
            columns = pl.ds(first, SWIZZLED)
            yield [(x, plane, columns) for x, plane in pairs(terms(columns), of_readers, g.terms)]

    n = readers.count(g)
    of_readers = [planes.at[pl.ds(i * n, n)] for i in range(readers.terms(g))]
    return sum_products(products(), n, interpret)
