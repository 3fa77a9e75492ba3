"""The compiled decode loop: where it writes states, and that it copies none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax import ReplayPolicy
from replayssm_jax.decoding import SamplingParams
from replayssm_jax.decoding.pool import _decode
from replayssm_jax.mixers import MixerCache
from tests.decoding_runs import engine

# What hands an array on, or names a part of it, and writes nothing.
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (.*?) ([a-z][\w-]*)\(")


def _program(drafts: str, slots: int) -> tuple[str, str]:
    """The loop's optimised program, and the shape of its checkpoints as the program writes it."""
    runs = engine(
        "qwen3_5", drafts, num_slots=slots, policy=ReplayPolicy(window=24, max_draft=4)
    )  # no ring has a state's shape
    (checkpoint,) = {x.checkpoint.shape for x in runs.pool.sequences.cache.layers if isinstance(x, MixerCache)}
    arguments = runs.pool._graph, runs.pool._weights, runs.pool.sequences, np.int32(1), np.int32(1), None
    return _decode.lower(*arguments).compile().as_text(), "f32[" + ",".join(map(str, checkpoint)) + "]"


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if (head := re.match(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)) is not None:
            lines = found.setdefault(head[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def _called(lines: list[str], names: dict[str, list[str]]) -> set[str]:
    return {name for line in lines for name in re.findall(r"%([\w.-]+)", line) if name in names}


def _writers(text: str, shape: str) -> tuple[list[str], list[str]]:
    """Instructions that make an array of that shape: outside of every branch of a conditional, and inside of one."""
    names = _computations(text)
    inside: set[str] = set()
    for line in text.splitlines():
        if " conditional(" in line:
            branches = line[line.index(" conditional(") :].split(")", 1)[1]
            inside |= {name for name in re.findall(r"%([\w.-]+)", branches) if name in names}
    while more := {name for one in inside for name in _called(names[one], names)} - inside:
        inside |= more
    found: tuple[list[str], list[str]] = ([], [])
    for name, lines in names.items():
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match and shape in match[1] and match[2] not in _FREE:
                found[name in inside].append(line.strip()[:160])
    return found


@pytest.mark.parametrize("drafts", ["plain", "lookup"])
def test_states_are_written_where_a_ring_is_due_and_nowhere_else(drafts):
    """Acceptance and rejection move pointers: nothing of a state's size is made but in the branch that folds."""
    text, shape = _program(drafts, slots=5)
    outside, inside = _writers(text, shape)
    assert outside == []
    assert inside  # or the search would find nothing anywhere
    assert "callback" not in text


def test_the_search_finds_a_write_that_is_not_in_a_branch():
    @jax.jit
    def write(x, i):
        return jax.lax.fori_loop(0, i, lambda _, x: x.at[i].add(jnp.sin(x[0])), x)

    text = write.lower(jnp.zeros((5, 4, 16, 16)), 3).compile().as_text()
    outside, inside = _writers(text, "f32[5,4,16,16]")
    assert outside
    assert not inside


def test_the_callers_memory_is_the_results_memory():
    runs = engine()
    runs.submit((1, 2, 3), SamplingParams(max_tokens=20))
    runs.step()

    def pointers():
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runs.pool.sequences.cache.layers)]

    before = pointers()
    runs.step()
    assert before == pointers()
