"""T drafts per row in one pass over the checkpoint: outputs for all of them, their records appended, a due ring folded first.

The state C, each record u_l and each value v_j enter the answers linearly, so the triangular system of the drafts is solved once
per value head, for weights, and not once per row of the state. With X^q_i = C x^q_i and X^k_i = C x^k_i, what the checkpoint
answers to draft i's query and key, decay included, and w_il, A_ij, P_ij products of keys and queries with the decay in between,

    u_i = beta_i (v_i - X^k_i - sum_l w^k_il u_l) - sum_{j<i} A_ij u_j
    o_i = X^q_i + sum_l w^q_il u_l + sum_{j<=i} P_ij u_j

is a matrix of weights over the sources (u_l, v_j, X^k_j), which ``readers.solve`` finds. A tile then needs one product with the
drafts' queries and keys, on the tensor cores, and a rank-1 term per source. Without the delta rule u_i = beta_i v_i.

One warpgroup streams the tiles of a few value heads of one key head; the products of keys and queries are formed once for all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import readers, records
from pallas_kernels.hopper.readers import SOURCES, Drafts
from pallas_kernels.hopper.records import Ring
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
    compiler_params,
    f32,
    iota,
    load,
    pool_from,
    split,
    state_tile,
    swizzled,
)

_MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class VerifyConfig:
    """How the work is cut: value heads that one warpgroup serves, ring rows that are copied together."""

    heads: int = 4
    ring_chunk: int = 4


def best_config(geometry: Geometry) -> VerifyConfig:
    """As many heads of one key head as share its products, but enough warpgroups to fill the GPU."""
    g = geometry
    fits = [
        n for n in (1, 2, 3, 4) if g.group_size % n == 0 and (n == 1 or g.rows * g.value_heads // n >= 4 * _MULTIPROCESSORS)
    ]
    return VerifyConfig(heads=max(fits))


def verify(
    rows: Rows,
    tokens: Tokens,
    pool: Pool,
    geometry: Geometry,
    config: VerifyConfig | None = None,
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
    g, config = geometry, config or best_config(geometry)
    operands = [*rows, *tokens, *(x for x in pool if x is not None)]

    def replay_verify(*refs: Ref, **scratch: Ref) -> None:
        *inputs, out = refs
        call = _Call(Rows(*inputs[:4]), Tokens(*inputs[4:11]), pool_from(inputs[11:]), out, g, config, interpret)
        _verify_heads(call, scratch)

    kernel = plgpu.kernel(
        replay_verify,
        out_type=jax.ShapeDtypeStruct((g.rows, g.tokens, g.value_heads, g.value_dim), g.value_dtype),
        grid=(g.rows * g.value_heads // config.heads,),
        grid_names=("heads",),
        scratch_types=_scratch(g, config),
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    return kernel(*operands)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The kernel's operands and its static parts."""

    rows: Rows
    tokens: Tokens
    pool: Pool
    out: Ref
    g: Geometry
    config: VerifyConfig
    interpret: Interpret


def _scratch(g: Geometry, config: VerifyConfig) -> dict[str, Any]:
    n, chunks, whole = readers.columns(g), g.window // config.ring_chunk, g.tile_rows == TILE_ROWS
    update_copies = chunks if whole else g.window
    head_copies = records.copies(g, config.ring_chunk) - chunks - update_copies + g.channel_gate
    exact = g.record_dtype == bf16 and not g.channel_gate  # queries and keys need one plane
    scratch = {
        "tile": state_tile(g),
        "keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype),
        "queries": plgpu.SMEM((g.tokens, g.key_dim), g.record_dtype),
        "draft_keys": plgpu.SMEM((readers.DRAFT_ROWS, g.key_dim), g.record_dtype),
        "updates": plgpu.SMEM((g.window, TILE_ROWS), g.update_dtype),
        "values": plgpu.SMEM((g.tokens, TILE_ROWS), g.value_dtype),
        "decays": plgpu.SMEM((g.window, g.key_dim) if g.channel_gate else (g.window,), f32),
        "products": plgpu.SMEM((g.readers, g.tokens, SOURCES), f32),
        "factors": plgpu.SMEM((4, SOURCES), f32),
        "stage": plgpu.SMEM((8, g.key_dim), f32),
        "planes": [plgpu.SMEM((n, g.key_dim), bf16, transforms=swizzled(bf16)) for _ in range(1 if exact else 2)],
        "weights": plgpu.SMEM((SOURCES, n), f32),
        "answers": plgpu.SMEM((n, TILE_ROWS), g.value_dtype),
        "keys_arrived": plgpu.Barrier(num_arrivals=2 + chunks),
        "head_arrived": plgpu.Barrier(num_arrivals=head_copies),
        "inputs_arrived": plgpu.Barrier(num_arrivals=update_copies + (1 if whole else g.tokens)),
        "tile_arrived": plgpu.Barrier(),
    }
    if g.channel_gate:
        scratch["gates"] = plgpu.SMEM((g.tokens, g.key_dim), f32)
        scratch["total"] = plgpu.SMEM((g.key_dim,), f32)
    return scratch


