"""T drafts per row in one pass over the checkpoint: outputs for all of them, their records appended, a due ring folded first.

The state C, each record u_l and each value v_j enter the answers linearly, so the drafts' triangular system is solved for
weights, once per value head, and not for answers, once per row of the state. With X^q_i = C x^q_i and X^k_i = C x^k_i, what the
checkpoint answers to draft i's query and key, decay included, and w_il, A_ij, P_ij products of keys and queries with the decay
in between,

    u_i = beta_i (v_i - X^k_i - sum_l w^k_il u_l) - sum_{j<i} A_ij u_j
    o_i = X^q_i + sum_l w^q_il u_l + sum_{j<=i} P_ij u_j

is a matrix of weights over the sources (u_l and beta_j (v_j - X^k_j)), which ``readers.solve`` finds. A tile then needs one
product with the drafts' queries and keys, and one of its sources with the weights, both on the tensor cores. Without the delta
rule u_i = beta_i v_i.

One warpgroup streams the tiles of a few value heads of one key head; the products of keys and queries are formed once for all.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import readers, records
from pallas_kernels.hopper.combine import combine, multiply
from pallas_kernels.hopper.launch import best_config, launch
from pallas_kernels.hopper.readers import DRAFTS
from pallas_kernels.hopper.repeated import first_rows
from pallas_kernels.hopper.shared import one_of, swizzled, with_terms
from pallas_kernels.hopper.stream import Stream, StreamConfig, folds_on_tensor_cores
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    DRAFTS_BY_READERS,
    STATE,
    TILE_ROWS,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    Rows,
    Tokens,
    barrier,
    bf16,
    channels_layout,
    f32,
    iota,
    load,
    store,
    store_columns,
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
    return launch("replay_verify", _verify, scratch(geometry, config), (rows, tokens, pool), geometry, config, False, interpret)


def scratch(g: Geometry, config: StreamConfig) -> dict[str, Any]:
    """Shared memory besides what every stream has."""
    n, sources = readers.count(g), readers.num_sources(g)
    rows = n * readers.terms(g)
    if g.channel_gate:
        together = 32 if g.window == 16 else 16  # columns that mma takes
        rows = max(32, -(-rows // together) * together)
    values = {"values": plgpu.SMEM((DRAFTS, TILE_ROWS), g.value_dtype)}
    if not g.delta_rule:
        values = with_terms("values", DRAFTS, g.value_dtype, g.terms)
    inputs_and_outputs = values | {"answers": plgpu.SMEM((-(-g.tokens // 8) * 8, TILE_ROWS), g.value_dtype)}
    buffers: dict[str, Any] = {
        "numbers": plgpu.SMEM((8, TILE_ROWS), f32),
        "planes": plgpu.SMEM((rows, g.key_dim), bf16, transforms=swizzled(bf16)),
    }
    solved = {
        "products": plgpu.SMEM((sources, n), f32),
        "between": plgpu.SMEM((DRAFTS, n), f32),
        "weights": plgpu.SMEM((g.terms * n, sources), bf16, transforms=swizzled(bf16, DRAFTS)),
    }
    if g.delta_rule:  # without it values are stored as they are
        buffers |= one_of(inputs_and_outputs)
    as_read = swizzled(bf16) if folds_on_tensor_cores(g) and not g.channel_gate else ()
    ring = plgpu.SMEM((g.window, g.key_dim), g.record_dtype, transforms=as_read)
    if g.channel_gate:
        buffers["readers"] = plgpu.SMEM((readers.first_row(g) + DRAFTS, g.key_dim), g.record_dtype)
        stages = {
            "stage": plgpu.SMEM((8, g.key_dim), f32),
            "of_terms": plgpu.SMEM((g.window, rows), f32),
            "weights": solved.pop("weights"),
        }
        buffers |= solved if g.delta_rule else solved | inputs_and_outputs
        return buffers | (one_of({"keys": ring} | stages) if config.heads == 1 else {"keys": ring} | one_of(stages))
    if not g.delta_rule:
        solved |= inputs_and_outputs
    keys = plgpu.SMEM((sources, g.key_dim), g.record_dtype)  # of the records, and behind them the readers
    buffers["ring_arrived"] = plgpu.Barrier(num_arrivals=g.window // config.ring_chunk)
    return buffers | one_of({"keys": keys, "solved": {"ring": ring} | solved})


def _verify(stream: Stream) -> None:
    """The kernel's body for a live row."""
    g, s = stream.g, stream.scratch
    first, drafts = readers.first_key(g), _drafts(stream)
    stream.start(drafts.at[pl.ds(0, g.tokens)], drafts.at[pl.ds(first, g.tokens)])
    if g.channel_gate:
        _request_first_inputs(stream)
    plgpu.barrier_wait(s["keys_arrived"])
    if g.delta_rule:
        _clear_readers(stream)
    barrier()
    if not g.channel_gate:
        readers.store_planes(drafts, None, None, s["planes"], g)
        products = multiply(s["keys"], None, s["planes"], g, stream.call.interpret)
    keys = stream.load_keys(drafts.at[pl.ds(first, g.tokens)])
    barrier()
    if not g.channel_gate:
        _solve_over_keys(stream, products)
    records.keep_rows(s["products"], COLUMNS)
    stream.append_keys(keys)
    stream.each_tile(lambda head: _solve(stream, head), lambda t: _answer(stream, t))


