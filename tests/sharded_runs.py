"""Golden models, and states, on a mesh of eight virtual devices beside one device. Run by ``test_sharding`` in its own process:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.sharded_runs REQUEST...

A request is ``folder:data:model`` or ``folder:data:model:prompt`` for a model, ``state:data:model`` for a state by itself,
``rounded:data:model`` for one with a read-out copy and stochastic rounding, ``engine:data:model`` for continuous batching.
It prints a JSON object of what it found per request.
"""

import dataclasses
import functools
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import replayssm_jax as rs
from replayssm_jax.decoding import Engine, SamplingParams
from replayssm_jax.mixers import MixerCache
from replayssm_jax.models import from_pretrained, shard
from replayssm_jax.sharding import Sharding
from tests.cases import Case, case_named, make_tokens
from tests.decoding_runs import SIZES, drafter, recorded
from tests.golden_data import ROOT
from tests.mixer_runs import quick_jit

POLICY = rs.ReplayPolicy(window=10, max_draft=3)
SLOTS, ROWS, PROMPT, ROUNDS = 256, 8, 7, 6  # a pool far larger than a batch, so that only a gathered pool can be that large
_COLLECTIVE = re.compile(r"= \(?(.*?)\)? (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@functools.partial(quick_jit, static_argnames=("graph", "method"), donate_argnames="cache")
def call(graph, method, weights, cache, tokens, slots, lengths):
    return getattr(nnx.merge(graph, weights), method)(cache, tokens, slots=slots, lengths=lengths)


class Run:
    """A model, its cache and their calls, compiled once per method."""

    def __init__(self, model: Any):
        self.model = model
        self.graph, self.weights = nnx.split(model)
        self.compiled: dict[str, Any] = {}

    def __call__(self, method: str, *rows: np.ndarray) -> np.ndarray:
        arguments = self.weights, self.cache, *(jnp.asarray(x) for x in rows)
        if method not in self.compiled:
            self.compiled[method] = call.lower(self.graph, method, *arguments).compile()
        self.cache, logits = self.compiled[method](*arguments)
        return np.asarray(logits)

    def restart(self) -> None:
        self.cache = self.model.init_cache(SLOTS, 32, POLICY)


@functools.cache
def on_one_device(folder: str) -> Run:
    return Run(from_pretrained(ROOT / folder))


def largest_collectives(compiled: Any) -> dict[str, int]:
    """Elements of the largest result of each kind of collective in a compiled program."""
    found: dict[str, int] = {}
    for results, kind in _COLLECTIVE.findall(compiled.as_text()):
        for dims in _SHAPE.findall(results):
            size = int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64))
            found[kind] = max(found.get(kind, 0), size)
    return found


def rows_in_shards(rng: np.random.Generator, data: int) -> np.ndarray:
    """A slot of its own data shard for every row, one row of padding among them. [8] int32"""
    own, rows = SLOTS // data, ROWS // data
    slots = np.concatenate([part * own + rng.permutation(own)[:rows] for part in range(data)]).astype(np.int32)
    slots[rng.integers(ROWS)] = SLOTS
    return slots


def run_model(folder: str, data: int, model: int, prompt: bool) -> dict[str, Any]:
    """Drafts of random number and acceptance, perhaps behind a prompt, on both; and the compiled program of the mesh."""
    mesh = jax.make_mesh((data, model), ("data", "model"))
    one = on_one_device(folder)
    subjects = one, Run(from_pretrained(ROOT / folder, mesh=mesh) if prompt else shard(one.model, mesh))
    rng, error, largest = np.random.default_rng(0), 0.0, 0.0
    slots = rows_in_shards(rng, data)
    for subject in subjects:
        subject.restart()
    for method in ["prefill"] * prompt + ["verify"] * ROUNDS:
        count = PROMPT if method == "prefill" else POLICY.max_draft
        tokens = rng.integers(0, one.model.config.vocab_size, (ROWS, count)).astype(np.int32)
        lengths = rng.integers(0, count + 1, ROWS).astype(np.int32)
        accepted = rng.integers(0, lengths + 1).astype(np.int32)
        want, got = (subject(method, tokens, slots, lengths) for subject in subjects)
        error, largest = max(error, float(np.abs(want - got).max())), max(largest, float(np.abs(want).max()))
        if method == "verify":
            for subject in subjects:
                subject.cache = subject.model.commit(subject.cache, accepted, slots)
    cache = subjects[1].cache
    compiled = subjects[1].compiled["verify"]
    layers = [layer for layer in cache.layers if layer is not None]
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(layers)]
    state = next(layer for layer in layers if isinstance(layer, MixerCache))
    return {
        "error": error / largest,
        "pointers": _equal(one.cache.pointer, cache.pointer),
        "collectives": largest_collectives(compiled),
        "aliased": compiled.memory_analysis().alias_size_in_bytes,
        "pool_bytes": sum(x.nbytes for x in shards),
        "smallest_pool": min(x.size for x in shards if x.ndim > 3),  # checkpoints, keys, values
        "checkpoint": list(state.checkpoint.addressable_shards[0].data.shape),
        "key_heads": state.recurrence.num_key_heads,
    }


