"""Starts a kernel: how the work is cut, what shared memory it needs, which rows are live."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import records
from pallas_kernels.hopper.compiler import compiler_params
from pallas_kernels.hopper.shared import decays, named, one_of, state_tile, with_terms
from pallas_kernels.hopper.stream import Call, Stream, StreamConfig, numbers_width, store_answers
from pallas_kernels.hopper.tiles import TILE_ROWS, VALUES, Array, Geometry, Interpret, Pool, Ref, Rows, Tokens, f32, store

_MULTIPROCESSORS = 132


def best_config(geometry: Geometry) -> StreamConfig:
    """As many heads of one key head as share its products, but enough warpgroups to fill the GPU.

    Two heads a step, up to eight a verify: see ``benchmarks/results/kernels_sweep_h200.json``.
    """
    g = geometry
    enough, most = max(1, g.rows * g.value_heads // (4 * _MULTIPROCESSORS)), 2 if g.tokens == 1 else 8
    return StreamConfig(heads=max(n for n in (1, 2, 3, 4, 8) if g.group_size % n == 0 and n <= min(enough, most)))


def launch(
    name: str,
    work: Callable[[Stream], None],
    scratch: dict[str, Any],
    operands: tuple[Rows, Tokens, Pool],
    geometry: Geometry,
    config: StreamConfig,
    scalar_reductions: bool,
    interpret: Interpret,
) -> Array:
    """Runs ``work`` for every live row and group of heads; answers of all other rows are zero.

    Args:
        name: of the kernel, as profilers show it.
        work: what a warpgroup does.
        scratch: shared memory besides ``common_scratch``. "answers" [n, 64] holds the outputs of a tile; the first two rows of
            "numbers" are for the ring's log decays and weights.
        operands: of the call.
        geometry: sizes of the call.
        config: how to cut it.
        scalar_reductions: whether ``work`` reduces an array to a scalar.
        interpret: parameters of interpret mode, None on a GPU.

    Returns:
        [B, T, H, V] v's dtype.
    """
    g, (rows, tokens, pool) = geometry, operands

    def body(*refs: Ref, **scratch: Ref) -> None:
        *inputs, out = refs
        call = Call(Rows(*inputs[:4]), Tokens(*inputs[4:11]), Pool(*inputs[11:]), out, g, config, interpret)
        _row(call, work, named(scratch))

    body.__name__ = name
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((g.rows, g.tokens, g.value_heads, g.value_dim), g.value_dtype),
        grid=(g.rows * g.value_heads // config.heads,),
        grid_names=("heads",),
        scratch_types=common_scratch(g, config) | scratch,
        compiler_params=compiler_params(scalar_reductions),
        interpret=interpret,
    )
    return kernel(*rows, *tokens, *(x for x in pool if x is not None))


def common_scratch(g: Geometry, config: StreamConfig) -> dict[str, Any]:
    """Shared memory of every stream, but for what the kernel itself has of the same name."""
    chunks, whole = g.window // config.ring_chunk, g.tile_rows == TILE_ROWS
    update_copies = chunks if whole else g.window
    head_copies = records.copies(g, config.ring_chunk) - chunks - update_copies + g.channel_gate
    width = numbers_width(g, config)
    scratch = {
        "tile": state_tile(g),
        **one_of(with_terms("updates", g.window, g.update_dtype, g.terms if g.tokens > 1 else 2)),
        "keys_arrived": plgpu.Barrier(num_arrivals=2 + chunks + (4 - g.channel_gate if width else 0)),
        "head_arrived": plgpu.Barrier(num_arrivals=head_copies),
        "inputs_arrived": plgpu.Barrier(num_arrivals=update_copies + (1 if whole else g.tokens)),
        "tile_arrived": plgpu.Barrier(),
    }
    if width:  # numbers by token: log decay, beta, scales of query and key
        scratch["tokens"] = plgpu.SMEM((4, -(-g.tokens // 8) * 8, width), f32)
    if g.channel_gate:
        scratch |= decays(g)
        scratch["gates"] = plgpu.SMEM((g.tokens, g.key_dim), f32)
        scratch["total"] = plgpu.SMEM((2, g.key_dim), f32)  # left of the checkpoint at the first token, if it was not folded
    return scratch


def _row(call: Call, work: Callable[[Stream], None], scratch: dict[str, Ref]) -> None:
    """One warpgroup: finds its row and heads, and works on them if the row is live."""
    g, rows, answers = call.g, call.rows, scratch["answers"]
    index = lax.axis_index("heads")
    groups = g.value_heads // call.config.heads
    first_head, b = (index % groups) * call.config.heads, index // groups  # heads of one key head side by side: its keys hit L2
    slot, length = rows.slots[b], rows.lengths[b]
    live = (slot >= 0) & (slot < g.slots) & (length > 0)

    @pl.when(live)
    def _():
        work(Stream(call, b, first_head, slot, length, scratch))

    @pl.when(~live)
    def _():
        for i in range(answers.shape[0]):
            store(answers.at[i], plgpu.layout_cast(jnp.zeros((TILE_ROWS,), g.value_dtype), VALUES))
        plgpu.commit_smem()

        def one(t: Array, carry: None) -> None:
            store_answers(call, answers, b, first_head + t // g.tiles, (t % g.tiles) * g.tile_rows)

        lax.fori_loop(0, call.config.heads * g.tiles, one, None)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
