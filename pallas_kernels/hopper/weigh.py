"""What records and tokens add to a tile's answers: their values by the weights that ``back.take_back`` has found."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import records, warps
from pallas_kernels.hopper.compiler import opaque
from pallas_kernels.hopper.cut import columns_of
from pallas_kernels.hopper.place import Place
from pallas_kernels.hopper.readers import DRAFTS
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    MMA_LEFT,
    MMA_RIGHT,
    VALUES,
    Array,
    Ref,
    along,
    bf16,
    f32,
    iota,
    keep_bits,
    load,
    mask_of,
    split,
)


def weights_of(place: Place, head: Any) -> tuple[Array, Array] | None:
    """Weights of records and tokens for all columns as the sum of two terms, where the tensor cores take their values.

    Of a head, or of all of them with T = 1. Dead records and tokens that a query does not see have 0. [L or L + 16, N]
    """
    g = place.g
    if g.record_dtype != bf16:
        return None
    count = g.window + (DRAFTS if g.tokens > 1 else 0)
    source, columns = iota((count,), 0, MMA_RIGHT.reduce(1)), columns_of(g)
    live = ((source - place.ring.start) & (g.window - 1)) < place.ring.count
    first_seen = jnp.where(live, 0, columns)  # a column sees a record or not, and of tokens those up to its own
    if g.tokens > 1:
        first_seen = jnp.where(source < g.window, first_seen, source - g.window)
    return _weights(place, head, pl.ds(0, count), first_seen)


def weights_of_tokens(place: Place) -> tuple[Array, Array] | None:
    """``weights_of`` tokens alone, of the only head. [16, N]"""
    if place.g.record_dtype != bf16:
        return None
    return _weights(place, 0, pl.ds(place.g.window, DRAFTS), iota((DRAFTS,), 0, MMA_RIGHT.reduce(1)))


def _weights(place: Place, head: Any, sources: Any, first_seen: Array) -> tuple[Array, Array]:
    """Weights of sources, each for the columns from ``first_seen`` on."""
    shape = (sources.size, columns_of(place.g))
    weights = load(place.s["trace"].at[head, :, sources].T, MMA_RIGHT)
    seen = along(first_seen, shape, 0) <= along(iota(shape[1:], 0, MMA_RIGHT.reduce(0)), shape, 1)
    return split(jnp.where(seen, weights, 0.0), nearest=True)


def live_records(place: Place, updates: Ref) -> list[Array]:
    """Values of records [64, 16] each, dead ones zero."""
    rows = range(0, place.g.window, DRAFTS)
    return [_live(place, updates, pl.ds(first, DRAFTS), place.ring.start - first, place.ring.count) for first in rows]


def live_tokens(place: Place, values: Ref) -> Array:
    """Values of tokens [64, 16], those past the row's length zero."""
    return _live(place, values, pl.ds(0, DRAFTS), jnp.int32(0), place.length)


def _live(place: Place, values: Ref, rows: Any, start: Array, count: Array) -> Array:
    """[64, 16] of rows [16, 64], zero where they are not among the ``count`` from ``start`` on in a ring."""
    layout = MMA_LEFT.reduce(0)
    mask = mask_of(((iota((DRAFTS,), 0, layout) - start) & (place.g.window - 1)) < count)
    mask = mask if place.interpret is not None else opaque(mask, layout)
    return keep_bits(load(values.at[rows].T, MMA_LEFT), mask, 1)


def add_sources(place: Place, total: Array, sources: list[Array], weights: tuple[Array, Array]) -> Array:
    """total [64, N] and what sources add to all columns."""
    for i, source in enumerate(sources):
        for term in weights:
            of_source = term[i * DRAFTS : (i + 1) * DRAFTS]
            total = records.add_product(total, source, of_source, place.interpret)
    return total


def add_records(place: Place, answer: Array, updates: Ref, head: Array) -> Array:
    """Adds what the records are to one query. [64]"""

    def one(j: Array, answer: Array) -> Array:
        row = place.ring.row(j)
        return answer + load(updates.at[row], VALUES).astype(f32) * place.s["trace"][0, head, row]

    return lax.fori_loop(0, place.ring.count, one, answer)


def add_one_by_one(place: Place, answers: Array, updates: Ref, values: Ref, head: Array) -> Array:
    """Adds what records and tokens are to all queries, where the tensor cores do not take them. [64, N]"""

    def record(j: Array, answers: Array) -> Array:
        row = place.ring.row(j)
        return _add_one(answers, load(updates.at[row], VALUES), _weights_of_source(place, head, row))

    return add_tokens_one_by_one(place, lax.fori_loop(0, place.ring.count, record, answers), values, head)


def add_tokens_one_by_one(place: Place, answers: Array, values: Ref, head: Any) -> Array:
    """``add_one_by_one`` of tokens alone."""

    def token(i: Array, answers: Array) -> Array:
        weights = _weights_of_source(place, head, place.g.window + i)
        seen = jnp.where(iota(weights.shape, 0, COLUMNS) >= i, weights, 0.0)
        return _add_one(answers, load(values.at[i], VALUES), seen)

    return lax.fori_loop(0, place.length, token, answers)


def _weights_of_source(place: Place, head: Any, source: Array) -> Array:
    return warps.load_columns(place.s["trace"].at[head, :, pl.ds(source, 1)], place.interpret)


def _add_one(answers: Array, value: Array, weights: Array) -> Array:
    return answers + along(value.astype(f32), answers.shape, 0) * along(weights, answers.shape, 1)
