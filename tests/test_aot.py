"""The GPU kernels compiled for an H200 on a machine without one: no spills, enough warpgroups at a time, no copy of a pool.

``make aot`` runs these; the compiler comes from jax's CUDA plugin, which ``.ci/setup aot`` fetches. Nothing is executed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from replayssm_jax import replay_pallas
from tests.aot_runs import (
    H200,
    LAYERS,
    MASK,
    ROWS,
    SLOTS,
    VECTOR,
    check_in_place,
    decode,
    kernels,
    moves,
    needs_compiler,
    num_bytes,
    state_of,
    tokens_of,
)

pytestmark = needs_compiler

DRAFTS = {"step": 1, "verify": 5, "flush": 5}
# Warpgroups (CTAs of 128 threads) that a multiprocessor holds at least: the kernels hide latency behind one another.
WARPGROUPS = {
    ("gdn", "step"): 4,
    ("gdn", "verify"): 4,
    ("gdn", "flush"): 5,
    ("kda", "step"): 3,
    ("kda", "verify"): 3,
    ("kda", "flush"): 4,
    ("kda-f32", "verify"): 2,
    ("mamba2", "step"): 4,
    ("mamba2", "verify"): 4,
    ("mamba2", "flush"): 5,
    ("mamba2-80", "step"): 4,
    ("mamba2-80", "flush"): 5,
    ("gdn-192x96", "step"): 4,
    ("gdn-192x96", "flush"): 9,
}


@pytest.mark.parametrize(("name", "call"), [pytest.param(*key, id="-".join(key)) for key in WARPGROUPS])
def test_a_kernel_fits_and_updates_in_place(name, call, compile_for_h200, tmp_path):
    layer, drafts = LAYERS[name], DRAFTS[call]
    state, tokens = state_of(layer, drafts), tokens_of(layer, drafts)
    assert replay_pallas.unsupported_shape(state, tokens) is None
    if call == "flush":
        compiled = compile_for_h200(replay_pallas.flush, state, VECTOR, MASK)
    else:
        compiled = compile_for_h200(replay_pallas.verify, state, tokens, VECTOR, VECTOR)
    (kernel,) = kernels(tmp_path).values()
    print(kernel, kernel.warpgroups)
    assert kernel.name == f"replay_{call}"
    assert kernel.spilled == 0
    assert kernel.warpgroups >= WARPGROUPS[name, call]
    check_in_place(compiled, state)


def test_a_scan_over_tokens_through_two_layers_copies_nothing(compile_for_h200):
    def scan(layers, tokens, slots, lengths):
        def body(carry, _):
            (first, second), tokens = carry
            first, out = decode(first, tokens, slots, lengths)
            second, out = decode(second, dataclasses.replace(tokens, v=out), slots, lengths)
            return ((first, second), dataclasses.replace(tokens, v=out)), out[:, 0, 0]

        (layers, _), out = jax.lax.scan(body, (layers, tokens), None, length=5)
        return layers, out

    layer = LAYERS["mamba2"]
    layers = state_of(layer, 1), state_of(layer, 1)
    compiled = compile_for_h200(scan, layers, tokens_of(layer, 1), VECTOR, VECTOR)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 2
    check_in_place(compiled, *layers)


def test_a_scan_over_a_stack_of_two_layers_copies_nothing(compile_for_h200):
    """The stack is one pool in which each layer has slots of its own; as a leading axis it would be sliced, which copies it."""

    def scan(stack, tokens, slots, lengths):
        def body(carry, layer):
            stack, tokens = carry
            stack, out = decode(stack, tokens, slots + layer * SLOTS, lengths)
            return (stack, dataclasses.replace(tokens, v=out)), None

        return jax.lax.scan(body, (stack, tokens), jnp.arange(2))[0]

    layer = LAYERS["gdn"]
    stack = state_of(layer, 1, 2 * SLOTS)
    compiled = compile_for_h200(scan, stack, tokens_of(layer, 1), VECTOR, VECTOR)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 1
    check_in_place(compiled, stack)


def test_speculative_decoding_in_a_while_loop_copies_nothing(compile_for_h200):
    def loop(state, tokens, slots, lengths):
        def body(carry):
            state, tokens, count = carry
            state, out = decode(state, tokens, slots, lengths)
            return state, dataclasses.replace(tokens, v=out), count + 1

        return jax.lax.while_loop(lambda carry: carry[2] < 5 + lengths[0], body, (state, tokens, 0))

    layer, drafts = LAYERS["mamba2"], 2
    state = state_of(layer, drafts)
    compiled = compile_for_h200(loop, state, tokens_of(layer, drafts), VECTOR, VECTOR)
    assert " while(" in compiled.as_text()
    check_in_place(compiled, state)


def test_heads_split_over_two_gpus_are_updated_in_place():
    """A kernel under shard_map, as ``sharding`` runs it: every device has half of the heads and keeps them where they lie."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200.read_text(), topology="1x1x2")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(2,), axis_names=("model",))
    layer = LAYERS["gdn"]
    half = dataclasses.replace(layer, heads=(layer.heads[0] // 2, layer.heads[1] // 2)).recurrence
    state, tokens = state_of(layer, 1, ROWS), tokens_of(layer, 1)

    def on_each(state, tokens, lengths):
        after, out = replay_pallas.verify(dataclasses.replace(state, recurrence=half), tokens, None, lengths)
        return dataclasses.replace(after, recurrence=state.recurrence), out

    by_head, whole = PartitionSpec(None, "model"), PartitionSpec()
    pools = jax.tree.map(lambda pool: by_head if pool.ndim > 1 else whole, state)
    specs = pools, jax.tree.map(lambda _: PartitionSpec(None, None, "model"), tokens), whole
    run = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=(pools, specs[1].v), check_vma=False)
    placed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        (state, tokens, VECTOR),
        specs,
    )
    compiled = jax.jit(run, donate_argnums=0).lower(*placed).compile()
    local = jax.tree.map(
        lambda pool: jax.ShapeDtypeStruct((ROWS, pool.shape[1] // 2, *pool.shape[2:]), pool.dtype), state.buffer
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= (num_bytes(state.checkpoint) + num_bytes(state.buffer)) // 2
    checkpoint = jax.ShapeDtypeStruct((ROWS, half.num_value_heads, *state.checkpoint.shape[2:]), state.checkpoint.dtype)
    assert moves(compiled, [dataclasses.replace(state, checkpoint=checkpoint, buffer=local)]) == []
    assert "all-gather" not in compiled.as_text()


def test_the_search_finds_a_copy(compile_for_h200):
    """The same call without donation must keep its input; the tests above would see that."""
    # of a size of its own: what a process has compiled before is reported once
    state = state_of(LAYERS["mamba2"], DRAFTS["flush"], SLOTS + 8)
    compiled = compile_for_h200(replay_pallas.flush, state, VECTOR, MASK, donate=())
    assert moves(compiled, [state])
