"""What is compiled for an H200 on a machine without one, and what the compilers say of it."""

import dataclasses
import functools
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import replayssm_jax as rs
from replayssm_jax import replay_pallas
from replayssm_jax.pointer import after_verify
from tests.cases import Case

needs_compiler = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="compiling for a GPU needs jax's CUDA 13 plugin; `make aot` fetches it",
    ),
]

ROWS, SLOTS = 256, 384  # different, so that no token array has a pool's shape
# XLA's description of the GPU to compile for (a GpuTargetConfigProto), as a process on an H200 reports it, shortened.
H200 = Path(__file__).with_name("h200_target.txtpb")

_layer = functools.partial(Case, activations="bfloat16", factors=True, records="update")
LAYERS = {
    case.id: case
    for case in (
        _layer(id="gdn", heads=(64, 16), dims=(128, 128), delta_rule=True, gate="head"),
        _layer(id="kda", heads=(32, 32), dims=(128, 128), delta_rule=True, gate="channel"),
        _layer(id="mamba2", heads=(128, 8), dims=(64, 128), delta_rule=False, gate="head"),
        _layer(id="mamba2-80", heads=(96, 8), dims=(80, 128), delta_rule=False, gate="head"),
        _layer(id="kda-f32", heads=(32, 32), dims=(128, 128), delta_rule=True, gate="channel", activations="float32"),
        _layer(id="gdn-192x96", heads=(30, 30), dims=(192, 96), delta_rule=True, gate="head", checkpoint="bfloat16"),
    )
}

# What an instruction that only names memory may be; anything else with a pool's shape moves a pool.
HARMLESS = {"parameter", "custom-call", "tuple", "get-tuple-element", "while", "bitcast", "call", "conditional"}


VECTOR, MASK = jax.ShapeDtypeStruct((ROWS,), jnp.int32), jax.ShapeDtypeStruct((ROWS,), jnp.bool_)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the compilers say of a kernel."""

    name: str
    registers: int
    shared: int
    spilled: int

    @property
    def warpgroups(self) -> int:
        """That fit a Hopper multiprocessor: 65,536 registers, dealt out in eights, and 228 KiB, one more of them per CTA."""
        return min(65536 // (-(-self.registers // 8) * 8 * 128), 233472 // (self.shared + 1024))


def kernels(folder: Path) -> dict[str, Kernel]:
    """The kernels of a compiled call by name."""
    return {kernel.name: kernel for kernel in map(_kernel, folder.glob("*.ptxas"))}


def _kernel(ptxas: Path) -> Kernel:
    name = ptxas.stem.rpartition("_")[0]  # a number ends it, which need not be the same for all that is said of a kernel
    report, resources = ptxas.read_text(), next(ptxas.parent.glob(f"{name}_*.resources.txt")).read_text()
    barriers = re.findall(r"num_barriers=(\d+), orders_tensor_core=\w+\): (\d+)", resources)
    return Kernel(
        name=name,
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", report)),
        shared=int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]) + 8 * sum(int(n) * int(m) for n, m in barriers),
        spilled=sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
    )


def state_of(layer: Case, drafts: int, slots: int = SLOTS):
    policy = dataclasses.replace(layer.policy, max_draft=drafts)
    return jax.eval_shape(lambda: rs.init_state(layer.recurrence, policy, slots))


def tokens_of(layer: Case, drafts: int) -> rs.Tokens:
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


def num_bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def moves(compiled, states) -> list[str]:
    """Instructions of the program that make an array of a checkpoint's, copy's or ring's shape and do not just name one."""
    pools = ((state.checkpoint, state.buffer, state.readout) for state in states)
    shapes = {x.shape for x in jax.tree.leaves(list(pools))}
    found = []
    for line in compiled.as_text().splitlines():
        if match := re.search(r" = (.*?) ([a-z][\w-]*)\(", line):
            results = {tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\[([\d,]*)\]", match[1])}
            if results & shapes and match[2] not in HARMLESS:
                found.append(line.strip()[:200])
    return found


def check_in_place(compiled, *states) -> None:
    """Every array of the state is updated where it lies, and what the call needs besides is far smaller than a checkpoint."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(states)
    assert memory.temp_size_in_bytes < num_bytes(states[0].checkpoint) / 20
    assert moves(compiled, states) == []


def decode(state, tokens, slots, lengths):
    """One verify of which the device decides how much is kept."""
    after, out = replay_pallas.verify(state, tokens, slots, lengths)
    pointer = after_verify(state.pointer, slots, lengths)
    accepted = jnp.minimum(1 + jnp.argmax(out[:, :, 0, 0], axis=1).astype(jnp.int32), lengths)
    return dataclasses.replace(after, pointer=rs.commit(pointer, accepted, slots)), out