# Rows of the scratch "factors": what is left of each record, the records' weights, what is left of the checkpoint, what outputs
# take of their queries' own answers.
_LEFT, _WEIGHT, _TOTAL, _OWN = range(4)


def _verify_heads(call: _Call, scratch: dict[str, Ref]) -> None:
    """The kernel's body: ``config.heads`` value heads of one key head of one row."""
    g, rows, answers = call.g, call.rows, scratch["answers"]
    index = lax.axis_index("heads")
    groups = g.value_heads // call.config.heads
    first_head, b = (index % groups) * call.config.heads, index // groups
    slot, length = rows.slots[b], rows.lengths[b]
    live = (slot >= 0) & (slot < g.slots) & (length > 0)

    @pl.when(live)
    def _():
        _Heads(call, b, first_head, slot, length, scratch).run()

    @pl.when(~live)
    def _():
        answers.T[...] = plgpu.layout_cast(jnp.zeros((TILE_ROWS, readers.columns(g)), g.value_dtype), STATE)
        plgpu.commit_smem()

        def one(t: Array, carry: None) -> None:
            _store_answers(call, answers, b, first_head + t // g.tiles, (t % g.tiles) * g.tile_rows)

        lax.fori_loop(0, call.config.heads * g.tiles, one, None)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_answers(call: _Call, answers: Ref, b: Array, h: Array, first: Array) -> None:
    """Stores the outputs of one tile, from value ``first`` on, for all T drafts."""
    g, values = call.g, pl.ds(first, call.g.tile_rows)
    if g.tile_rows == TILE_ROWS:
        plgpu.copy_smem_to_gmem(answers.at[pl.ds(0, g.tokens)], call.out.at[b, :, h, values])
        return
    for i in range(g.tokens):
        plgpu.copy_smem_to_gmem(answers.at[i, pl.ds(0, g.tile_rows)], call.out.at[b, i, h, values])


class _Heads:
    """One warpgroup's work on a live row, in steps that share the row's place and the shared memory."""

    def __init__(self, call: _Call, b: Array, first_head: Array, slot: Array, length: Array, scratch: dict[str, Ref]):
        self.call, self.g, self.pool, self.tokens = call, call.g, call.pool, call.tokens
        self.b, self.first_head, self.slot, self.length, self.scratch = b, first_head, slot, length, scratch
        self.key_head = first_head // call.g.group_size
        count, start = call.rows.length[slot], call.rows.origin[slot] & (call.g.window - 1)
        weight = None if call.g.delta_rule else scratch["factors"].at[_WEIGHT, pl.ds(0, call.g.window)]
        self.ring = Ring(scratch["keys"], scratch["updates"], scratch["decays"], weight, start, count)
        self.due = count + 2 * call.g.max_draft > call.g.window
        self.present = self.ring._replace(count=jnp.where(self.due, 0, count))  # records that the drafts see
        self.drafts = Drafts(scratch["queries"], scratch["draft_keys"], scratch.get("gates"))

    def run(self) -> None:
        g, s = self.g, self.scratch
        self._request_tile(0)
        self._request_keys()
        self._request_head(0)
        self._request_inputs(0)
        plgpu.barrier_wait(s["keys_arrived"])
        if not g.channel_gate:
            readers.multiply(self.drafts, s["keys"], s["products"], self.length, g)
            readers.store_readers(self.drafts, None, s["stage"], s["planes"], g)

        def one(t: Array, carry: None) -> None:
            @pl.when(t % g.tiles == 0)
            def _():
                self._solve(t // g.tiles)

            self._answer(t)

        lax.fori_loop(0, self.call.config.heads * g.tiles, one, None)

        @pl.when(self.first_head % g.group_size == 0)
        def _():
            layout = channels_layout(g.key_dim)

            def append(i: Array, carry: None) -> None:  # not by TMA, which wants rows of whole 128 bytes
                row = self.ring.row(self.ring.count + i)
                self.pool.key[self.slot, self.key_head, row] = load(s["draft_keys"].at[i], layout)

            lax.fori_loop(0, self.length, append, None)

    def _place(self, t: Any) -> tuple[Any, Any]:
        """Value head and first value of tile ``t``."""
        return self.first_head + t // self.g.tiles, (t % self.g.tiles) * self.g.tile_rows

    def _request_tile(self, t: Any) -> None:
        (h, first), rows = self._place(t), self.g.tile_rows
        source = self.pool.checkpoint.at[self.slot, h, pl.ds(first, rows)]
        plgpu.copy_gmem_to_smem(source, self.scratch["tile"].at[pl.ds(0, rows)], self.scratch["tile_arrived"])

    def _request_keys(self) -> None:
        s, arrived = self.scratch, self.scratch["keys_arrived"]
        plgpu.copy_gmem_to_smem(self.tokens.q.at[self.b, :, self.key_head], s["queries"], arrived)
        plgpu.copy_gmem_to_smem(
            self.tokens.k.at[self.b, :, self.key_head], s["draft_keys"].at[pl.ds(0, self.g.tokens)], arrived
        )
        chunk, interpret = self.call.config.ring_chunk, self.call.interpret
        records.request_keys(self.pool, self.slot, self.key_head, self.ring, chunk, arrived, interpret)

    def _request_head(self, head: Any) -> None:
        s, h, arrived = self.scratch, self.first_head + head, self.scratch["head_arrived"]
        chunk, interpret = self.call.config.ring_chunk, self.call.interpret
        records.request_decays(self.pool, self.slot, h, self.ring, self.g, chunk, arrived, interpret)
        if self.g.channel_gate:
            plgpu.copy_gmem_to_smem(self.tokens.log_decay.at[self.b, :, h], s["gates"], arrived)

    def _request_inputs(self, t: Any) -> None:
        (h, first), s, g, arrived = self._place(t), self.scratch, self.g, self.scratch["inputs_arrived"]
        chunk, interpret = self.call.config.ring_chunk, self.call.interpret
        records.request_updates(self.pool, self.slot, h, first, self.ring, g, chunk, arrived, interpret)
        values = pl.ds(first, g.tile_rows)
        if g.tile_rows == TILE_ROWS:
            plgpu.copy_gmem_to_smem(self.tokens.v.at[self.b, :, h, values], s["values"], arrived)
            return
        for i in range(g.tokens):
            target = s["values"].at[i, pl.ds(0, g.tile_rows)]
            plgpu.copy_gmem_to_smem(self.tokens.v.at[self.b, i, h, values], target, arrived)

    def _solve(self, head: Any) -> None:
        """What all tiles of a value head share: decays and weights. Records the drafts' gates and weights."""
        g, s, h = self.g, self.scratch, self.first_head + head
        scalars = self._scalars(h)
        plgpu.barrier_wait(s["head_arrived"])
        left, total = (self._decay_channels(h), None) if g.channel_gate else self._decay_heads()
        barrier()
        weights, own = readers.solve(self.present, s["products"], left, total, scalars, g)
        readers.store_weights(weights, s["weights"])
        for i, x in enumerate(own):
            s["factors"][_OWN, i] = x
        barrier()

        def append(i: Array, carry: None) -> None:
            row = self.ring.row(self.ring.count + i)
            if not g.channel_gate:
                self.pool.log_decay[self.slot, h, row] = self.tokens.log_decay[self.b, i, h]
            if self.pool.weight is not None:
                scale = self.tokens.k_scale[self.b, i, self.key_head]
                self.pool.weight[self.slot, h, row] = self.tokens.beta[self.b, i, h] * scale

        if not (g.channel_gate and g.delta_rule):
            lax.fori_loop(0, self.length, append, None)

    def _scalars(self, h: Array) -> readers.Scalars:
        tokens, b, drafts = self.tokens, self.b, range(self.g.tokens)
        return readers.Scalars(
            None if self.g.channel_gate else [tokens.log_decay[b, i, h] for i in drafts],
            [tokens.beta[b, i, h] for i in drafts],
            [tokens.q_scale[b, i, self.key_head] for i in drafts],
            [tokens.k_scale[b, i, self.key_head] for i in drafts],
        )

    def _decay_heads(self) -> tuple[Ref, Array]:
        left, total = records.decay_heads(self.ring)
        factors = self.scratch["factors"]
        factors[_LEFT, pl.ds(0, self.g.window)] = left
        factors[_TOTAL, 0] = total  # a fold asks for it at every tile
        return factors.at[_LEFT], jnp.where(self.due, 1.0, total)

    def _decay_channels(self, h: Array) -> None:
        g, s = self.g, self.scratch
        plgpu.commit_smem()  # the ring's decays have been read before the drafts' are stored behind them
        self._append(lambda i: s["gates"].at[pl.ds(i, 1)], self.pool.log_decay.at[self.slot, h], s["gates"])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        barrier()
        zero = plgpu.layout_cast(jnp.zeros((g.key_dim,), f32), channels_layout(g.key_dim))
        elapsed = records.decay_channels(self.ring, zero)
        s["total"][...] = jnp.exp(elapsed)
        readers.open_gates(self.drafts, g)
        barrier()
        readers.multiply(self.drafts, s["decays"], s["products"], self.length, g)
        gate = jnp.exp(lax.cond(self.due, lambda: zero, lambda: elapsed))
        readers.store_readers(self.drafts, gate, s["stage"], s["planes"], g)

    def _answer(self, t: Array) -> None:
        """One tile: folds it if due, reads it, stores answers and updates, and asks for the next one."""
        g, s, (h, first) = self.g, self.scratch, self._place(t)
        more, last_of_head = t + 1 < self.call.config.heads * g.tiles, (t + 1) % g.tiles == 0
        values, stored = pl.ds(first, g.tile_rows), pl.ds(0, g.tile_rows)
        plgpu.barrier_wait(s["tile_arrived"])

        @pl.when(self.due)
        def _():
            plgpu.barrier_wait(s["inputs_arrived"])
            if g.channel_gate:
                records.fold(s["tile"], self.ring, s["decays"], None, s["total"], g)
            else:
                records.fold(s["tile"], self.ring, s["keys"], s["factors"].at[_LEFT], s["factors"][_TOTAL, 0], g)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s["tile"].at[stored], self.pool.checkpoint.at[self.slot, h, values])

        reads = _multiply_state(s["tile"], s["planes"], g, self.call.interpret)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()  # everybody has read the tile: it may be overwritten by a copy

        @pl.when(more)
        def _():
            self._request_tile(t + 1)

            @pl.when(last_of_head)
            def _():
                self._request_head((t + 1) // g.tiles)

        @pl.when(~self.due)
        def _():
            plgpu.barrier_wait(s["inputs_arrived"])

        answers = self._combine(reads)
        barrier()
        live = iota(answers.shape, 1, STATE) < self.length
        s["answers"].T[...] = jnp.where(live, answers, 0.0).astype(g.value_dtype)
        if g.delta_rule:
            for i in range(g.tokens):
                s["updates"][i] = _column(answers, g.tokens + i)
        plgpu.commit_smem()
        _store_answers(self.call, s["answers"], self.b, h, first)
        target = self.pool.update.at[self.slot, h, :, values]
        if g.delta_rule:
            self._append(lambda i: s["updates"].at[pl.ds(i, 1), stored], target)
        else:
            whole = s["values"] if g.tile_rows == TILE_ROWS else None
            self._append(lambda i: s["values"].at[pl.ds(i, 1), stored], target, whole)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        barrier()

        @pl.when(more)
        def _():
            self._request_inputs(t + 1)

    def _combine(self, reads: Array) -> Array:
        """Outputs and updates of one tile, [64, N]: the weighted sum of what the state answers, the records and the values."""
        g, s = self.g, self.scratch

        def add(answers: Array, source: Array, weights: Ref, counts: Any) -> Array:
            weight = load(weights, COLUMNS) * counts
            return answers + along(source, answers.shape, 0) * along(weight, answers.shape, 1)

        def record(j: Array, counts: Array, answers: Array) -> Array:
            row = self.ring.row(j)
            return add(answers, load(s["updates"].at[row], VALUES).astype(f32), s["weights"].at[row], counts)

        query = iota(reads.shape, 1, STATE) < g.tokens
        own = load(s["factors"].at[_OWN, pl.ds(0, reads.shape[1])], COLUMNS)
        answers = jnp.where(query, reads * along(own, reads.shape, 1), 0.0)
        answers = records.visit(self.present.count, record, answers)
        for j in range(g.tokens):
            live = jnp.where(j < self.length, 1.0, 0.0)
            row = jnp.minimum(j, self.length - 1)  # what lies behind the length may be NaN
            answers = add(answers, load(s["values"].at[row], VALUES).astype(f32), s["weights"].at[g.window + row], live)
        if g.delta_rule:
            for j in range(g.tokens):
                key_read = _column(reads, g.tokens + j)
                row = g.window + g.tokens + j
                answers = lax.cond(
                    j < self.length,
                    lambda a, x=key_read, r=row: add(a, x, s["weights"].at[r], 1.0),
                    lambda a: a,
                    answers,
                )
        return answers

    def _append(self, row: Callable[[Array], Ref], target: Ref, rows: Ref | None = None) -> None:
        """Stores ``row(i)`` for i < length behind the committed records of ``target`` [L, ...]; at once where ``rows`` has all."""
        tokens, first = self.g.tokens, self.ring.row(self.ring.count)

        def one(i: Array, carry: None) -> None:
            plgpu.copy_smem_to_gmem(row(i), target.at[pl.ds(self.ring.row(self.ring.count + i), 1)])

        if rows is None:
            lax.fori_loop(0, self.length, one, None)
            return
        whole = (self.length == tokens) & (first + tokens <= self.g.window)

        @pl.when(whole)
        def _():
            plgpu.copy_smem_to_gmem(rows, target.at[pl.ds(first, tokens)])

        @pl.when(~whole)
        def _():
            lax.fori_loop(0, self.length, one, None)


def _column(x: Array, n: int) -> Array:
    """Column ``n`` of a [64, N] array, exactly."""
    eight = x[:, n // 8 * 8 : n // 8 * 8 + 8]
    return jnp.sum(jnp.where(iota(eight.shape, 1, STATE) == n % 8, eight, 0.0), axis=1)


def _multiply_state(tile: Ref, planes: list[Ref], g: Geometry, interpret: Interpret) -> Array:
    """The tile times the readers, [64, N] float32: both cut into bfloat16 terms, the product of the smaller ones left out.

    The tile is the product's first operand, in registers; interpret mode knows that from shared memory only.
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
        return sum(jnp.dot(x.astype(f32), y.astype(f32).T, precision="highest") for x, y in pairs)

    def accumulate(total: Ref) -> Array:
        for columns in steps:
            for x, plane in terms(columns):
                plgpu.wgmma(total, x, plane.at[:, columns].T)
            plgpu.wgmma_wait(1)  # or every column of the tile would be held in registers
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((TILE_ROWS, readers.columns(g)), f32))
