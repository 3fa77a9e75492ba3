"""T drafts per row in one pass over the checkpoint: outputs for all of them, their records appended, a due ring folded first.

The state C, each record u_l and each value v_j enter the answers linearly, so the drafts' triangular system is solved for
weights, once per value head, and not for answers, once per row of the state. With X^q_i = C x^q_i and X^k_i = C x^k_i, what the
checkpoint answers to draft i's query and key, decay included, and w_il, A_ij, P_ij products of keys and queries with the decay
in between,

    u_i = beta_i (v_i - X^k_i - sum_l w^k_il u_l) - sum_{j<i} A_ij u_j
    o_i = X^q_i + sum_l w^q_il u_l + sum_{j<=i} P_ij u_j

is a matrix of weights over the sources (u_l, v_j, X^k_j), which ``readers.solve`` finds. A tile then needs one product with the
drafts' queries and keys, on the tensor cores, and a rank-1 term per source. Without the delta rule u_i = beta_i v_i.

One warpgroup streams the tiles of a few value heads of one key head; the products of keys and queries are formed once for all.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import readers, records
from pallas_kernels.hopper.launch import best_config, launch
from pallas_kernels.hopper.readers import SOURCES
from pallas_kernels.hopper.stream import Stream, StreamConfig
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    Rows,
    Tokens,
    along,
    barrier,
    bf16,
    channels_layout,
    column,
    f32,
    iota,
    load,
    split,
    store,
    swizzled,
)


def verify(
    rows: Rows,
    tokens: Tokens,
    pool: Pool,
    geometry: Geometry,
    config: StreamConfig | None = None,
    interpret: Interpret = None,
) -> Array:
    """Outputs of T drafts per row; the pool is updated in place. The pointer is left to the caller.

    Args:
        rows: slots, lengths (0 to T) and pointers.
        tokens: T drafts, 1 to 16.
        pool: references to the state.
        geometry: sizes of the call.
        config: how to cut it, None for the best known.
        interpret: parameters of interpret mode, None on a GPU.

    Returns:
        [B, T, H, V] v's dtype, zero past each row's length.
    """
    config = config or best_config(geometry)
    return launch("replay_verify", _verify, scratch(geometry), (rows, tokens, pool), geometry, config, False, interpret)


def scratch(g: Geometry) -> dict[str, Any]:
    """Shared memory besides what every stream has."""
    n, rows = readers.count(g), readers.rows(g)
    exact = g.record_dtype == bf16 and not g.channel_gate  # queries and keys need one plane
    buffers = {
        "readers": plgpu.SMEM((rows, g.key_dim), g.record_dtype),
        "between": plgpu.SMEM((16, n), f32),
        "numbers": plgpu.SMEM((8, SOURCES), f32),
        "planes": [plgpu.SMEM((n, g.key_dim), bf16, transforms=swizzled(bf16)) for _ in range(1 if exact else 2)],
        "weights": plgpu.SMEM((SOURCES, n), f32),
        "answers": plgpu.SMEM((n, TILE_ROWS), g.value_dtype),
    }
    if g.channel_gate:
        buffers["stage"] = plgpu.SMEM((8, g.key_dim), f32)
        buffers["by_reader"] = plgpu.SMEM((n, SOURCES), f32)
    else:  # of the records, and behind them of the drafts
        buffers["keys"] = plgpu.SMEM((SOURCES, g.key_dim), g.record_dtype)
        buffers["products"] = plgpu.SMEM((SOURCES, n), f32)
    return buffers


def _verify(stream: Stream) -> None:
    """The kernel's body for a live row."""
    g, s, drafts = stream.g, stream.scratch, pl.ds(0, stream.g.tokens)
    first = readers.first_key(g)
    stream.start(s["readers"].at[drafts], s["readers"].at[pl.ds(first, g.tokens)])
    plgpu.barrier_wait(s["keys_arrived"])
    if not g.channel_gate:
        # Row by row, as no copy could: memory that is only ever read in two dimensions may get tiled, and a copy of a few rows
        # into tiles of eight goes astray.
        for i in range(g.tokens):
            store(s["keys"].at[g.window + i], load(s["readers"].at[first + i], channels_layout(g.key_dim)))
        readers.store_planes(s["readers"], None, None, None, s["planes"], g)
        store(s["products"], _multiply(s["keys"], s["planes"], g, stream.call.interpret))
    stream.each_tile(lambda head: _solve(stream, head), lambda t: _answer(stream, t))
    stream.append_keys(s["readers"], first)


def _solve(stream: Stream, head: Array) -> None:
    """What all tiles of a value head share: decays and weights."""
    g, s, h = stream.g, stream.scratch, stream.first_head + head
    readers.store_numbers(stream.tokens, s["numbers"], stream.b, h, stream.key_head, g)
    plgpu.barrier_wait(s["head_arrived"])
    if g.channel_gate:
        _decay_channels(stream, h)
    else:
        left, total = records.decay_heads(stream.ring)
        ring_rows = pl.ds(0, g.window)
        store(s["numbers"].at[readers.LEFT, ring_rows], left)
        store(s["numbers"].at[readers.TOTAL[0], pl.ds(readers.TOTAL[1], g.window)], total)
    barrier()
    products = s["weights"] if g.channel_gate else s["products"]
    readers.solve(stream.present, products, not g.channel_gate, stream.due, stream.length, s, g)
    barrier()
    stream.append_numbers(h)


