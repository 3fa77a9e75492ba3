"""Whole models and the decode loop on the GPU kernels, against the same on ``xla``; skipped without a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from replayssm_jax import ReplayPolicy, materialize, replay_pallas
from replayssm_jax.decoding import Engine, PromptLookup, SamplingParams, restore, save
from replayssm_jax.mixers import MixerCache
from replayssm_jax.models import MODELS
from replayssm_jax.models.check import check_folder
from tests.golden_data import ROOT
from tests.narrow_models import CONFIGS

pytestmark = pytest.mark.skipif(replay_pallas.missing_gpu() is not None, reason=str(replay_pallas.missing_gpu()))

ROWS, MAX_DRAFT, VOCAB = 6, 5, 256
every_family = pytest.mark.parametrize("family", CONFIGS)


@functools.cache
def model(family, dtype="float32"):
    cls = MODELS[family]
    return cls(cls.read_config({"model_type": family, "vocab_size": VOCAB, **CONFIGS[family]}), dtype=dtype, rngs=nnx.Rngs(0))


class Run:
    """A model that reads prompts and verifies drafts on one backend."""

    def __init__(self, subject, implementation):
        self.model, (graph, self.weights) = subject, nnx.split(subject)
        policy = ReplayPolicy(max_draft=MAX_DRAFT, record_dtype=subject.dtype)
        self.cache = subject.init_cache(ROWS, 512, policy)

        def call(method):
            def run(weights, cache, *arguments):
                return getattr(nnx.merge(graph, weights), method)(cache, *arguments, implementation=implementation)

            return jax.jit(run, donate_argnums=1)

        self._prefill, self._verify = call("prefill"), call("verify")

    def prefill(self, tokens, lengths):
        self.cache, logits = self._prefill(self.weights, self.cache, tokens, lengths)
        return np.asarray(logits, np.float32)

    def verify(self, tokens, lengths, accepted):
        self.cache, logits = self._verify(self.weights, self.cache, tokens, None, lengths)
        self.cache = self.model.commit(self.cache, jnp.asarray(accepted, jnp.int32))
        return np.asarray(logits, np.float32)

    def states(self):
        return [np.asarray(materialize(x.state(self.cache.pointer))) for x in self.cache.layers if isinstance(x, MixerCache)]


def calls(rng):
    """Prompts of unequal length, rounds of drafts of which some are kept, steps, a second piece of prompt, drafts again."""

    def tokens(count):
        return rng.integers(0, VOCAB, (ROWS, count)).astype(np.int32)

    yield "prefill", tokens(23), rng.integers(1, 24, ROWS).astype(np.int32)
    for i in range(24):
        count = 1 if i % 3 == 2 else MAX_DRAFT
        lengths = rng.integers(0, count + 1, ROWS).astype(np.int32)
        lengths[rng.integers(ROWS)] = count  # one has something to say
        yield "verify", tokens(count), lengths, rng.integers(0, lengths + 1)
        if i == 11:
            yield "prefill", tokens(23), rng.integers(0, 24, ROWS).astype(np.int32)


def largest_errors(subject, other, rng):
    """Of logits, relative to the largest one, and of states, relative to the largest and at least 1."""
    logits, states = [], []
    for method, *arguments in calls(rng):
        got, want = (getattr(run, method)(*arguments) for run in (subject, other))
        logits.append(np.abs(got - want).max() / np.abs(want).max())
    for got, want in zip(subject.states(), other.states(), strict=True):
        states.append(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
    return max(logits), max(states)


@every_family
def test_a_model_gives_the_logits_and_states_of_xla(family, rng):
    logits, states = largest_errors(*(Run(model(family), implementation) for implementation in ("pallas", "xla")), rng)
    assert logits <= 1e-4
    assert states <= 2e-5


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])  # elsewhere the last bit may choose another expert
def test_in_bfloat16_only_activations_round(family, rng):
    """The kernels are about as far from float32 activations, on the same weights, as ``xla`` is."""
    rounded, seed = model(family, "bfloat16"), rng.integers(2**31)
    graph, weights = nnx.split(model(family))
    exact = nnx.merge(graph, jax.tree.map(lambda x, y: y.astype(x.dtype), weights, nnx.split(rounded)[1]))
    pallas, xla = (
        largest_errors(Run(rounded, implementation), Run(exact, "xla"), np.random.default_rng(seed))
        for implementation in ("pallas", "xla")
    )
    assert 1e-3 < xla[0] < 0.2
    assert pallas[0] <= 2 * xla[0]
    assert pallas[1] <= 2 * xla[1]


def test_a_recorded_model_is_reproduced():
    """The one whose heads are as large as the kernels take."""
    lines = list(check_folder(ROOT / "nemotron_h", "float32", "pallas"))
    assert lines
    assert all(passed for _, passed in lines), "\n".join(line for line, _ in lines)


def make_engine(family, implementation):
    sizes = {"num_slots": 4, "max_length": 256, "prefill_chunk": 32, "prefill_rows": 2, "rounds_per_step": 8}
    return Engine(model(family), drafter=PromptLookup(4), implementation=implementation, **sizes)


def submit(engine, rng, count=10):
    """Requests more than slots; half of the prompts repeat themselves, so that drafts are found."""
    requests = []
    for i in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 60))
        prompt = np.resize(prompt[:7], 60) if i % 2 else prompt
        requests.append(engine.submit(prompt.tolist(), SamplingParams(max_tokens=int(rng.integers(1, 120)))))
    return requests


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_an_engine_decodes_the_tokens_of_xla_and_goes_on_where_it_was_saved(family, rng, tmp_path):
    seed = rng.integers(2**31)
    answers = {}
    for implementation in ("pallas", "xla"):
        engine = make_engine(family, implementation)
        requests = submit(engine, np.random.default_rng(seed))
        if implementation == "pallas":
            for _ in range(5):
                engine.step()
            save(engine, tmp_path / "saved")
        engine.run()
        assert all(request.error is None for request in requests)
        answers[implementation] = [request.tokens for request in requests]
    assert answers["pallas"] == answers["xla"]

    engine = restore(tmp_path / "saved", model(family), drafter=PromptLookup(4))
    unfinished = engine.requests
    assert unfinished
    engine.run()
    for request in unfinished:
        assert request.tokens == answers["pallas"][request.number]
