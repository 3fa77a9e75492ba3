"""One token per row: reads the checkpoint once, appends a record, folds a ring whose turn it is.

One warpgroup per tile of the state; what it needs is requested by TMA as soon as the slot is known, and several tiles live on
a multiprocessor at a time, so that each one's latency hides behind the others' reads. With alpha the token's gate, D what is
left of the checkpoint C and w_l of record l,

    h_x = alpha (D C x + sum_l w_l (key_l . x) u_l)          for x = q and, with the delta rule, x = k
    u   = beta (v - h_k)                                      o = h_q + (k . q) u

With a channel gate alpha D and alpha w_l multiply channels: they go into x and into the keys before the products.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import records
from pallas_kernels.hopper.records import Ring
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    SQUARE,
    STATE,
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
    channels_layout,
    compiler_params,
    f32,
    load,
    pool_from,
    records_layout,
    state_tile,
)


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How the work is cut: ring rows that are copied together, columns of the state that a thread holds at a time."""

    ring_chunk: int = 4
    columns: int = 64


def step(
    rows: Rows,
    tokens: Tokens,
    pool: Pool,
    geometry: Geometry,
    config: StepConfig | None = None,
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
    g, config = geometry, config or StepConfig()
    operands = [*rows, *tokens, *(x for x in pool if x is not None)]

    def replay_step(*refs: Ref, **scratch: Ref) -> None:
        *inputs, out = refs
        _step_tile(Rows(*inputs[:4]), Tokens(*inputs[4:11]), pool_from(inputs[11:]), out, g, config, interpret, **scratch)

    kernel = plgpu.kernel(
        replay_step,
        out_type=jax.ShapeDtypeStruct((g.rows, 1, g.value_heads, g.value_dim), g.value_dtype),
        grid=(g.rows * g.value_heads * g.tiles,),
        grid_names=("tile",),
        scratch_types=_scratch(g, config),
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    return kernel(*operands)


def _scratch(g: Geometry, config: StepConfig) -> dict[str, Any]:
    scratch = {
        "tile": state_tile(g),
        "keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype),
        "updates": plgpu.SMEM((g.window, TILE_ROWS), g.update_dtype),
        "query": plgpu.SMEM((g.key_dim,), g.record_dtype),
        "key": plgpu.SMEM((g.key_dim,), g.record_dtype),
        "value": plgpu.SMEM((TILE_ROWS,), g.value_dtype),
        "decays": plgpu.SMEM((g.window, g.key_dim) if g.channel_gate else (g.window,), f32),
        "factors": plgpu.SMEM((8, 32), f32),
        "answer": plgpu.SMEM((TILE_ROWS,), g.value_dtype),
        "tile_arrived": plgpu.Barrier(),
        "arrived": plgpu.Barrier(num_arrivals=3 + g.channel_gate + records.copies(g, config.ring_chunk)),
    }
    if g.delta_rule:
        scratch["record"] = plgpu.SMEM((TILE_ROWS,), f32)
    if g.channel_gate:
        scratch["gates"] = plgpu.SMEM((4, g.key_dim), f32)
    return scratch


# Rows of the scratch "factors": what is left of each record, the records' weights, what each record adds to each reader.
_LEFT, _WEIGHT, _READS = 0, 1, 2
# Rows of the scratch "gates": the token's log decay, what is left of the checkpoint after the ring, and after the token too.
_TOKEN, _TOTAL, _READ = 0, 1, 2


class _Decay(NamedTuple):
    """What time has left of the past. Scalars with a head gate, references to [K] with a channel gate."""

    key: Ref  # [L, K] keys, with a channel gate decayed up to and with the token
    left: Ref | None  # [L] what is left of each record when the token comes; with a channel gate the keys say it
    total: Any  # what is left of the checkpoint when the token comes
    read: Any  # what is left, after the token's own gate, of the state that it reads
    token: Any  # the token's own gate, 1 where the keys hold it already


def _step_tile(
    rows: Rows,
    tokens: Tokens,
    pool: Pool,
    out: Ref,
    g: Geometry,
    config: StepConfig,
    interpret: Interpret,
    *,
    tile: Ref,
    keys: Ref,
    updates: Ref,
    query: Ref,
    key: Ref,
    value: Ref,
    decays: Ref,
    factors: Ref,
    answer: Ref,
    tile_arrived: Ref,
    arrived: Ref,
    record: Ref | None = None,
    gates: Ref | None = None,
) -> None:
    """The kernel's body: one tile of one value head of one row."""
    index = lax.axis_index("tile")
    part, index = index % g.tiles, index // g.tiles
    h, b = index % g.value_heads, index // g.value_heads  # heads of one key head run side by side, so its keys stay in L2
    key_head = h // g.group_size
    values, stored = pl.ds(part * g.tile_rows, g.tile_rows), pl.ds(0, g.tile_rows)
    slot = rows.slots[b]
    live = (slot >= 0) & (slot < g.slots) & (rows.lengths[b] > 0)

    @pl.when(live)
    def _():
        plgpu.copy_gmem_to_smem(pool.checkpoint.at[slot, h, values], tile.at[stored], tile_arrived)
        plgpu.copy_gmem_to_smem(tokens.q.at[b, 0, key_head], query, arrived)
        plgpu.copy_gmem_to_smem(tokens.k.at[b, 0, key_head], key, arrived)
        plgpu.copy_gmem_to_smem(tokens.v.at[b, 0, h, values], value.at[stored], arrived)
        if g.channel_gate:
            plgpu.copy_gmem_to_smem(tokens.log_decay.at[b, 0, h], gates.at[_TOKEN], arrived)
        count, start = rows.length[slot], rows.origin[slot] & (g.window - 1)
        weight = None if g.delta_rule else factors.at[_WEIGHT, pl.ds(0, g.window)]
        ring = Ring(keys, updates, decays, weight, start, count)
        chunk = config.ring_chunk
        records.request_keys(pool, slot, key_head, ring, chunk, arrived, interpret)
        records.request_decays(pool, slot, h, ring, g, chunk, arrived, interpret)
        records.request_updates(pool, slot, h, part * g.tile_rows, ring, g, chunk, arrived, interpret)
        beta, scales = tokens.beta[b, 0, h], (tokens.q_scale[b, 0, key_head], tokens.k_scale[b, 0, key_head])
        due = count + 2 * g.max_draft > g.window
        present = ring._replace(count=jnp.where(due, 0, count))  # records that are still in the ring when the token reads

        plgpu.barrier_wait(arrived)
        if g.channel_gate:
            decay = _decay_channels(ring, gates, due)
        else:
            decay = _decay_heads(ring, factors, tokens.log_decay[b, 0, h], due)
        barrier()
        product = _weigh_records(present, decay, (query, key), factors, g) * scales[0] * scales[1]
        plgpu.barrier_wait(tile_arrived)

        @pl.when(due)
        def _():
            records.fold(tile, ring, decay.key, decay.left, decay.total, g)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile.at[stored], pool.checkpoint.at[slot, h, values])

        barrier()
        reads = _read_records(present, factors, g)
        reads = _read_tile(tile, (query, key), decay.read, reads, g, config)
        update = load(value, VALUES).astype(f32)
        if g.delta_rule:
            update = update - reads[1] * scales[1]
        update = update * beta
        answer[...] = (reads[0] * scales[0] + product * update).astype(g.value_dtype)
        if record is not None:
            record[...] = update * scales[1]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(answer.at[stored], out.at[b, 0, h, values])
        row = ring.row(count)
        plgpu.copy_smem_to_gmem((value if record is None else record).at[stored], pool.update.at[slot, h, row, values])

        @pl.when(part == 0)
        def _():
            if pool.weight is not None:
                pool.weight[slot, h, row] = beta * scales[1]
            if g.channel_gate:
                plgpu.copy_smem_to_gmem(gates.at[_TOKEN], pool.log_decay.at[slot, h, row])
            else:
                pool.log_decay[slot, h, row] = tokens.log_decay[b, 0, h]

        @pl.when((part == 0) & (h % g.group_size == 0))
        def _():
            plgpu.copy_smem_to_gmem(key, pool.key.at[slot, key_head, row])

    @pl.when(~live)
    def _():
        answer[...] = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), g.value_dtype), VALUES)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(answer.at[stored], out.at[b, 0, h, values])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _decay_heads(ring: Ring, factors: Ref, log_decay: Array, due: Array) -> _Decay:
    left, total = records.decay_heads(ring)
    kept = factors.at[_LEFT, pl.ds(0, ring.window)]
    kept[...] = left
    alpha = jnp.exp(log_decay)
    return _Decay(ring.key, kept, total, alpha * jnp.where(due, 1.0, total), alpha)


