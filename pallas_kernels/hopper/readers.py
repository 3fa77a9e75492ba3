"""What T drafts draw on: how each draft's query and key read the past and one another, and the triangular system solved.

See ``verify.py`` for the equations. Decays are products of the tokens' own gates, all at most 1. Sources, [64], are the L ring
rows, behind them the drafts' values, behind those with the delta rule the answers of the state to the drafts' keys.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.records import Ring
from pallas_kernels.hopper.tiles import (
    SQUARE,
    STATE,
    VALUES,
    Array,
    Geometry,
    Ref,
    along,
    barrier,
    channels_layout,
    eight_rows_layout,
    f32,
    iota,
    load,
    records_layout,
    split,
)

SOURCES = 64
DRAFT_ROWS = 16  # what the layout of the keys makes of up to 16 drafts


class Drafts(NamedTuple):
    """The drafts of one row in shared memory. What lies past its length is never used for what lies before."""

    queries: Ref  # [T, K] record dtype
    keys: Ref  # [16, K] record dtype
    gates: Ref | None  # [T, K] float32, log decays of a channel gate


class Scalars(NamedTuple):
    """What each draft of one value head has of numbers, in registers."""

    log_decay: list[Array] | None  # with a head gate
    beta: list[Array]
    q_scale: list[Array]
    k_scale: list[Array]


def columns(geometry: Geometry) -> int:
    """Columns of the drafts' answers, filled up to a multiple of 8: of the queries, then with the delta rule of the keys."""
    return -(-geometry.readers * geometry.tokens // 8) * 8


def multiply(drafts: Drafts, ring_keys: Ref, products: Ref, length: Array, geometry: Geometry) -> None:
    """Products of queries and keys with the records' and the drafts' keys, with a channel gate decayed in between.

    Args:
        drafts: the drafts.
        ring_keys: keys of the records by ring row, with a channel gate decayed up to the first draft. [L, K]
        products: result, one row per reader and draft over the sources. [P, T, 64] float32
        length: drafts of this row.
        geometry: sizes of the call.
    """
    g, layout, by_row = geometry, records_layout(geometry.key_dim), SQUARE.reduce(1)
    ring, own = load(ring_keys, layout).astype(f32), load(drafts.keys, layout).astype(f32)
    row = iota(own.shape, 0, layout)

    def one(i: Array, keys: tuple[Array, Array]) -> tuple[Array, Array]:
        ring, own = keys
        if g.channel_gate:
            gate = jnp.exp(load(drafts.gates.at[i], layout.reduce(0)))
            ring = ring * along(gate, ring.shape, 1)
            own = jnp.where(row < i, own * along(gate, own.shape, 1), own)
        for reader, source in enumerate((drafts.queries, drafts.keys)[: g.readers]):
            x = load(source.at[i], layout.reduce(0)).astype(f32)
            for first, key in ((0, ring), (g.window, own)):
                dots = plgpu.layout_cast(jnp.sum(key * along(x, key.shape, 1), axis=1), by_row)
                products[reader, i, pl.ds(first, key.shape[0])] = dots
        return ring, own

    lax.fori_loop(0, length, one, (ring, own))


def solve(
    ring: Ring, products: Ref, left: Ref | None, total: Array | None, scalars: Scalars, geometry: Geometry
) -> tuple[list[Array], list[Array]]:
    """Weights with which outputs, and with the delta rule updates times their key's scale, draw on the sources.

    Args:
        ring: the records that the drafts see.
        products: from ``multiply``.
        left: with a head gate what is left of each record before the first draft, by source. [64] float32
        total: with a head gate what is left of the checkpoint before the first draft; a channel gate's is in the readers.
        scalars: the drafts' numbers.
        geometry: sizes of the call.

    Returns:
        The weights, one [64] an answer, and what an output takes of its query's own answer by the state, a scalar each.
    """
    g = geometry
    source = iota((SOURCES,), 0, VALUES)
    recorded = (source < g.window) & (((source - ring.start) & (g.window - 1)) < ring.count)
    remains = None if left is None else load(left, VALUES)
    since: list[Any] = []  # decay from each earlier draft up to this one; a channel gate's is in the products
    elapsed: Any = 1.0
    updates: list[Array] = []
    outputs: list[Array] = []
    own: list[Array] = []

    for i in range(g.tokens):
        beta, q_scale, k_scale = scalars.beta[i], scalars.q_scale[i], scalars.k_scale[i]
        if scalars.log_decay is not None:
            gate = jnp.exp(scalars.log_decay[i])
            since, elapsed, total = [s * gate for s in since], elapsed * gate, total * gate
        since.append(1.0)
        of_state = 1.0 if total is None else total

        def of_records(reader: int, scale: Array, i: int = i, elapsed: Any = elapsed) -> Array:
            weights = load(products.at[reader, i], VALUES) * scale
            return jnp.where(recorded, weights if remains is None else weights * (remains * elapsed), 0.0)

        update = jnp.where(source == g.window + i, beta, 0.0)
        if g.delta_rule:
            update = update - of_records(1, k_scale * beta)
            update = jnp.where(source == g.window + g.tokens + i, -(of_state * k_scale * beta), update)
            for j in range(i):
                update = update - updates[j] * (since[j] * products[1, i, g.window + j] * (k_scale * beta * scalars.k_scale[j]))
        updates.append(update)

        output = of_records(0, q_scale)
        for j in range(i + 1):
            output = output + updates[j] * (since[j] * products[0, i, g.window + j] * (q_scale * scalars.k_scale[j]))
        outputs.append(output)
        own.append(of_state * q_scale)

    recorded_updates = [u * s for u, s in zip(updates, scalars.k_scale, strict=True)] if g.delta_rule else []
    return outputs + recorded_updates, own


def store_weights(weights: list[Array], target: Ref) -> None:
    """Weights of up to N answers over the sources as the columns of ``target`` [64, N] float32."""
    shape = (SOURCES, 8)
    column = iota(shape, 1, STATE)
    for first in range(0, len(weights), 8):
        eight = plgpu.layout_cast(jnp.zeros(shape, f32), STATE)
        for i, weight in enumerate(weights[first : first + 8]):
            eight = jnp.where(column == i, along(weight, shape, 0), eight)
        target[:, pl.ds(first, 8)] = eight


def store_readers(drafts: Drafts, gate: Array | None, stage: Ref, planes: list[Ref], geometry: Geometry) -> None:
    """Puts queries, and with the delta rule keys, where the tensor cores read them: as sums of bfloat16 planes.

    Args:
        drafts: the drafts.
        gate: with a channel gate what is left of the checkpoint before the first draft; it goes into the readers. [K] float32
        stage: scratch. [8, K] float32
        planes: one where bfloat16 holds the readers exactly, else two. [N, K] bfloat16 each
        geometry: sizes of the call.
    """
    g, channels, layout = geometry, channels_layout(geometry.key_dim), eight_rows_layout(geometry.key_dim)
    readers: list[list[Array]] = [[] for _ in range(g.readers)]
    for i in range(g.tokens):
        if gate is not None:
            gate = gate * jnp.exp(load(drafts.gates.at[i], channels))
        for rows, source in zip(readers, (drafts.queries, drafts.keys), strict=False):
            x = load(source.at[i], channels).astype(f32)
            rows.append(x if gate is None else x * gate)
    every = [x for rows in readers for x in rows]
    for first in range(0, len(every), 8):
        for i, x in enumerate(every[first : first + 8]):
            stage[i] = x
        barrier()
        for plane, terms in zip(planes, split(load(stage, layout)), strict=False):
            plane[pl.ds(first, 8)] = terms
        barrier()
    plgpu.commit_smem()  # the tensor cores read the planes
