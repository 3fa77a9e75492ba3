"""The GPU kernels compiled for an H200 on a machine without one: no spills, enough warpgroups at a time, no copy of a pool.

``make aot`` runs these; the compiler comes from jax's CUDA plugin, which ``.ci/setup aot`` fetches. Nothing is executed.
"""

import dataclasses
import functools
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import replayssm_jax as rs
from replayssm_jax import replay_pallas
from replayssm_jax.pointer import after_verify
from tests.cases import Case

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="compiling for a GPU needs jax's CUDA 13 plugin; `make aot` fetches it",
    ),
]

ROWS, SLOTS = 256, 384  # different, so that no token array has a pool's shape
DRAFTS = {"step": 1, "verify": 5, "flush": 5}
# XLA's description of the GPU to compile for (a GpuTargetConfigProto), as a process on an H200 reports it, shortened.
H200 = Path(__file__).with_name("h200_target.txtpb")

_layer = functools.partial(Case, activations="bfloat16", factors=True)
LAYERS = {
    case.id: case
    for case in (
        _layer(id="gdn", heads=(64, 16), dims=(128, 128), delta_rule=True, gate="head"),
        _layer(id="kda", heads=(32, 32), dims=(128, 128), delta_rule=True, gate="channel"),
        _layer(id="mamba2", heads=(128, 8), dims=(64, 128), delta_rule=False, gate="head"),
        _layer(id="mamba2-80", heads=(96, 8), dims=(80, 128), delta_rule=False, gate="head"),
        _layer(id="gdn-192x96", heads=(30, 30), dims=(192, 96), delta_rule=True, gate="head", checkpoint="bfloat16"),
    )
}

# Warpgroups (CTAs of 128 threads) that a multiprocessor holds at least: the kernels hide latency behind one another.
WARPGROUPS = {
    ("gdn", "step"): 3,
    ("gdn", "verify"): 3,
    ("gdn", "flush"): 5,
    ("kda", "step"): 3,
    ("kda", "verify"): 2,
    ("kda", "flush"): 4,
    ("mamba2", "step"): 4,
    ("mamba2", "verify"): 3,
    ("mamba2", "flush"): 5,
    ("mamba2-80", "step"): 3,
    ("mamba2-80", "flush"): 5,
    ("gdn-192x96", "step"): 3,
    ("gdn-192x96", "flush"): 9,
}
# What an instruction that only names memory may be; anything else with a pool's shape moves a pool.
HARMLESS = {"parameter", "custom-call", "tuple", "get-tuple-element", "while", "bitcast", "call", "conditional"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the compilers say of the one kernel of a call."""

    name: str
    registers: int
    shared: int
    spilled: int

    @property
    def warpgroups(self) -> int:
        """That fit a Hopper multiprocessor: 65,536 registers, dealt out in eights, and 228 KiB, one more of them per CTA."""
        return min(65536 // (-(-self.registers // 8) * 8 * 128), 233472 // (self.shared + 1024))


@pytest.fixture(scope="module")
def mesh():
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200.read_text(), topology="1x1x1")
    return topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("gpu",))


@pytest.fixture
def compile_for_h200(mesh, monkeypatch, tmp_path):
    """``compile_for_h200(call, state, *arguments)``: compiled with the state donated; ``_kernel`` finds what it reports."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_RESOURCES", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    placed = NamedSharding(mesh, PartitionSpec())

    def compile_it(call, *arguments, donate=(0,)):
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(call, donate_argnums=donate).lower(*arguments).compile()

    return compile_it


def _kernel(folder: Path) -> Kernel:
    (ptxas,), (mosaic,) = folder.glob("*.ptxas"), folder.glob("*.resources.txt")
    report, resources = ptxas.read_text(), mosaic.read_text()
    barriers = re.findall(r"num_barriers=(\d+), orders_tensor_core=\w+\): (\d+)", resources)
    return Kernel(
        name=ptxas.stem.rpartition("_")[0],  # a number ends it
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", report)),
        shared=int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]) + 8 * sum(int(n) * int(m) for n, m in barriers),
        spilled=sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
    )


def _state(layer: Case, drafts: int, slots: int = SLOTS):
    policy = dataclasses.replace(layer.policy, max_draft=drafts)
    return jax.eval_shape(lambda: rs.init_state(layer.recurrence, policy, slots))