def _decay_channels(ring: Ring, gates: Ref, due: Array) -> _Decay:
    log_decay = load(gates.at[_TOKEN], channels_layout(ring.key.shape[1]))
    since = lax.cond(due, lambda: jnp.zeros_like(log_decay), lambda: log_decay)
    elapsed = records.decay_channels(ring, since)
    gates[_TOTAL] = jnp.exp(elapsed)
    gates[_READ] = jnp.exp(lax.cond(due, lambda: log_decay, lambda: elapsed))
    return _Decay(ring.log_decay, None, gates.at[_TOTAL], gates.at[_READ], 1.0)


def _weigh_records(ring: Ring, decay: _Decay, token: tuple[Ref, Ref], factors: Ref, g: Geometry) -> Array:
    """Puts what each record adds to each reader, but for the reader's scale, into ``factors``; returns q . k."""
    layout = records_layout(g.key_dim)
    shape = (g.window, g.key_dim)
    readers = [load(x, layout.reduce(0)).astype(f32) for x in token]

    @pl.when(ring.count > 0)
    def _():
        by_row = SQUARE.reduce(1)
        key = load(decay.key, layout).astype(f32)
        live = ring.age(by_row) < ring.count
        left = 1.0 if decay.left is None else load(decay.left, by_row) * decay.token
        for i, x in enumerate(readers[: g.readers]):
            dots = plgpu.layout_cast(jnp.sum(key * along(x, shape, 1), axis=1), by_row)
            factors[_READS + i, pl.ds(0, g.window)] = jnp.where(live, dots * left, 0.0)

    return jnp.sum(readers[0] * readers[1])