def _solve_over_keys(stream: Stream, products: Array) -> None:
    """Puts the products and the first tile's inputs where the keys were, and the records' keys once more if they are folded."""
    s = stream.scratch
    store(s["products"], first_rows(products, readers.num_sources(stream.g), stream.call.interpret))
    _request_first_inputs(stream)

    @pl.when(stream.due)
    def _():
        stream.request_keys(s["ring"], s["ring_arrived"])
        plgpu.barrier_wait(s["ring_arrived"])
        if not folds_on_tensor_cores(stream.g):
            records.keep_rows(s["ring"], channels_layout(stream.g.key_dim))


def _request_first_inputs(stream: Stream) -> None:
    records.keep_rows(stream.scratch["values"])
    plgpu.commit_smem()
    _request_inputs(stream, 0)


def _request_inputs(stream: Stream, t: Any) -> None:
    g = stream.g
    stream.request_inputs(t, stream.scratch["values"].at[pl.ds(readers.first_draft(g), g.tokens)])


def _drafts(stream: Stream) -> Ref:
    """The drafts' queries and keys as they came."""
    g, s = stream.g, stream.scratch
    return s["readers"] if g.channel_gate else s["keys"].at[pl.ds(g.window, readers.num_sources(g) - g.window)]


def _clear_readers(stream: Stream) -> None:
    """Zeros for queries and keys past the length, which may be NaN, and for readers that only fill up."""
    g, drafts, first = stream.g, _drafts(stream), readers.first_key(stream.g)
    zeros = plgpu.layout_cast(jnp.zeros((g.key_dim,), g.record_dtype), channels_layout(g.key_dim))
    for reader in range(readers.count(g)):
        draft = reader if reader < first else reader - first

        @pl.when(draft >= stream.length)
        def _(reader: int = reader) -> None:
            store(drafts.at[reader], zeros)


def _solve(stream: Stream, head: Array) -> None:
    """What all tiles of a value head share: decays and weights."""
    g, s, h = stream.g, stream.scratch, stream.first_head + head
    readers.store_numbers(stream, h)
    plgpu.barrier_wait(s["head_arrived"])
    if g.channel_gate:
        _decay_channels(stream, h)
    else:
        left, total = records.decay_heads(stream.ring)
        for first in range(0, TILE_ROWS, readers.num_sources(g)):
            store(s["numbers"].at[readers.LEFT, pl.ds(first, g.window)], left)
        store(s["numbers"].at[readers.TOTAL[0], pl.ds(readers.TOTAL[1], g.window)], total)
    barrier()
    interpret = stream.call.interpret
    readers.solve(stream.present, s["products"], not g.channel_gate, stream.due, stream.length, s, g, interpret)
    plgpu.commit_smem()  # the tensor cores read the weights
    stream.append_numbers(h)