def _tokens(layer: Case, drafts: int) -> rs.Tokens:
    r = layer.recurrence

    def array(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((ROWS, drafts, *dims), dtype)

    half = jnp.dtype(layer.activations)
    return rs.Tokens(
        q=array(r.num_key_heads, r.key_dim, dtype=half),
        k=array(r.num_key_heads, r.key_dim, dtype=half),
        v=array(r.num_value_heads, r.value_dim, dtype=half),
        log_decay=array(*r.decay_dims),
        beta=array(r.num_value_heads),
        q_scale=array(r.num_key_heads),
        k_scale=array(r.num_key_heads),
    )


def _bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _moves(compiled, states) -> list[str]:
    """Instructions of the optimised program that make an array of a checkpoint's or a ring's shape and do not just name one."""
    shapes = {x.shape for state in states for x in jax.tree.leaves((state.checkpoint, state.buffer))}
    found = []
    for line in compiled.as_text().splitlines():
        if match := re.search(r" = (.*?) ([a-z][\w-]*)\(", line):
            results = {tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\[([\d,]*)\]", match[1])}
            if results & shapes and match[2] not in HARMLESS:
                found.append(line.strip()[:200])
    return found


def _check_in_place(compiled, *states) -> None:
    """Every array of the state is updated where it lies, and what the call needs besides is far smaller than a checkpoint."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= _bytes(states)
    assert memory.temp_size_in_bytes < _bytes(states[0].checkpoint) / 20
    assert _moves(compiled, states) == []


VECTOR, MASK = jax.ShapeDtypeStruct((ROWS,), jnp.int32), jax.ShapeDtypeStruct((ROWS,), jnp.bool_)


@pytest.mark.parametrize(("name", "call"), [pytest.param(*key, id="-".join(key)) for key in WARPGROUPS])
def test_a_kernel_fits_and_updates_in_place(name, call, compile_for_h200, tmp_path):
    layer, drafts = LAYERS[name], DRAFTS[call]
    state, tokens = _state(layer, drafts), _tokens(layer, drafts)
    assert replay_pallas.unsupported_shape(state, tokens) is None
    if call == "flush":
        compiled = compile_for_h200(replay_pallas.flush, state, VECTOR, MASK)
    else:
        compiled = compile_for_h200(replay_pallas.verify, state, tokens, VECTOR, VECTOR)
    kernel = _kernel(tmp_path)
    print(kernel, kernel.warpgroups)
    assert kernel.name == f"replay_{call}"
    assert kernel.spilled == 0
    assert kernel.warpgroups >= WARPGROUPS[name, call]
    _check_in_place(compiled, state)


def _decode(state, tokens, slots, lengths):
    """One verify of which the device decides how much is kept."""
    after, out = replay_pallas.verify(state, tokens, slots, lengths)
    pointer = after_verify(state.pointer, slots, lengths)
    accepted = jnp.minimum(1 + jnp.argmax(out[:, :, 0, 0], axis=1).astype(jnp.int32), lengths)
    return dataclasses.replace(after, pointer=rs.commit(pointer, accepted, slots)), out


def test_a_scan_over_tokens_through_two_layers_copies_nothing(compile_for_h200):
    def scan(layers, tokens, slots, lengths):
        def body(carry, _):
            (first, second), tokens = carry
            first, out = _decode(first, tokens, slots, lengths)
            second, out = _decode(second, dataclasses.replace(tokens, v=out), slots, lengths)
            return ((first, second), dataclasses.replace(tokens, v=out)), out[:, 0, 0]

        (layers, _), out = jax.lax.scan(body, (layers, tokens), None, length=5)
        return layers, out

    layer = LAYERS["mamba2"]
    layers = _state(layer, 1), _state(layer, 1)
    compiled = compile_for_h200(scan, layers, _tokens(layer, 1), VECTOR, VECTOR)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 2
    _check_in_place(compiled, *layers)


def test_a_scan_over_a_stack_of_two_layers_copies_nothing(compile_for_h200):
    """The stack is one pool in which each layer has slots of its own; as a leading axis it would be sliced, which copies it."""

    def scan(stack, tokens, slots, lengths):
        def body(carry, layer):
            stack, tokens = carry
            stack, out = _decode(stack, tokens, slots + layer * SLOTS, lengths)
            return (stack, dataclasses.replace(tokens, v=out)), None

        return jax.lax.scan(body, (stack, tokens), jnp.arange(2))[0]

    layer = LAYERS["gdn"]
    stack = _state(layer, 1, 2 * SLOTS)
    compiled = compile_for_h200(scan, stack, _tokens(layer, 1), VECTOR, VECTOR)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 1
    _check_in_place(compiled, stack)


def test_speculative_decoding_in_a_while_loop_copies_nothing(compile_for_h200):
    def loop(state, tokens, slots, lengths):
        def body(carry):
            state, tokens, count = carry
            state, out = _decode(state, tokens, slots, lengths)
            return state, dataclasses.replace(tokens, v=out), count + 1

        return jax.lax.while_loop(lambda carry: carry[2] < 5 + lengths[0], body, (state, tokens, 0))

    layer, drafts = LAYERS["mamba2"], DRAFTS["verify"]
    state = _state(layer, drafts)
    compiled = compile_for_h200(loop, state, _tokens(layer, drafts), VECTOR, VECTOR)
    assert " while(" in compiled.as_text()
    _check_in_place(compiled, state)


def test_heads_split_over_two_gpus_are_updated_in_place():
    """A kernel under shard_map, as ``sharding`` runs it: every device has half of the heads and keeps them where they lie."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200.read_text(), topology="1x1x2")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(2,), axis_names=("model",))
    layer = LAYERS["gdn"]
    half = dataclasses.replace(layer, heads=(layer.heads[0] // 2, layer.heads[1] // 2)).recurrence
    state, tokens = _state(layer, 1, ROWS), _tokens(layer, 1)

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
    assert compiled.memory_analysis().alias_size_in_bytes >= (_bytes(state.checkpoint) + _bytes(state.buffer)) // 2
    checkpoint = jax.ShapeDtypeStruct((ROWS, half.num_value_heads, *state.checkpoint.shape[2:]), state.checkpoint.dtype)
    assert _moves(compiled, [dataclasses.replace(state, checkpoint=checkpoint, buffer=local)]) == []
    assert "all-gather" not in compiled.as_text()


def test_the_search_finds_a_copy(compile_for_h200):
    """The same call without donation must keep its input; the tests above would see that."""
    state = _state(LAYERS["mamba2"], DRAFTS["flush"])
    compiled = compile_for_h200(replay_pallas.flush, state, VECTOR, MASK, donate=())
    assert _moves(compiled, [state])