def _decay_channels(stream: Stream, h: Array) -> None:
    g, s = stream.g, stream.scratch
    stream.append_gates(h)
    zero = plgpu.layout_cast(jnp.zeros((g.key_dim,), f32), channels_layout(g.key_dim))
    elapsed = records.decay_channels(stream.ring, zero)
    store(s["total"], jnp.exp(elapsed))
    barrier()
    present = stream.present
    readers.multiply_channels(s["readers"], s["gates"], present, stream.length, s["by_reader"], s["weights"], g)
    gate = jnp.exp(lax.cond(stream.due, lambda: zero, lambda: elapsed))
    readers.store_planes(s["readers"], gate, s["gates"], s["stage"], s["planes"], g)


def _answer(stream: Stream, t: Array) -> None:
    """One tile: folds it if due, reads it, stores answers and updates, and asks for the next one."""
    g, s, stored = stream.g, stream.scratch, pl.ds(0, stream.g.tile_rows)
    if g.channel_gate:
        stream.fold_if_due(t, None, s["total"])
    else:
        stream.fold_if_due(t, s["numbers"].at[readers.LEFT], s["numbers"][readers.TOTAL])
    reads = _multiply(s["tile"], s["planes"], g, stream.call.interpret)
    stream.tile_done(t)
    answers = _combine(stream, reads)
    barrier()
    live, first = iota(answers.shape, 1, STATE) < stream.length, readers.first_key(g)
    outputs = jnp.where(live, answers, 0.0)
    if jnp.dtype(g.value_dtype).itemsize == 2:
        store(s["answers"].T, outputs.astype(g.value_dtype))
    else:  # what transposes on its way to shared memory takes 16 bits
        for i in range(g.tokens):
            store(s["answers"].at[i], column(outputs, i))
    if g.delta_rule:
        for i in range(g.tokens):
            store(s["updates"].at[i], column(answers, first + i))
        stream.store(t, lambda i: s["updates"].at[pl.ds(i, 1), stored], None)
    else:
        together = s["values"] if g.tile_rows == TILE_ROWS else None
        stream.store(t, lambda i: s["values"].at[pl.ds(i, 1), stored], together)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    barrier()

    @pl.when(t + 1 < stream.num_tiles)
    def _():
        stream.request_inputs(t + 1)


def _combine(stream: Stream, reads: Array) -> Array:
    """Outputs and updates of one tile, [64, N]: the weighted sum of what the state answers, the records and the values."""
    g, s = stream.g, stream.scratch
    first_value, first_read = g.window, g.window + g.tokens

    def add(answers: Array, source: Array, weights: Ref, counts: Any) -> Array:
        weight = load(weights, COLUMNS) * counts
        return answers + along(source, answers.shape, 0) * along(weight, answers.shape, 1)

    def record(j: Array, counts: Array, answers: Array) -> Array:
        row = stream.ring.row(j)
        return add(answers, load(s["updates"].at[row], VALUES).astype(f32), s["weights"].at[row], counts)

    # What lies past the length may be NaN: it is replaced here, and has no weight.
    is_query, token = iota(reads.shape, 1, STATE) < g.tokens, readers.draft_of(iota(reads.shape, 1, STATE), g)
    reads = jnp.where(token < stream.length, reads, 0.0)
    of_state = load(s["numbers"].at[readers.OF_STATE, pl.ds(0, reads.shape[1])], COLUMNS)
    answers = jnp.where(is_query, reads * along(of_state, reads.shape, 1), 0.0)
    answers = records.visit(stream.present.count, record, answers)
    for j in range(g.tokens):
        value = load(s["values"].at[jnp.minimum(j, stream.length - 1)], VALUES).astype(f32)
        answers = add(answers, value, s["weights"].at[first_value + j], 1.0)
        if g.delta_rule:
            answers = add(answers, column(reads, readers.first_key(g) + j), s["weights"].at[first_read + j], 1.0)
    return answers


def _multiply(tile: Ref, planes: list[Ref], g: Geometry, interpret: Interpret) -> Array:
    """A tile of the state, or the sources' keys, times the readers, [64, N] float32.

    Both are cut into bfloat16 terms, the product of the smaller ones is left out. The tile is the first operand, in registers;
    interpret mode knows that from shared memory only.
    """

    def terms(columns: Any) -> list[tuple[Array, Ref]]:
        state = load(tile.at[:, columns], STATE)
        if state.dtype == bf16:
            return [(state, plane) for plane in planes]
        high, low = split(state.astype(f32))
        return [(high, planes[0]), (low, planes[0]), *((high, plane) for plane in planes[1:])]

    steps = [pl.ds(first, SWIZZLED) for first in range(0, g.key_dim, SWIZZLED)]
    if interpret is not None:
        pairs = [(x, plane[:, columns]) for columns in steps for x, plane in terms(columns)]
        products = [jnp.dot(x.astype(f32), y.astype(f32).T, precision="highest") for x, y in pairs]
        return sum(products[1:], products[0])

    def accumulate(total: Ref) -> Array:
        for columns in steps:
            for x, plane in terms(columns):
                plgpu.wgmma(total, x, plane.at[:, columns].T)
            plgpu.wgmma_wait(1)  # or every column of the tile would be held in registers
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((TILE_ROWS, readers.count(g)), f32))