def _decay_channels(stream: Stream, h: Array) -> None:
    """Decays of a channel gate: of the records' keys, the checkpoint and the readers; and the products under them."""
    g, s, channels = stream.g, stream.scratch, channels_layout(stream.g.key_dim)
    stream.append_gates(h)
    gates = [load(s["gates"].at[i], channels) for i in range(g.tokens)]
    barrier()
    zeros = plgpu.layout_cast(jnp.zeros((g.key_dim,), f32), channels)
    for i, gate in enumerate(gates):
        store(s["gates"].at[i], jnp.exp(gate))

    def clear(i: Array, carry: None) -> None:
        store(s["gates"].at[i], zeros)

    lax.fori_loop(stream.length, g.tokens, clear, None)  # what lies past the length may be NaN
    elapsed = records.decay_channels(stream.ring, zeros)
    store(s["total"].at[0], jnp.exp(elapsed))
    store(s["total"].at[1], jnp.exp(lax.cond(stream.due, lambda: zeros, lambda: elapsed)))
    readers.store_planes(s["readers"], s["gates"], s["stage"], s["planes"], g)

    @pl.when(stream.present.count > 0)
    def _():
        n, layout = readers.count(g), DRAFTS_BY_READERS
        records.multiply_decayed(stream.ring, s["planes"], s["of_terms"], g.terms, stream.call.interpret)
        barrier()
        high, *rest = (load(s["of_terms"].at[:, pl.ds(i * n, n)], layout) for i in range(g.terms))
        store(s["products"].at[pl.ds(0, g.window)], sum(rest, high))

    readers.multiply_channels(s["readers"], s["gates"], stream.length, s["products"], g)


def _answer(stream: Stream, t: Array) -> None:
    """One tile: folds it if due, reads it, stores answers and updates, and asks for the next one."""
    g, s, stored = stream.g, stream.scratch, pl.ds(0, stream.g.tile_rows)
    if g.channel_gate:
        stream.fold_if_due(t, None, s["total"].at[0])
    else:
        stream.fold_if_due(t, s["numbers"].at[readers.LEFT], s["numbers"][readers.TOTAL])
    remains = s["total"].at[1] if g.channel_gate else None
    reads = multiply(s["tile"], remains, s["planes"], g, stream.call.interpret)
    stream.tile_done(t)
    answers = combine(stream, reads)
    barrier()
    outputs = answers[:, : s["answers"].shape[0]]
    outputs = jnp.where(iota(outputs.shape, 1, STATE) < stream.length, outputs, 0.0)
    if jnp.dtype(g.value_dtype).itemsize == 2:
        store(s["answers"].T, outputs.astype(g.value_dtype))
    else:
        store_columns(s["answers"], outputs, stream.call.interpret)
    if g.delta_rule:
        last, first = answers.shape[1] - DRAFTS, readers.first_draft(g)
        store_columns(s["updates"].at[pl.ds(0, DRAFTS)], answers[:, last:], stream.call.interpret)
        together = s["updates"].at[pl.ds(first, g.tokens)] if g.tile_rows == TILE_ROWS else None
        stream.store(t, lambda i: s["updates"].at[pl.ds(first + i, 1), stored], together)
    else:
        together = s["values"].at[pl.ds(0, g.tokens)] if g.tile_rows == TILE_ROWS else None
        stream.store(t, lambda i: s["values"].at[pl.ds(i, 1), stored], together)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    barrier()

    @pl.when(t + 1 < stream.num_tiles)
    def _():
        _request_inputs(stream, t + 1)
