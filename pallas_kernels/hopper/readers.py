"""What T drafts draw on: how each draft's query and key read the past and one another, and the triangular system solved.

See ``verify.py`` for the equations. Queries and keys of the drafts are the N *readers*, columns of every array here. Rows are
the S *sources*: the L ring rows, and behind them the drafts in 16 more, with the delta rule where their keys are among the last
16 readers. Decays are products of the tokens' own gates, all at most 1.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.records import Ring
from pallas_kernels.hopper.repeated import first_rows, repeated
from pallas_kernels.hopper.stream import DECAYS, WEIGHTS, Stream
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    DRAFTS_BY_READERS,
    STATE,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Ref,
    along,
    barrier,
    bf16,
    channels_layout,
    column,
    eight_rows_layout,
    f32,
    iota,
    load,
    records_layout,
    split_in,
    store,
)

DRAFTS = 16  # the most drafts of a call: rows of the sources that hold them, columns of the readers that hold their keys


# Rows of the scratch "numbers" [8, 64] behind the ring's own. Of each reader: the factor of its products; beta (of keys, or
# without the delta rule of drafts); its key's scale (1 of queries); its token's gate. Then what is left of each record, as
# often as the sources are repeated, and what is taken of the state's answer to each reader. What is left of the checkpoint
# lies behind the ring's log decays; behind the ring's weights what is left, at each reader, of what there was before the
# drafts, its scale included.
SCALE, BETA, K_SCALE, GATE, LEFT, OF_STATE = range(2, 8)
TOTAL = (DECAYS, 32)
PAST = (WEIGHTS, 32)


def first_key(geometry: Geometry) -> int:
    """The reader that is the first draft's key: right behind the queries, where a copy to shared memory may begin.

    All keys are among the last 16 readers.
    """
    g = geometry
    if g.tokens > 12:
        return DRAFTS
    return g.tokens + (g.tokens * g.key_dim * jnp.dtype(g.record_dtype).itemsize % 128 > 0)


def count(geometry: Geometry) -> int:
    """N, readers filled up to a multiple of 8, with the delta rule to 16 at least."""
    g = geometry
    return max(DRAFTS, -(-(first_key(g) + g.tokens) // 8) * 8) if g.delta_rule else -(-g.tokens // 8) * 8


def num_sources(geometry: Geometry) -> int:
    """S, sources filled up to what the tensor cores' 64 rows repeat."""
    return 32 if geometry.window + DRAFTS <= 32 else TILE_ROWS


def first_draft(geometry: Geometry) -> int:
    """The first draft among the 16 that are sources, columns of a tile's values."""
    return first_key(geometry) - (count(geometry) - DRAFTS) if geometry.delta_rule else 0


def terms(geometry: Geometry) -> int:
    """bfloat16 terms of which the readers are the sum: one where it holds them exactly."""
    return 1 if geometry.record_dtype == bf16 and not geometry.channel_gate else geometry.terms


def first_row(geometry: Geometry) -> int:
    """The first of 16 readers among which all keys are, as rows of products."""
    return 0 if first_key(geometry) + geometry.tokens <= DRAFTS else first_key(geometry)


def draft_of(reader: Array, geometry: Geometry) -> Array:
    return jnp.where(reader < first_key(geometry), reader, reader - first_key(geometry))


