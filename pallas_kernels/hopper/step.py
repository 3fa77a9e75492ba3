"""One token per row: reads the checkpoint once, appends a record, folds a ring whose turn it is.

With alpha the token's gate, D what is left of the checkpoint C when the token comes and w_l what is left of record l,

    h_x = alpha (D C x + sum_l w_l (key_l . x) u_l)          for x = q and, with the delta rule, x = k
    u   = beta (v - h_k)                                      o = h_q + (k . q) u

With a channel gate alpha D and alpha w_l multiply channels: the first goes into x, the second into the keys. Without the delta
rule h_k is left out. All of it in float32 on the CUDA cores: two multiply-adds per element of the state hide behind its read.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import records
from pallas_kernels.hopper.launch import best_config, launch
from pallas_kernels.hopper.stream import Stream, StreamConfig
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    SQUARE,
    STATE,
    TERMS,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Pool,
    Rows,
    Tokens,
    along,
    barrier,
    channels_layout,
    f32,
    load,
    records_layout,
    store,
)

_COLUMNS_AT_ONCE = 64


def step(
    rows: Rows,
    tokens: Tokens,
    pool: Pool,
    geometry: Geometry,
    config: StreamConfig | None = None,
    interpret: Interpret = None,
) -> Array:
    """Outputs of one token per row; the pool is updated in place. The pointer is left to the caller.

    Args:
        rows: slots, lengths (0 or 1) and pointers.
        tokens: T = 1.
        pool: references to the state.
        geometry: sizes of the call.
        config: how to cut it, None for the best known.
        interpret: parameters of interpret mode, None on a GPU.

    Returns:
        [B, 1, H, V] v's dtype, zero for padding.
    """
    config = config or best_config(geometry)
    return launch("replay_step", _step, scratch(geometry), (rows, tokens, pool), geometry, config, True, interpret)


def scratch(g: Geometry) -> dict[str, Any]:
    """Shared memory besides what every stream has."""
    buffers = {
        "keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype),
        "query": plgpu.SMEM((1, g.key_dim), g.record_dtype),
        "key": plgpu.SMEM((1, g.key_dim), g.record_dtype),
        "numbers": plgpu.SMEM((8, 32), f32),
        "values": plgpu.SMEM((1, TILE_ROWS), g.value_dtype),
        "answers": plgpu.SMEM((1, TILE_ROWS), g.value_dtype),
        "record": plgpu.SMEM((1, TILE_ROWS), g.update_dtype),
    }
    return buffers


# Rows of the scratch "numbers" behind the ring's own: what is left of each record; products of the records' keys with the query
# and the key; what each record adds to what those two read; what is left of the checkpoint.
_LEFT, _DOTS, _READS, _TOTAL = 2, 3, 5, 7


class _Numbers(NamedTuple):
    """The token's numbers for one value head."""

    beta: Array
    q_scale: Array
    k_scale: Array
    gate: Any  # alpha of a head gate, None of a channel gate


def _step(stream: Stream) -> None:
    """The kernel's body for a live row."""
    g, s = stream.g, stream.scratch
    stream.start(s["query"], s["key"])
    stream.request_inputs(0, s["values"])
    plgpu.barrier_wait(s["keys_arrived"])
    layout = records_layout(g.key_dim)
    query, key = (load(s[x].at[0], layout.reduce(0)).astype(f32) for x in ("query", "key"))
    product = jnp.sum(query * key)
    if not g.channel_gate:
        _multiply_records(stream)
        barrier()
    stream.each_tile(lambda head: _solve(stream, head), lambda t: _answer(stream, t, product))
    stream.append_keys(stream.load_keys(s["key"]))


def _multiply_records(stream: Stream) -> None:
    """Products of query and key with the keys of the records, whatever lies in dead rows."""
    g, s, layout = stream.g, stream.scratch, TERMS if stream.g.channel_gate else records_layout(stream.g.key_dim)

    @pl.when(stream.present.count > 0)
    def _():
        keys = sum(load(x, layout).astype(f32) for x in stream.ring.decayed)
        for i, name in enumerate(("query", "key")[: g.readers]):
            x = load(s[name].at[0], layout.reduce(0)).astype(f32)
            dots = jnp.sum(keys * along(x, keys.shape, 1), axis=1)
            store(s["numbers"].at[_DOTS + i, pl.ds(0, g.window)], dots)


