"""Answers T tokens per row from what ordinary reads use, a read-out copy or the checkpoint C itself, and raw records.

An answer is linear in C and in the values, so a query is taken back through the tokens, and not the state forward through them.
With records and tokens 1..t, their keys k_j, values v_j, gates alpha_j and betas beta_j,

    x_t = q_t        w_j = beta_j (k_j . x_j)        x_{j-1} = alpha_j (x_j - w_j k_j)        o_t = C x_0 + sum_j w_j v_j

and without the delta rule x_{j-1} = alpha_j x_j. So no update is ever made of a rounded read, a tile is read by one vector per
token, and what is done per record is done in K numbers and not in V K. All of it in float32 but for the product with C, on the
tensor cores: C is cut into bfloat16 or float16 terms that hold a copy exactly (float32 to 2**-16), x_0 to 2**-16 or 2**-22.

A warpgroup takes the queries of one key head back, of a few value heads at once (T = 1) or of all tokens of one value head.
Rows that were due have been folded by ``refresh``, in a kernel before this one.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import decode, records
from pallas_kernels.hopper.back import take_back
from pallas_kernels.hopper.place import (
    COPY_SCALES,
    Place,
    ReadConfig,
    best_read_config,
    columns_of,
    scratch_of,
)
from pallas_kernels.hopper.readers import DRAFTS
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
    column,
    compiler_params,
    f32,
    iota,
    load,
    named,
    split,
    store,
)
from pallas_kernels.hopper.verify import Product, sum_products


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
        [B, T, H, V] geometry.value_dtype, zero past each row's length.
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

    @pl.when(live)
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


class _Reader(Place):
    """Answers a live row."""

    def run(self) -> None:
        g, config = self.g, self.config
        self.request_start()
        for head in range(config.stages):
            self.request_head(jnp.int32(head))
        self.store_numbers()
        plgpu.barrier_wait(self.s["start_arrived"])
        barrier()
        self.append()
        if g.tokens == 1:
            take_back(self, jnp.int32(0))

        def one(head: Array, carry: None) -> None:
            if g.tokens > 1:
                take_back(self, head)
            stage = head % config.stages
            plgpu.barrier_wait(self.s["head_arrived"].at[stage])
            for part in range(g.tiles):
                self.answer(head, stage, part)

            @pl.when(head + config.stages < config.heads)
            def _():
                self.all_have_read()
                self.request_head(head + config.stages)

        lax.fori_loop(0, config.heads, one, None)
        if g.tokens > 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Answers.

    def answer(self, head: Array, stage: Array, part: int) -> None:
        """64 values: reads their rows of the state, stores answers and values."""
        g, s = self.g, self.s
        values = pl.ds(part * TILE_ROWS, TILE_ROWS)
        answers = self.multiply(self.products(stage, values), s["planes"])
        answers = answers * along(load(s["scales"], COLUMNS), answers.shape, 1)
        if g.readout == "nvfp4":
            answers = answers * s["numbers"][3, COPY_SCALES + head]
        if g.readout == "fp8_e4m3":
            answers = answers * along(load(s["row_scales"].at[stage, values], VALUES), answers.shape, 0)
        answers = answers + self.weigh_records(stage, values, answers.shape)
        h = self.first_head + head
        if g.tokens == 1:
            self.answer_one(head, h, stage, values, answers)
        else:
            self.answer_many(h, stage, values, answers)

    def multiply(self, products: Iterable[list[Product]], planes: Ref) -> Array:
        """The sum of products with planes [i N, columns], and of these. [64, N]"""
        both = sum_products(products, planes.shape[0], self.interpret)
        n = columns_of(self.g, self.config)
        parts = [both[:, i : i + n] for i in range(0, planes.shape[0], n)]
        return sum(parts[1:], parts[0])

    def weigh_records(self, stage: Array, values: Any, shape: tuple[int, ...]) -> Array:
        """What the records add to the answers: their values by the weights in "trace"."""
        s, ring = self.s, dataclasses.replace(self.ring, update=self.s["updates"].at[stage, :, values])
        if "weighing" in s:
            (terms,) = records.sources(ring, None)
            weights, columns = s["weighing"], range(0, self.g.window, DRAFTS)
            return self.multiply(([(terms[:, i : i + DRAFTS], weights, pl.ds(i, DRAFTS))] for i in columns), weights)

        def one(j: Array, answers: Array) -> Array:
            row = ring.row(j)
            value = load(s["updates"].at[stage, row, values], VALUES).astype(f32)
            return answers + along(value, shape, 0) * along(load(s["trace"].at[row], COLUMNS), shape, 1)

        return lax.fori_loop(0, ring.count, one, plgpu.layout_cast(jnp.zeros(shape, f32), STATE))

    def answer_one(self, head: Array, h: Array, stage: Array, values: Any, answers: Array) -> None:
        g, s = self.g, self.s
        answer = jnp.sum(jnp.where(iota(answers.shape, 1, STATE) == head, answers, 0.0), axis=1)
        value = load(s["values"].at[stage, 0, values], VALUES)
        answer = answer + value.astype(f32) * s["trace"][g.window, head]
        store(self.out.at[self.b, 0, h, values], answer.astype(g.value_dtype))
        store(self.pool.update.at[self.slot, h, self.ring.row(self.recorded), values], value)

    def answer_many(self, h: Array, stage: Array, values: Any, answers: Array) -> None:
        g, s, shape = self.g, self.s, answers.shape
        for i in range(g.tokens):
            value = load(s["values"].at[stage, i, values], VALUES)
            live = iota((TILE_ROWS,), 0, VALUES) < jnp.where(i < self.length, TILE_ROWS, 0)
            weights = along(load(s["trace"].at[g.window + i], COLUMNS), shape, 1)
            answers = answers + along(jnp.where(live, value.astype(f32), 0.0), shape, 0) * weights

            @pl.when(i < self.length)
            def _(i: int = i, value: Array = value) -> None:
                store(self.pool.update.at[self.slot, h, self.ring.row(self.recorded + i), values], value)

        outputs = jnp.where(iota(shape, 1, STATE) < self.length, answers, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        barrier()
        if jnp.dtype(g.value_dtype).itemsize == 2:
            store(s["answers"].T, outputs.astype(g.value_dtype))
        else:  # what transposes on its way to shared memory takes 16 bits
            for i in range(g.tokens):
                store(s["answers"].at[i], column(outputs, i))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["answers"].at[pl.ds(0, g.tokens)], self.out.at[self.b, :, h, values])

    def products(self, stage: Array, values: Any) -> Iterator[list[Product]]:
        """Products of a tile with the planes, 32 columns at a time."""
        g, s, planes = self.g, self.s, self.s["planes"]
        whole = None
        if g.readout == "fp8_e4m3":
            whole = decode.decode_fp8(self.codes(stage, values), self.interpret)
        if g.readout == "nvfp4":
            if self.interpret is None:
                scales = load(s["block_scales"].at[stage, values], decode.block_scales_layout(g.key_dim))
            else:
                scales = s["copied_scales"][stage].reshape(g.value_dim, -1)[values.start : values.start + TILE_ROWS]
            whole = decode.decode_nvfp4(self.codes(stage, values), scales, self.interpret)
        for first in range(0, g.key_dim, SWIZZLED):
            columns = pl.ds(first, SWIZZLED)
            if whole is not None:
                yield [(whole[:, first : first + SWIZZLED], planes, columns)]
                continue
            if g.readout == "bf16" and self.interpret is not None:
                state = lax.bitcast_convert_type(s["tile"].at[stage, values, columns][...], bf16)
            else:
                state = load(s["numbers_of_tile" if g.readout == "bf16" else "tile"].at[stage, values, columns], STATE)
            if state.dtype != f32:
                yield [(state, planes, columns)]
                continue
            high, low = split(state)
            yield [(high, planes, columns), (low, planes, columns)]

    def codes(self, stage: Array, values: Any) -> Array:
        if self.interpret is not None:
            return self.s["tile"].at[stage, values][...]
        words = self.s["words"]
        return load(words.at[stage, values], decode.words_layout(words.shape[-1]))
