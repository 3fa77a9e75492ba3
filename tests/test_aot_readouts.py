"""Steps with read-out copies or raw records compiled for an H200: refresh and read, as ``replay_pallas`` calls them."""

import dataclasses
import math
import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_kernels.hopper import cut, heads
from replayssm_jax import replay_pallas
from tests.aot_runs import (
    LAYERS,
    VECTOR,
    check_in_place,
    decode,
    kernels,
    needs_compiler,
    state_of,
    tokens_of,
)

pytestmark = needs_compiler

# layer, format, tokens, window, and warpgroups of the read and of the refresh that a multiprocessor holds at least
READS = (
    ("gdn", "nvfp4", 1, 16, 5, 3),
    ("gdn", "raw", 5, 16, 4, 4),
    ("kda", "raw", 5, 16, 4, 3),
    ("mamba2", "fp8_e4m3", 1, 16, 5, 4),
    ("kda", "bf16", 1, 16, 3, 2),
    ("gdn", "fp8_e4m3", 5, 16, 3, 2),
    ("gdn", "bf16_plane", 1, 16, 4, 3),
    ("mamba2", "nvfp4", 1, 32, 4, 3),
)


def _views(folder, kernel):
    """Views of the same bytes of shared memory: bytes of a row, rows and bytes of a tile, bytes swizzled. Barriers left out.

    What is of another size merely takes the place of what nobody reads any more.
    """
    views: dict[tuple[str, int], set] = {}
    for file in folder.glob(f"{kernel}*.after_layout_inference.txt"):
        for line in file.read_text().splitlines():
            if "mosaic_gpu.slice_smem" not in line or "barrier" in line.partition("->")[2]:
                continue
            offset, dims, bits = re.search(r"offset = (\d+) .*-> memref<([\dx]+)x[a-z]+(\d+)", line).groups()
            size, shape = int(bits) // 8, [int(n) for n in dims.split("x")]
            tile, swizzle = re.search(r"tile<\[(\d+), (\d+)\]>", line), re.search(r"swizzle<(\d+)", line)
            tile = tile and (int(tile[1]), int(tile[2]) * size)
            view = (shape[-1] * size, tile, swizzle and int(swizzle[1]))
            views.setdefault((offset, math.prod(shape) * size), set()).add(view)
    return views


def _sizes_of_views(state, tokens):
    """Bytes of what ``replay_read`` sees in two ways: a tile as it is copied and as it is loaded, and block scales likewise."""
    g = replay_pallas._geometry(state, tokens)
    unions = [ref for ref in cut._tile_scratch(g, cut.best_read_config(g)).values() if isinstance(ref, plgpu.RefUnion)]
    return {math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for union in unions for ref in union.refs}


def _steps(state, tokens, slots, lengths):
    def body(carry, _):
        state, tokens = carry
        state, out = decode(state, tokens, slots, lengths)
        return (state, dataclasses.replace(tokens, v=out)), None

    return jax.lax.scan(body, (state, tokens), None, length=5)[0]


@pytest.mark.parametrize(("name", "form", "tokens", "window", "reads", "refreshes"), READS)
def test_refresh_and_read_fit_and_update_in_place(name, form, tokens, window, reads, refreshes, compile_for_h200, tmp_path):
    """In a loop, and though the two kernels see block scales in different shapes."""
    readout = "checkpoint" if form == "raw" else form
    layer = dataclasses.replace(LAYERS[name], window=window, readout=readout, records="raw")
    arguments = state_of(layer, tokens), tokens_of(layer, tokens)
    assert replay_pallas.unsupported_shape(*arguments) is None
    compiled = compile_for_h200(_steps, *arguments, VECTOR, VECTOR)
    assert " while(" in compiled.as_text()
    found = kernels(tmp_path)
    print(found, {name: kernel.warpgroups for name, kernel in found.items()})
    assert set(found) == {"replay_read", "replay_refresh"}
    assert sum(kernel.spilled for kernel in found.values()) == 0
    assert found["replay_read"].warpgroups >= reads
    assert found["replay_refresh"].warpgroups >= refreshes
    g = replay_pallas._geometry(*arguments)
    started = heads.blocks_at_once(g, heads.answers_folded(g))
    assert found["replay_refresh"].warpgroups >= started, "blocks of a persistent grid that wait for others to end"
    check_in_place(compiled, arguments[0])
    if form == "raw":
        return
    # What one view of memory was written through is read through another: had layout inference tiled or swizzled them apart,
    # numbers would be read from where nobody has put them. Views that are not tiled may have rows of any length.
    sizes = _sizes_of_views(*arguments)
    views = [(place, own) for place, own in _views(tmp_path, "replay_read").items() if place[1] in sizes]
    assert views
    if form == "bf16_plane":
        views += _views(tmp_path, "replay_refresh").items()
    for place, own in views:
        assert len({(tile and row, tile, swizzle) for row, tile, swizzle in own}) == 1, f"views of {place} differ: {own}"
