"""What T drafts draw on: how each draft's query and key read the past and one another, and the triangular system solved.

See ``verify.py`` for the equations. Queries and keys of the drafts are the N *readers*, columns of every array here. Rows are
the 64 *sources*: the L ring rows, behind them the drafts (their keys, or their values), behind those with the delta rule what
the state answers to the drafts' keys. Decays are products of the tokens' own gates, all at most 1.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.records import Ring
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    SQUARE,
    STATE,
    VALUES,
    Array,
    Geometry,
    Ref,
    along,
    barrier,
    channels_layout,
    column,
    eight_rows_layout,
    f32,
    iota,
    load,
    records_layout,
    split,
)

SOURCES = 64


class Scalars(NamedTuple):
    """What each draft of one value head has of numbers, in registers."""

    log_decay: list[Array] | None  # with a head gate
    beta: list[Array]
    q_scale: list[Array]
    k_scale: list[Array]


def first_key(geometry: Geometry) -> int:
    """The reader that is the first draft's key: right behind the queries, where a copy to shared memory may begin."""
    g = geometry
    return g.tokens + (g.tokens * g.key_dim * jnp.dtype(g.record_dtype).itemsize % 128 > 0)


def count(geometry: Geometry) -> int:
    """N, readers filled up to a multiple of 8."""
    g = geometry
    used = first_key(g) + g.tokens if g.delta_rule else g.tokens
    return -(-used // 8) * 8


def rows(geometry: Geometry) -> int:
    """Rows of the shared memory that holds the drafts' queries and keys, filled up to a multiple of 16."""
    return -(-(first_key(geometry) + geometry.tokens) // 16) * 16


def draft_of(reader: Array, geometry: Geometry) -> Array:
    return jnp.where(reader < first_key(geometry), reader, reader - first_key(geometry))


def multiply(readers: Ref, gates: Ref | None, ring: Ring, length: Array, products: Ref, geometry: Geometry) -> None:
    """Products of the drafts' and the records' keys with all readers, with a channel gate decayed in between.

    Args:
        readers: queries and keys. [16 n, K] record dtype
        gates: the drafts' log decays of a channel gate, else None. [T, K] float32
        ring: the records.
        length: drafts of this row.
        products: result; only rows of committed records and of this row's drafts are written. [64, 16 n] float32
        geometry: sizes of the call.
    """
    g, layout, by_row = geometry, records_layout(geometry.key_dim), SQUARE.reduce(1)
    everyone = pl.ds(0, readers.shape[0])

    def against(key: Ref, x: Array, source: Array) -> None:
        key_values = load(key, layout.reduce(0)).astype(f32)
        products[source, everyone] = plgpu.layout_cast(jnp.sum(x * along(key_values, x.shape, 1), axis=1), by_row)

    def draft(i: Array, x: Array) -> Array:
        j = length - 1 - i
        against(readers.at[first_key(g) + j], x, g.window + j)
        if gates is None:
            return x
        gate = jnp.exp(load(gates.at[j], layout.reduce(0)))
        return jnp.where(draft_of(iota(x.shape, 0, layout), g) >= j, x * along(gate, x.shape, 1), x)

    def record(j: Array, x: Array) -> Array:
        row = ring.row(j)
        against(ring.decayed.at[row], x, row)
        return x

    x = lax.fori_loop(0, length, draft, load(readers, layout).astype(f32))
    lax.fori_loop(0, ring.count, record, x)


def solve(
    ring: Ring,
    products: Ref,
    left: Ref | None,
    total: Any,
    scalars: Scalars,
    length: Array,
    scratch: dict[str, Ref],
    g: Geometry,
) -> None:
    """Weights with which outputs, and with the delta rule updates times their key's scale, draw on the sources.

    Args:
        ring: the records that the drafts see.
        products: from ``multiply``.
        left: with a head gate what is left of each record before the first draft, by source. [64] float32
        total: what is left of the checkpoint before the first draft; 1.0 with a channel gate, whose readers say it.
        scalars: the drafts' numbers.
        length: drafts of this row; what lies behind them may be anything and gets no weight.
        scratch: "weights" [64, N] gets the weights, "of_state" [64] what an answer takes of the state's answer to the same
            reader; "between" [16, N] and "numbers" [3, 64] are overwritten.
        g: sizes of the call.
    """
    n, first = count(g), first_key(g)
    every, shape = pl.ds(0, n), (SOURCES, n)
    reader = iota((n,), 0, COLUMNS)
    token, is_query = draft_of(reader, g), reader < first
    scale, beta, k_scale = _by_reader(scalars, scratch["numbers"], g)

    # Downwards, so that what lies between draft j and a reader's draft grows by one gate at a time.
    elapsed = plgpu.layout_cast(jnp.ones((n,), f32), COLUMNS)
    for j in range(g.tokens - 1, -1, -1):
        seen = ((token > j) | ((token == j) & is_query)) & (token < length)
        weight = load(products.at[g.window + j, every], COLUMNS) * (elapsed * scale) * scalars.k_scale[j]
        scratch["between"][j] = jnp.where(seen, weight, 0.0)
        if scalars.log_decay is not None:
            elapsed = jnp.where(token >= j, elapsed * jnp.exp(scalars.log_decay[j]), elapsed)
    of_state = elapsed * scale * total
    scratch["of_state"][every] = of_state
    barrier()

    source, column_token = iota(shape, 0, STATE), draft_of(iota(shape, 1, STATE), g)
    by_source = iota((SOURCES,), 0, VALUES)
    recorded = (by_source < g.window) & (((by_source - ring.start) & (g.window - 1)) < ring.count)
    weights = load(products, STATE)[:, :n] * along(elapsed * scale, shape, 1)
    weights = weights if left is None else weights * along(load(left, VALUES), shape, 0)
    weights = jnp.where(along(recorded, shape, 0), weights, 0.0)
    if g.delta_rule:
        is_key, own = iota(shape, 1, STATE) >= first, g.window + column_token
        weights = jnp.where(is_key & (source == own), along(beta, shape, 1), weights)
        weights = jnp.where(is_key & (source == own + g.tokens), along(of_state, shape, 1), weights)
    weights = jnp.where(column_token < length, weights, 0.0)
    for j in range(g.tokens):
        if g.delta_rule:
            update = column(weights, first + j)
        else:
            update = jnp.where(by_source == g.window + j, jnp.where(j < length, scalars.beta[j], 0.0), 0.0)
        weights = weights + along(update, shape, 0) * along(load(scratch["between"].at[j], COLUMNS), shape, 1)
    scratch["weights"][...] = weights * along(k_scale, shape, 1) if g.delta_rule else weights


def _by_reader(scalars: Scalars, numbers: Ref, g: Geometry) -> tuple[Array, Array, Array]:
    """Of each reader: the factor of its products, beta (of keys), and its key's scale (1 of queries). [N] float32 each"""
    first, every = first_key(g), pl.ds(0, count(g))
    for i, (beta, q_scale, k_scale) in enumerate(zip(scalars.beta, scalars.q_scale, scalars.k_scale, strict=True)):
        numbers[0, i] = q_scale
        if g.delta_rule:
            numbers[0, first + i] = -beta * k_scale
            numbers[1, first + i] = beta
            numbers[2, i] = jnp.float32(1)
            numbers[2, first + i] = k_scale
    barrier()
    scale, beta, k_scale = (load(numbers.at[row, every], COLUMNS) for row in range(3))
    return scale, beta, k_scale


def store_planes(
    readers: Ref, gate: Array | None, gates: Ref | None, stage: Ref | None, planes: list[Ref], g: Geometry
) -> None:
    """Puts the readers where the tensor cores read them: as sums of bfloat16 planes.

    Args:
        readers: queries and keys. [16 n, K] record dtype
        gate: with a channel gate what is left of the checkpoint before the first draft; it goes into the readers. [K] float32
        gates: the drafts' log decays of a channel gate. [T, K] float32
        stage: scratch of a channel gate. [8, K] float32
        planes: one where bfloat16 holds the readers exactly, else two. [N, K] bfloat16 each
        g: sizes of the call.
    """
    layout, channels, first = eight_rows_layout(g.key_dim), channels_layout(g.key_dim), first_key(g)
    decays: list[Array] = []
    for i in range(g.tokens if gate is not None else 0):
        gate = gate * jnp.exp(load(gates.at[i], channels))
        decays.append(gate)
    for row in range(0, count(g), 8):
        eight = pl.ds(row, 8)
        if decays:
            for i in range(row, row + 8):
                draft = i if i < first else i - first
                if draft < g.tokens and (i < first or g.delta_rule):
                    stage[i - row] = load(readers.at[i], channels).astype(f32) * decays[draft]
            barrier()
        x = load(stage if decays else readers.at[eight], layout)
        for plane, terms in zip(planes, [x] if len(planes) == 1 else split(x.astype(f32)), strict=True):
            plane[eight] = terms
        barrier()
    plgpu.commit_smem()  # the tensor cores read the planes
