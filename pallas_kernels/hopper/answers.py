"""What becomes of a tile's products with the queries: answers of T tokens, records and tokens added, on their way out."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import weigh
from pallas_kernels.hopper.back import take_back
from pallas_kernels.hopper.cut import columns_of
from pallas_kernels.hopper.place import Place
from pallas_kernels.hopper.products import Product, sum_products
from pallas_kernels.hopper.request import Copy, request
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    MMA_SUM,
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Ref,
    along,
    barrier,
    column,
    f32,
    iota,
    load,
    split,
    store,
)


class Answers(Place):
    """Answers of a live row."""

    def sum_products(self, products: Iterator[list[Product]], own: Any) -> Array:
        """Products of 64 rows of the state with planes as answers to every reader, but for a copy's scales. [64, N]"""
        planes, n = self.s["planes"].at[own], columns_of(self.g)
        both = sum_products(products, planes.shape[0], self.interpret)
        parts = [both[:, i : i + n] for i in range(0, planes.shape[0], n)]
        answers = sum(parts[1:], parts[0])
        return answers * along(load(self.s["scales"].at[own], COLUMNS), answers.shape, 1)

    def store_answers(self, answers: Array, h: Array, values: Any, in_flight: int = 0) -> None:
        """Starts storing answers [64, N] to T tokens, zero past the row's length; ``in_flight`` younger copies may go on."""
        g, s = self.g, self.s
        outputs = jnp.where(iota(answers.shape, 1, STATE) < self.length, answers, 0.0)
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        barrier()
        if jnp.dtype(g.value_dtype).itemsize == 2:
            store(s["answers"].T, outputs.astype(g.value_dtype))
        else:  # what transposes on its way to shared memory takes 16 bits
            for i in range(g.tokens):
                store(s["answers"].at[i], column(outputs, i))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["answers"].at[pl.ds(0, g.tokens)], self.out.at[self.b, :, h, values])

    def record_values(self, h: Array, stage: Array) -> None:
        """Records the tokens' values."""
        g, s = self.g, self.s

        def record(i: Array, carry: None) -> None:
            row = self.ring.row(self.recorded + i)
            for part in range(g.tiles):
                values = pl.ds(part * TILE_ROWS, TILE_ROWS)
                store(self.pool.update.at[self.slot, h, row, values], load(s["values"].at[stage, i, values], VALUES))

        lax.fori_loop(0, self.length, record, None)


@dataclasses.dataclass
class Folded(Answers):
    """Answers of one value head of a row whose records are folded: from tiles in shared memory, and from the tokens alone."""

    folded: bool = True
    values_late: bool = False  # whether values take the place of what queries are taken back through

    def request(self) -> None:
        """Starts copying what is known of the tokens."""
        g, s, arrived = self.g, self.s, self.s["start_arrived"]
        heads, key_heads = pl.ds(self.first_head, 1), pl.ds(self.key_head, 1)
        copies = [
            Copy(self.tokens.q.at[self.b, :, key_heads], s["queries"], arrived),
            Copy(self.tokens.k.at[self.b, :, key_heads], s["token_keys"], arrived),
        ]
        if g.channel_gate:
            copies.append(Copy(self.tokens.log_decay.at[self.b, :, heads], s["gates"], arrived))
        if not self.values_late:
            copies.append(self._copy_of_values())
        request(copies, self.interpret, by_one_warp=g.channel_gate)

    def _copy_of_values(self) -> Copy:
        values = self.s["values"].at[0, pl.ds(0, self.g.tokens)]
        return Copy(self.tokens.v.at[self.b, :, self.first_head], values, self.s["values_arrived"])

    def prepare(self) -> None:
        """Records the tokens but for their values, and takes their queries back."""
        self.store_numbers()
        plgpu.barrier_wait(self.s["start_arrived"])
        barrier()
        self.append()
        take_back(self)
        barrier()
        if self.values_late:  # everybody has read what they overwrite
            request([self._copy_of_values()], self.interpret)

    def finish(self) -> None:
        """Records the tokens' values, after the last tile."""
        self.record_values(self.first_head, jnp.int32(0))

    def answer(self, tile: Ref, t: Any, in_flight: int) -> None:
        """Answers from a tile [64, K] of the checkpoint, the t-th."""
        values = pl.ds(t * TILE_ROWS, TILE_ROWS)
        answers = self.sum_products(self._products(tile), 0)

        @pl.when(t == 0)
        def _() -> None:
            plgpu.barrier_wait(self.s["values_arrived"])

        of_tokens = self.s["values"].at[0, :, values]
        weights = weigh.weights_of_tokens(self)
        if weights is None:
            answers = weigh.add_tokens_one_by_one(self, answers, of_tokens, 0)
        else:
            sums = plgpu.layout_cast(answers, MMA_SUM)
            answers = plgpu.layout_cast(weigh.add_sources(self, sums, [weigh.live_tokens(self, of_tokens)], weights), STATE)
        self.store_answers(answers, self.first_head, values, in_flight)

    def _products(self, tile: Ref) -> Iterator[list[Product]]:
        planes = self.s["planes"].at[0]
        for first in range(0, self.g.key_dim, SWIZZLED):
            columns = pl.ds(first, SWIZZLED)
            yield [(term, planes, columns) for term in terms_of(load(tile.at[:, columns], STATE))]


def terms_of(state: Array) -> tuple[Array, ...]:
    """The state as the tensor cores take it: float32 as the sum of two bfloat16."""
    return split(state) if state.dtype == f32 else (state,)