@functools.partial(quick_jit, static_argnames="api")
def every_call(api, state, prompt, drafts, slots, lengths, accepted):
    """A state's life through ``replayssm_jax`` or a ``Sharding``: the state, its outputs, its present."""
    state, first = api.prefill(state, prompt, slots)

    def body(state, _):
        state, out = api.verify(state, drafts, slots, lengths)
        return dataclasses.replace(state, pointer=api.commit(state.pointer, accepted, slots)), out

    state, outs = jax.lax.scan(body, state, length=6)
    present = rs.materialize(state)
    state = rs.copy_slots(rs.reset(api.flush(state, slots, slots % 2 == 0), slots[:2]), slots[4:6], slots[2:4])
    return state, (first, outs, present, state.checkpoint)


def run_lives(case: Case, sharding: Sharding, rng: np.random.Generator) -> tuple[Any, Any, jax.Array]:
    """``every_call`` on one device and on the mesh, and the slots that were used."""
    slots = jnp.asarray(rows_in_shards(rng, sharding.data_size))
    lengths = rng.integers(0, case.max_draft + 1, ROWS)
    accepted = rng.integers(0, lengths + 1)
    prompt, drafts = (jax.tree.map(jnp.asarray, make_tokens(case, rng, ROWS, n)) for n in (PROMPT, case.max_draft))
    made = (api.init_state(case.recurrence, case.policy, SLOTS) for api in (rs, sharding))
    one, many = (
        every_call(api, state, prompt, drafts, slots, lengths, accepted)
        for api, state in zip((rs, sharding), made, strict=True)
    )
    return one, many, slots


def run_rounded(data: int, model: int) -> dict[str, Any]:
    """How much of a stochastically rounded checkpoint and of its copy differs on the mesh: what arithmetic does, no more."""
    sharding, rng = Sharding(jax.make_mesh((data, model), ("data", "model"))), np.random.default_rng(2)
    case = case_named("gla", dims=(24, 40), readout="nvfp4", checkpoint="bfloat16", rounding="stochastic")
    (one, _), (many, _), slots = run_lives(case, sharding, rng)
    used = slots[slots < SLOTS]
    pairs = zip(jax.tree.leaves((one.checkpoint, one.readout)), jax.tree.leaves((many.checkpoint, many.readout)), strict=True)
    differ = max(float(np.mean(np.asarray(a)[used] != np.asarray(b)[used])) for a, b in pairs)
    return {"differ": differ, "nonzero": float(np.mean(np.asarray(one.checkpoint)[used] != 0))}


def run_engine(data: int, model: int) -> dict[str, Any]:
    """Whether requests, more than there are slots, get their recorded answers from an engine over the mesh; and a fork."""
    jax.config.update("jax_disable_most_optimizations", True)
    subject = from_pretrained(ROOT / "qwen3_5", mesh=jax.make_mesh((data, model), ("data", "model")))
    texts, answers = recorded("qwen3_5")
    engine = Engine(subject, drafter=drafter("lookup", "qwen3_5"), **SIZES | {"num_slots": 2 * data, "prefill_rows": 2 * data})
    counts = [48, 48, 9, 5, 20, 3, 11]
    requests = [engine.submit(texts[i % 2], SamplingParams(max_tokens=count)) for i, count in enumerate(counts)]
    requests.append(engine.fork(requests[0]))
    engine.step()
    requests.append(engine.fork(requests[1]))
    engine.run()
    wanted = [*(answers[i % 2][:count] for i, count in enumerate(counts)), *answers]
    return {"equal": [tuple(request.tokens) for request in requests] == wanted}


def run_state(data: int, model: int) -> dict[str, Any]:
    """Every call on a state by itself, and rows whose slots lie in another shard, which are padding there."""
    sharding, rng = Sharding(jax.make_mesh((data, model), ("data", "model"))), np.random.default_rng(1)
    case = case_named("gla", dims=(24, 40))
    one, many, slots = run_lives(case, sharding, rng)
    token = jax.tree.map(jnp.asarray, make_tokens(case, rng, ROWS, 1))
    step = quick_jit(sharding.step).lower(many[0], token, slots).compile()
    stray = np.roll(np.arange(ROWS, dtype=np.int32) * (SLOTS // ROWS), ROWS // data)  # all in the next shard
    after, out = step(many[0], token, jnp.asarray(stray))
    return {
        "error": max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(one[1], many[1], strict=True)),
        "pointers": _equal(one[0].pointer, many[0].pointer),
        "stray_rows_are_padding": not np.asarray(out).any() and _equal(after, many[0]),
        "collectives": largest_collectives(step),
    }


def _equal(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


def main(requests: list[str]) -> None:
    for request in requests:
        folder, data, model, *prompt = request.split(":")
        sizes = int(data), int(model)
        states = {"state": run_state, "rounded": run_rounded, "engine": run_engine}
        found = states[folder](*sizes) if folder in states else run_model(folder, *sizes, bool(prompt))
        print(json.dumps({"request": request, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