def _solve(stream: Stream, head: Array) -> None:
    """What all tiles of a value head share: what time has left of the past."""
    g, s, h, by_row = stream.g, stream.scratch, stream.first_head + head, SQUARE.reduce(1)
    factors, rows = s["numbers"], pl.ds(0, g.window)
    plgpu.barrier_wait(s["head_arrived"])
    if g.channel_gate:
        _decay_channels(stream, h)
        barrier()
        _multiply_records(stream)
        left: Any = 1.0
        alpha: Any = 1.0
    else:
        left, total = records.decay_heads(stream.ring)
        alpha = jnp.exp(stream.log_decay(0, h))
        store(factors.at[_LEFT, rows], left)
        store(factors.at[_TOTAL, rows], total)
    barrier()

    @pl.when(stream.present.count > 0)
    def _():
        live = stream.ring.age(by_row) < stream.ring.count
        for i in range(g.readers):
            dots = load(factors.at[_DOTS + i, rows], by_row)
            store(factors.at[_READS + i, rows], jnp.where(live, dots * left * alpha, 0.0))

    barrier()
    stream.append_numbers(h)


def _decay_channels(stream: Stream, h: Array) -> None:
    s = stream.scratch
    stream.append_gates(h)
    log_decay = load(s["gates"].at[0], channels_layout(stream.g.key_dim))
    since = lax.cond(stream.due, lambda: jnp.zeros_like(log_decay), lambda: log_decay)
    elapsed = records.decay_channels(stream.ring, since)
    store(s["total"].at[0], jnp.exp(elapsed))  # for a fold, which leaves the token's own gate out
    store(s["total"].at[1], jnp.exp(lax.cond(stream.due, lambda: log_decay, lambda: elapsed)))


def _answer(stream: Stream, t: Array, product: Array) -> None:
    """One tile: folds it if due, reads it, stores answer and update, and asks for the next one."""
    g, s, stored = stream.g, stream.scratch, pl.ds(0, stream.g.tile_rows)
    if g.channel_gate:
        stream.fold_if_due(t, None, s["total"].at[0])
    else:
        stream.fold_if_due(t, s["numbers"].at[_LEFT], s["numbers"][_TOTAL, 0])
    reads = _read_tile(stream)
    stream.tile_done(t)
    numbers = _numbers(stream, t)
    if not g.channel_gate:
        remains = numbers.gate * jnp.where(stream.due, 1.0, s["numbers"][_TOTAL, 0])
        reads = [read * remains for read in reads]
    reads = _read_records(stream, reads)
    value = load(s["values"].at[0], VALUES)
    update = value.astype(f32)
    if g.delta_rule:
        update = update - reads[1] * numbers.k_scale
    update = update * numbers.beta
    output = reads[0] * numbers.q_scale + update * (product * numbers.q_scale * numbers.k_scale)
    store(s["answers"].at[0], output.astype(g.value_dtype))
    store(s["record"].at[0], update * numbers.k_scale if g.delta_rule else value)
    stream.store(t, lambda i: s["record"].at[:, stored], None)

    @pl.when(t + 1 < stream.num_tiles)
    def _():
        stream.request_inputs(t + 1, s["values"])


def _numbers(stream: Stream, t: Array) -> _Numbers:
    h = stream.place(t)[0]
    gate = None if stream.g.channel_gate else jnp.exp(stream.log_decay(0, h))
    return _Numbers(stream.beta(0, h), stream.q_scale(0), stream.k_scale(0), gate)


def _read_tile(stream: Stream) -> list[Array]:
    """What the tile answers to each reader, but for its scale, and but for a head gate's decay. [64] each"""
    g, s = stream.g, stream.scratch
    totals: list[Any] = [0.0] * g.readers
    for first in range(0, g.key_dim, _COLUMNS_AT_ONCE):
        columns = pl.ds(first, min(_COLUMNS_AT_ONCE, g.key_dim - first))
        state = load(s["tile"].at[:, columns], STATE).astype(f32)
        gate = load(s["total"].at[1, columns], COLUMNS) if g.channel_gate else 1.0
        for i, name in enumerate(("query", "key")[: g.readers]):
            x = load(s[name].at[0, columns], COLUMNS).astype(f32) * gate
            totals[i] = totals[i] + jnp.sum(state * along(x, state.shape, 1), axis=1)
    return totals


def _read_records(stream: Stream, reads: list[Array]) -> list[Array]:
    """Adds what the records answer to each reader, but for its scale."""
    ring, factors = stream.present, stream.scratch["numbers"]

    def one(j: Array, counts: Array, reads: list[Array]) -> list[Array]:
        row = ring.row(j)
        update = load(ring.update.at[row], VALUES).astype(f32)
        return [read + (factors[_READS + i, row] * counts) * update for i, read in enumerate(reads)]

    return records.visit(ring.count, one, reads)
