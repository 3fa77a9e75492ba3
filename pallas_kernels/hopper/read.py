"""Answers T tokens per row from what ordinary reads use, a read-out copy or the checkpoint C itself, and raw records.

An answer is linear in C and in the values, so a query is taken back through the tokens, and not the state forward through them.
With records and tokens 1..t, their keys k_j, values v_j, gates alpha_j and betas beta_j,

    x_t = q_t        w_j = beta_j (k_j . x_j)        x_{j-1} = alpha_j (x_j - w_j k_j)        o_t = C x_0 + sum_j w_j v_j

and without the delta rule x_{j-1} = alpha_j x_j. So no update is ever made of a rounded read, a tile is read by one vector per
token, and what is done per record is done in K numbers and not in V K. All of it in float32 but for products on the tensor
cores. C is cut into bfloat16 or float16 terms that hold a copy exactly (float32 to 2**-16), x_0 to 2**-16 at least. Codes of
nvfp4 meet a single query as integers, exactly too, and x_0 is true to 2**-29 of its largest channel, see ``digits``. Values in
bfloat16 meet weights that are true to 2**-17.

A warpgroup serves a few value heads, of one key head or each with its own. A warp takes queries of one of these heads back.
Rows that were due have been folded by ``refresh``, in a kernel before this one.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import decode, digits, weigh
from pallas_kernels.hopper.answers import Answers, terms_of
from pallas_kernels.hopper.back import take_back
from pallas_kernels.hopper.compiler import compiler_params
from pallas_kernels.hopper.cut import (
    COPY_SCALE,
    ReadConfig,
    best_read_config,
    reads_codes,
    scratch_of,
    sources_come_late,
    takes_digits,
)
from pallas_kernels.hopper.heads import answers_folded
from pallas_kernels.hopper.products import Product
from pallas_kernels.hopper.shared import named
from pallas_kernels.hopper.tiles import (
    MMA_SUM,
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
    f32,
    iota,
    load,
    store,
)


def read(
    rows: Rows,
    tokens: Tokens,
    pool: Pool,
    geometry: Geometry,
    config: ReadConfig | None = None,
    interpret: Interpret = None,
) -> Array:
    """Outputs of T tokens per row, which are recorded behind the committed records. The pointer is left to the caller.

    Args:
        rows: slots, lengths (0 to T) and pointers; due rows have been folded, but their pointers not moved.
        tokens: T tokens, 1 to 16; values in the ring's dtype.
        pool: references to the state, records raw. Block scales of nvfp4 as [N, H, n, c], see ``block_scale_rows``.
        geometry: sizes of the call.
        config: how to cut it, None for the best known.
        interpret: parameters of interpret mode, None on a GPU.

    Returns:
        [B, T, H, V] geometry.value_dtype, zero past each row's length; where ``refresh`` answers what it folds, due rows are
        left to it.
    """
    g, config = geometry, config or best_read_config(geometry)
    operands, structure = jax.tree.flatten((rows, tokens, pool))

    def replay_read(*refs: Ref, **scratch: Ref) -> None:
        *inputs, out = refs
        rows, tokens, pool = jax.tree.unflatten(structure, inputs)
        _row(rows, tokens, pool, out, g, config, interpret, named(scratch))

    kernel = plgpu.kernel(
        replay_read,
        out_type=jax.ShapeDtypeStruct((g.rows, g.tokens, g.value_heads, g.value_dim), g.value_dtype),
        grid=(g.rows * g.value_heads // config.heads,),
        grid_names=("heads",),
        scratch_types=scratch_of(g, config),
        compiler_params=compiler_params(scalar_reductions=True),
        interpret=interpret,
    )
    return kernel(*operands)


def _row(
    rows: Rows, tokens: Tokens, pool: Pool, out: Ref, g: Geometry, config: ReadConfig, interpret: Interpret, s: dict[str, Ref]
) -> None:
    """One warpgroup: finds its row and heads, and answers if the row is live."""
    index, groups = lax.axis_index("heads"), g.value_heads // config.heads
    first_head, b = (index % groups) * config.heads, index // groups
    slot, length = rows.slots[b], rows.lengths[b]
    live = (slot >= 0) & (slot < g.slots) & (length > 0)
    answered = live
    if answers_folded(g):
        answered &= rows.length[jnp.where(live, slot, 0)] + 2 * g.max_draft <= g.window

    @pl.when(answered)
    def _():
        _Reader(rows, tokens, pool, out, g, config, interpret, s, b, first_head, slot, length).run()

    @pl.when(~live)
    def _():
        zeros = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), g.value_dtype), VALUES)

        def one(t: Array, carry: None) -> None:
            h, first = first_head + t // g.tiles, (t % g.tiles) * TILE_ROWS
            for i in range(g.tokens):
                store(out.at[b, i, h, pl.ds(first, TILE_ROWS)], zeros)

        lax.fori_loop(0, config.heads * g.tiles, one, None)


class _Reader(Answers):
    """Answers a live row."""

    def run(self) -> None:
        g, config = self.g, self.config
        first_heads = [jnp.int32(head) for head in range(config.stages)]
        self.request_start()
        if reads_codes(g):
            for head in first_heads:
                self.request_head(head)
        else:
            for piece in range(config.pieces):
                self.request_piece(jnp.int32(piece))
        if not sources_come_late(g):
            for head in first_heads:
                self.request_sources(head)
        self.store_numbers()
        plgpu.barrier_wait(self.s["start_arrived"])
        barrier()
        self.append()
        take_back(self)
        if sources_come_late(g):
            for head in first_heads:
                self.request_sources(head)
        barrier()
        weights = weigh.weights_of(self, 0) if g.tokens == 1 else None

        def one(head: Array, carry: None) -> None:
            stage = head % config.stages
            if reads_codes(g):
                plgpu.barrier_wait(self.s["head_arrived"].at[stage])
            if g.tokens == 1:
                self.answer_one(head, stage, weights)
            else:
                self.answer_many(head, stage)

            @pl.when(head + config.stages < config.heads)
            def _():
                self.all_have_read()
                if reads_codes(g):
                    self.request_head(head + config.stages)
                self.request_sources(head + config.stages)

        lax.fori_loop(0, config.heads, one, None)
        if g.tokens > 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Answers.

    def read_tile(self, head: Array, stage: Array, part: int) -> Array:
        """What 64 rows of the state answer to every reader. [64, N]"""
        g, s, values = self.g, self.s, pl.ds(part * TILE_ROWS, TILE_ROWS)
        own = 0 if g.tokens == 1 else head
        planes = s["planes"].at[own]
        products = (
            self.products_of_codes(stage, values, planes) if reads_codes(g) else self.products_of_pieces(head, part, planes)
        )
        answers = self.sum_products(products, own)
        if g.readout == "nvfp4":
            answers = answers * s["numbers"][COPY_SCALE, head, 0]
        if g.readout == "fp8_e4m3":
            answers = answers * along(load(s["row_scales"].at[stage, values], VALUES), answers.shape, 0)
        return answers

    def answer_one(self, head: Array, stage: Array, weights: Any) -> None:
        """All values of a head for one query: reads the state, stores answers and values."""
        g, s, h = self.g, self.s, self.first_head + head
        if takes_digits(g):
            x = digits.load(s["digits"].at[head], self.interpret)
            unit = s["scales"][0, head] * s["numbers"][COPY_SCALE, head, 0]
        for part in range(g.tiles):
            values = pl.ds(part * TILE_ROWS, TILE_ROWS)
            if takes_digits(g):
                codes = self.codes(stage, values, digits.WORDS)
                scales = self.block_scales(stage, values, digits.scales_layout(g.key_dim))
                answers = digits.multiply(codes, scales, x, unit, self.recorded >> 31, self.interpret)
            else:
                answers = self.of_head(self.read_tile(head, stage, part), head)
            if part == 0:
                plgpu.barrier_wait(s["sources_arrived"].at[stage])
            if weights is not None:
                zeros = plgpu.layout_cast(jnp.zeros(answers.shape, f32), MMA_SUM)
                sources = weigh.live_records(self, s["updates"].at[stage, :, values])
                answers = answers + self.of_head(weigh.add_sources(self, zeros, sources, weights), head)
            answer = plgpu.layout_cast(jnp.sum(answers, axis=1), VALUES)
            if weights is None:
                answer = weigh.add_records(self, answer, s["updates"].at[stage, :, values], head)
            value = load(s["values"].at[stage, 0, values], VALUES)
            answer = answer + value.astype(f32) * s["trace"][0, head, g.window]
            store(self.out.at[self.b, 0, h, values], answer.astype(g.value_dtype))
            store(self.pool.update.at[self.slot, h, self.ring.row(self.recorded), values], value)

    def of_head(self, answers: Array, head: Array) -> Array:
        """Answers [64, N] to all heads' queries, but those of others zero. In ``MMA_SUM``"""
        own = iota(answers.shape, 1, STATE) == head
        return plgpu.layout_cast(jnp.where(own, plgpu.layout_cast(answers, STATE), 0.0), MMA_SUM)

    def answer_many(self, head: Array, stage: Array) -> None:
        """All values of a head for all tokens: reads the state, stores answers and values."""
        g, s, h = self.g, self.s, self.first_head + head
        weights = weigh.weights_of(self, head)
        for part in range(g.tiles):
            values, answers = pl.ds(part * TILE_ROWS, TILE_ROWS), self.read_tile(head, stage, part)
            if part == 0:
                plgpu.barrier_wait(s["sources_arrived"].at[stage])
            updates, of_tokens = s["updates"].at[stage, :, values], s["values"].at[stage, :, values]
            if weights is not None:
                sources = [*weigh.live_records(self, updates), weigh.live_tokens(self, of_tokens)]
                answers = weigh.add_sources(self, plgpu.layout_cast(answers, MMA_SUM), sources, weights)
                answers = plgpu.layout_cast(answers, STATE)
            else:
                answers = weigh.add_one_by_one(self, answers, updates, of_tokens, head)
            self.store_answers(answers, h, values)
        self.record_values(h, stage)

    # The state.

    def products_of_codes(self, stage: Array, values: Any, planes: Ref) -> Iterator[list[Product]]:
        """Products of 64 rows with the planes, 32 columns at a time."""
        g = self.g
        if g.readout == "fp8_e4m3":
            state = decode.decode_fp8(self.codes(stage, values, decode.words_layout(g.key_dim // 4)), self.interpret)
        else:
            scales = self.block_scales(stage, values, decode.block_scales_layout(g.key_dim))
            state = decode.decode_nvfp4(self.codes(stage, values, decode.words_layout(g.key_dim // 8)), scales, self.interpret)
        for first in range(0, g.key_dim, SWIZZLED):
            yield [(state[:, first : first + SWIZZLED], planes, pl.ds(first, SWIZZLED))]

    def products_of_pieces(self, head: Array, part: int, planes: Ref) -> Iterator[list[Product]]:
        """The same where the state comes in pieces: the next one is requested in place of one that has been read."""
        g, s, columns = self.g, self.s, self.config.columns
        for first in range(0, g.key_dim, columns):
            piece = self.piece(head, part, first)
            stage = piece % self.config.pieces
            plgpu.barrier_wait(s["piece_arrived"].at[stage])
            for at in range(0, columns, SWIZZLED):
                own, of_planes = pl.ds(at, SWIZZLED), pl.ds(first + at, SWIZZLED)
                if "numbers_of_tile" in s and self.interpret is not None:
                    state = lax.bitcast_convert_type(s["tile"].at[stage, :, own][...], bf16)
                else:
                    state = load(s["numbers_of_tile" if "numbers_of_tile" in s else "tile"].at[stage, :, own], STATE)
                yield [(term, planes, of_planes) for term in terms_of(state)]
            self.all_have_read()
            self.request_piece(piece + self.config.pieces)

    def codes(self, stage: Array, values: Any, layout: Any) -> Array:
        """Codes of a tile as words of 32 bits, as bytes in interpret mode."""
        if self.interpret is not None:
            return self.s["tile"].at[stage, values][...]
        return load(self.s["words"].at[stage, values], layout)

    def block_scales(self, stage: Array, values: Any, layout: Any) -> Array:
        if self.interpret is not None:
            return self.s["copied_scales"][stage].reshape(self.g.value_dim, -1)[values.start : values.start + TILE_ROWS]
        return load(self.s["block_scales"].at[stage, values], layout)