def _read_records(ring: Ring, factors: Ref, g: Geometry) -> list[Array]:
    """What the records answer to each reader, but for its scale. [64] each"""
    zero = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), f32), VALUES)

    def one(j: Array, counts: Array, reads: list[Array]) -> list[Array]:
        row = ring.row(j)
        update = load(ring.update.at[row], VALUES).astype(f32)
        return [read + (factors[_READS + i, row] * counts) * update for i, read in enumerate(reads)]

    return records.visit(ring.count, one, [zero] * g.readers)


def _read_tile(
    tile: Ref, token: tuple[Ref, Ref], decay: Any, reads: list[Array], g: Geometry, config: StepConfig
) -> list[Array]:
    """Adds what the tile answers to each reader, but for its scale."""
    width = min(config.columns, g.key_dim)
    totals = [None] * g.readers
    for first in range(0, g.key_dim, width):
        columns = pl.ds(first, min(width, g.key_dim - first))
        state = load(tile.at[:, columns], STATE).astype(f32)
        gate = load(decay.at[columns], COLUMNS) if g.channel_gate else None
        for i in range(g.readers):
            x = load(token[i].at[columns], COLUMNS).astype(f32)
            x = x if gate is None else x * gate
            part = jnp.sum(state * along(x, state.shape, 1), axis=1)
            totals[i] = part if totals[i] is None else totals[i] + part
    scale = 1.0 if g.channel_gate else decay
    return [read + total * scale for read, total in zip(reads, totals, strict=True)]