def multiply_channels(readers: Ref, gates: Ref, length: Array, products: Ref, geometry: Geometry) -> None:
    """Products of the drafts' keys with all readers under a channel gate, decayed in between.

    Under a head gate they are one product of matrices, without decay: ``combine.multiply``.

    Args:
        readers: queries and keys. [2 T or more, K] record dtype
        gates: decays of the drafts. [T, K] float32
        length: drafts of this row.
        products: result in rows from L on. [S, N] float32
        geometry: sizes of the call.
    """
    g, layout, first, shape = geometry, records_layout(geometry.key_dim), first_key(geometry), (DRAFTS, count(geometry))
    keys = load(readers.at[pl.ds(first_row(g), DRAFTS)], layout).astype(f32)
    token, column = iota(keys.shape, 0, layout) + (first_row(g) - first), iota(shape, 1, DRAFTS_BY_READERS)

    def draft(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        keys, results = carry
        gate = load(gates.at[i], layout.reduce(0))
        keys = jnp.where(token < i, keys * along(gate, keys.shape, 1), keys)
        for reader in (i, first + i)[: g.readers]:
            x = load(readers.at[reader], layout.reduce(0)).astype(f32)
            dots = plgpu.layout_cast(jnp.sum(keys * along(x, keys.shape, 1), axis=1), DRAFTS_BY_READERS.reduce(1))
            results = jnp.where(column == reader, along(dots, shape, 0), results)
        return keys, results

    zeros = plgpu.layout_cast(jnp.zeros(shape, f32), DRAFTS_BY_READERS)
    _, results = lax.fori_loop(0, length, draft, (keys, zeros))
    store(products.at[pl.ds(g.window, DRAFTS)], results)


def solve(
    ring: Ring,
    products: Ref,
    has_left: bool,
    due: Array,
    length: Array,
    scratch: dict[str, Ref],
    geometry: Geometry,
    interpret: Interpret,
) -> None:
    """Weights with which outputs, and with the delta rule updates times their key's scale, draw on the sources.

    These are the records' updates, and of each draft its value, or with the delta rule what its update would be without the
    records and the other drafts.

    Args:
        ring: the records that the drafts see.
        products: of the records' keys, and behind them the readers or 16 of them that have all keys, with the readers.
            [S, N] float32
        has_left: whether decays of the past are in "numbers" (head gate) or in products and readers (channel gate).
        due: whether the records have been folded, so that nothing is left to decay but the drafts.
        length: drafts of this row; what lies behind them may be anything.
        scratch: "numbers" [8, 64], filled by ``store_numbers`` but for OF_STATE; "weights" [2 N or 3 N, S] get the weights, as
            the sum of bfloat16, one below the other; "between" [16, N] is overwritten.
        geometry: sizes of the call.
        interpret: parameters of interpret mode.
    """
    g, n, first, rows = geometry, count(geometry), first_key(geometry), num_sources(geometry)
    shape, numbers, between = (TILE_ROWS, n), scratch["numbers"], scratch["between"]
    remains = jnp.where(due, 1.0, numbers[TOTAL]) if has_left else 1.0
    _read_past(numbers, has_left, remains, g)
    _read_drafts(products, has_left, length, numbers, between, g)
    barrier()
    past = load(numbers.at[PAST[0], pl.ds(PAST[1], n)], COLUMNS)

    column_token = draft_of(iota(shape, 1, STATE), g)
    by_source = iota((TILE_ROWS,), 0, VALUES) & (rows - 1)
    recorded = (by_source < g.window) & (((by_source - ring.start) & (g.window - 1)) < ring.count)
    weights = repeated(products, interpret) * along(past, shape, 1)
    if has_left:
        weights = weights * along(load(numbers.at[LEFT], VALUES), shape, 0)
    weights = jnp.where(along(recorded, shape, 0), weights, 0.0)
    if g.delta_rule:
        source, reader = iota(shape, 0, STATE) & (rows - 1), iota(shape, 1, STATE)
        own = (reader >= first) & (source == reader + (g.window - (n - DRAFTS)))
        weights = jnp.where(own, 1.0, weights)

    weights = jnp.where(column_token < length, weights, 0.0)
    for j in range(g.tokens):
        if g.delta_rule:
            update = column(weights, first + j)
        else:
            update = jnp.where(by_source == g.window + j, jnp.where(j < length, numbers[BETA, j], 0.0), 0.0)
        weights = weights + along(update, shape, 0) * along(load(between.at[first - first_row(g) + j], COLUMNS), shape, 1)
    if g.delta_rule:
        weights = weights * along(load(numbers.at[K_SCALE, pl.ds(0, n)], COLUMNS), shape, 1)
    for i, term in enumerate(split_in(weights, g.terms, nearest=True)):
        store(scratch["weights"].at[pl.ds(i * n, n)].T, first_rows(term, rows, interpret))


def _read_past(numbers: Ref, has_left: bool, remains: Array | float, geometry: Geometry) -> None:
    """Fills in PAST and OF_STATE."""
    g, layout, n = geometry, DRAFTS_BY_READERS.reduce(0), count(geometry)
    past = load(numbers.at[SCALE, pl.ds(0, n)], layout)
    if has_left:
        reader = iota((n,), 0, layout)  # not elsewhere: layout inference fails on one that nobody uses
        for j in range(g.tokens):
            past = jnp.where(draft_of(reader, g) >= j, past * numbers[GATE, j], past)
    store(numbers.at[PAST[0], pl.ds(PAST[1], n)], past)
    store(numbers.at[OF_STATE, pl.ds(0, n)], past * remains)


def _read_drafts(products: Ref, has_left: bool, length: Array, numbers: Ref, between: Ref, geometry: Geometry) -> None:
    """Weights with which readers draw on the updates of the drafts before them, and queries on their own draft's.

    By the drafts' keys, of 16 readers from ``first_row`` on. What lies past the length may be NaN and is selected away.
    """
    g, n, shape, layout = geometry, count(geometry), (DRAFTS, count(geometry)), DRAFTS_BY_READERS
    j, reader = iota(shape, 0, layout) - (first_key(g) - first_row(g)), iota(shape, 1, layout)
    token = draft_of(reader, g)
    weights = load(products.at[pl.ds(g.window + (0 if g.channel_gate else first_row(g)), DRAFTS)], layout)
    if has_left:
        for i in range(1, g.tokens):
            weights = jnp.where((j < i) & (i <= token), weights * numbers[GATE, i], weights)
    seen = ((token > j) | ((token == j) & (reader < first_key(g)))) & (token < length)
    scale = load(numbers.at[SCALE, pl.ds(0, n)], layout.reduce(0))
    k_scale = load(numbers.at[K_SCALE, pl.ds(first_row(g), DRAFTS)], layout.reduce(1))
    store(between, jnp.where(seen, weights * along(scale, shape, 1) * along(k_scale, shape, 0), 0.0))


def store_numbers(stream: Stream, h: Array) -> None:
    """Loads what each draft of a value head has of numbers, all of them at once, and sorts it by reader."""
    g, numbers, first = stream.g, stream.scratch["numbers"], first_key(stream.g)
    drafts = range(g.tokens)
    beta = [stream.beta(i, h) for i in drafts]
    q_scale, k_scale = [stream.q_scale(i) for i in drafts], [stream.k_scale(i) for i in drafts]
    gate = [] if g.channel_gate else [jnp.exp(stream.log_decay(i, h)) for i in drafts]
    for i in drafts:
        numbers[SCALE, i] = q_scale[i]
        numbers[K_SCALE, first + i] = k_scale[i]
        if gate:
            numbers[GATE, i] = gate[i]
        if g.delta_rule:
            numbers[SCALE, first + i] = -beta[i] * k_scale[i]
            numbers[BETA, first + i] = beta[i]
            numbers[K_SCALE, i] = jnp.float32(1)
        else:
            numbers[BETA, i] = beta[i]


def store_planes(readers: Ref, gates: Ref | None, stage: Ref | None, planes: Ref, g: Geometry) -> None:
    """Puts the readers where the tensor cores read them: as sums of bfloat16 planes.

    Args:
        readers: queries and keys. [N or more, K] record dtype
        gates: decays of the drafts of a channel gate, which go into the readers, else None. [T, K] float32
        stage: scratch of a channel gate, else None. [8, K] float32
        planes: ``terms`` of them, one behind the other. [N terms or more, K] bfloat16
        g: sizes of the call.
    """
    layout, channels, first = eight_rows_layout(g.key_dim), channels_layout(g.key_dim), first_key(g)
    decays: list[Array] = []
    if gates is not None:
        for i in range(g.tokens):
            gate = load(gates.at[i], channels)
            decays.append(decays[-1] * gate if decays else gate)
    for row in range(0, count(g), 8):
        eight = pl.ds(row, 8)
        if stage is not None:
            for i in range(row, row + 8):
                draft = i if i < first else i - first
                x = load(readers.at[i], channels).astype(f32)
                store(stage.at[i - row], x * decays[draft] if draft < g.tokens else x)
            barrier()
        x = load(readers.at[eight] if stage is None else stage, layout)
        for i, term in enumerate([x] if terms(g) == 1 else split_in(x.astype(f32), terms(g), nearest=True)):
            store(planes.at[pl.ds(row + i * count(g), 8)], term)
        barrier()
    plgpu.commit_smem()  # the tensor cores read the planes
