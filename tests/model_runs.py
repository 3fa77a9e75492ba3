"""Jitted runs of the published Qwen3.5 golden: two sequences in slots 3 and 1, a padding row between them, NaN elsewhere."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replayssm_jax import ReplayPolicy, copy_slots, materialize
from replayssm_jax.mixers import MixerCache
from replayssm_jax.models import ModelCache, Qwen3_5
from tests.golden_data import ROOT, load, published_recurrent
from tests.mixer_runs import history, quick_jit

Array = jax.Array

FOLDER = ROOT / "qwen3_5"
NUM_SLOTS, MAX_LENGTH = 4, 64
ROWS, SLOTS = np.array([0, 2]), np.array([3, 1])  # rows of a batch that are the golden's sequences, and their slots
BATCH = np.array([SLOTS[0], NUM_SLOTS, SLOTS[1]], np.int32)
POLICY = ReplayPolicy(window=10, max_draft=5)
PROMPT, TOTAL = 7, 55
DEAD = 2**30  # a token id that no vocabulary holds


@functools.cache
def model() -> Qwen3_5:
    return Qwen3_5.from_pretrained(FOLDER)


def sequences() -> np.ndarray:
    """Prompts and the 48 tokens that follow. [2, 55] int32"""
    golden = load("qwen3_5", "golden")
    return np.concatenate([golden["prompt"], golden["tokens"]], axis=1)


def logits_after(row: int, count: int) -> np.ndarray:
    """Published logits after the first ``count`` tokens, at least one. [V]"""
    golden = load("qwen3_5", "golden")
    return golden["prompt_logits"][row, count - 1] if count < PROMPT else golden["logits"][row, count - PROMPT]


def batch(rows: list[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of tokens around a padding row: ids [3, count] int32 and lengths [3] int32; dead ids are impossible ones."""
    tokens, lengths = np.full((3, count), DEAD, np.int32), np.full(3, count, np.int32)
    for place, row in zip(ROWS, rows, strict=True):
        tokens[place, : len(row)], lengths[place] = row, len(row)
    return tokens, lengths


class ModelRun:
    """A model and its cache; every call takes two rows of tokens and gives two rows of results."""

    def __init__(self, subject: Qwen3_5 | None = None, policy: ReplayPolicy = POLICY):
        self.model = model() if subject is None else subject
        cache = self.model.init_cache(NUM_SLOTS, MAX_LENGTH, policy)
        layers = jax.tree.map(lambda pool: jnp.asarray(np.full(pool.shape, np.nan, pool.dtype)), cache.layers)
        self.cache = dataclasses.replace(cache, layers=layers)
        self.reset(SLOTS)

    def prefill(self, rows: list[np.ndarray]) -> np.ndarray:
        """Logits after each row's last token. [2, V]"""
        tokens, lengths = batch(rows, TOTAL)
        return self._take(*_prefill(*self._split(), self.cache, tokens, lengths, BATCH))

    def verify(self, rows: list[np.ndarray]) -> np.ndarray:
        """[2, 5, V], zero past each row's end."""
        tokens, lengths = batch(rows, POLICY.max_draft)
        return self._take(*_verify(*self._split(), self.cache, tokens, lengths, BATCH))

    def commit(self, accepted: Any) -> None:
        self.cache = self.model.commit(self.cache, jnp.asarray(np.insert(accepted, 1, 9)), jnp.asarray(BATCH))

    def generate(self, first: np.ndarray, count: int, implementation: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Greedy decoding from tokens [2] on, one step at a time: the tokens consumed [2, count], logits after each."""
        (self.cache, _), (tokens, logits) = _generate(
            *self._split(), self.cache, np.insert(first, 1, DEAD), BATCH, count, implementation
        )
        return np.asarray(tokens).T[ROWS], np.swapaxes(logits, 0, 1)[ROWS]

    def rounds(self, drafts: np.ndarray, counts: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, Any]:
        """Rounds of verify and commit. drafts [rounds, 2, T], counts and accepted [rounds, 2].

        Returns logits [rounds, 2, T, V] and, for each recurrent layer, states and convolution inputs after each round.
        """
        padded = (np.insert(x, 1, fill, axis=1) for x, fill in ((drafts, DEAD), (counts, 5), (accepted, 5)))
        self.cache, (logits, states) = _rounds(*self._split(), self.cache, *padded, BATCH)
        return np.asarray(logits)[:, ROWS], [(np.asarray(s), np.asarray(h)) for s, h in states]

    def states(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """State [2, H, V, K] and last convolution inputs [2, 3, C] of each recurrent layer."""
        return [(np.asarray(s), np.asarray(h)) for s, h in quick_jit(_states)(self.cache)]

    def reset(self, slots: Any) -> None:
        self.cache = quick_jit(ModelCache.reset)(self.cache, np.asarray(slots, np.int32))

    def copy(self, source: Any, target: Any) -> None:
        self.cache = quick_jit(copy_slots)(self.cache, np.asarray(source, np.int32), np.asarray(target, np.int32))

    def check_unowned(self) -> None:
        """Slots that no row names still hold the NaN they started with."""
        for slot in set(range(NUM_SLOTS)) - set(SLOTS):
            assert all(np.isnan(np.asarray(pool)[slot].astype(np.float32)).all() for pool in jax.tree.leaves(self.cache.layers))

    def _split(self) -> tuple[Any, Any]:
        return nnx.split(self.model)

    def _take(self, cache: ModelCache, logits: Array) -> np.ndarray:
        self.cache = cache
        assert not np.asarray(logits)[1].any(), "a padding row has answers"
        return np.asarray(logits)[ROWS]


def check_states(states: list[tuple[np.ndarray, np.ndarray]], row: int, step: int, tolerance: float = 1e-5) -> None:
    """States and convolution inputs of one row, [H, V, K] and [3, C] per recurrent layer, against the published ones."""
    published = load("qwen3_5", "states")
    for layer, (state, inputs) in enumerate(states):
        want = published_recurrent("qwen3_5", published, step, layer)[row]
        assert (np.abs(state - want) <= 2e-5 * np.maximum(1, np.abs(want))).all()
        assert (np.abs(inputs - published[f"step{step}.layer{layer}.conv_state"][row, :, 1:].T) <= tolerance).all()


def _states(cache: ModelCache) -> list[tuple[Array, Array]]:
    layers = [layer for layer in cache.layers if isinstance(layer, MixerCache)]
    slots = jnp.asarray(SLOTS)
    return [(materialize(x.state(cache.pointer), slots), history(x, cache.pointer, slots)) for x in layers]


@functools.partial(quick_jit, static_argnames="graph")
def _prefill(graph, weights, cache, tokens, lengths, slots):
    return nnx.merge(graph, weights).prefill(cache, tokens, lengths, slots)


@functools.partial(quick_jit, static_argnames="graph")
def _verify(graph, weights, cache, tokens, lengths, slots):
    return nnx.merge(graph, weights).verify(cache, tokens, slots, lengths)


@functools.partial(quick_jit, static_argnames=("graph", "count", "implementation"))
def _generate(graph, weights, cache, first, slots, count, implementation):
    subject = nnx.merge(graph, weights)

    def body(carry, _):
        cache, token = carry
        cache, logits = subject.verify(cache, token[:, None], slots, implementation=implementation)
        cache = subject.commit(cache, 1, slots)
        return (cache, jnp.argmax(logits[:, 0], axis=-1).astype(token.dtype)), (token, logits[:, 0])

    return jax.lax.scan(body, (cache, first), length=count)


@functools.partial(quick_jit, static_argnames="graph")
def _rounds(graph, weights, cache, drafts, counts, accepted, slots):
    subject = nnx.merge(graph, weights)

    def body(cache, inputs):
        tokens, counts, accepted = inputs
        cache, logits = subject.verify(cache, tokens, slots, counts)
        cache = subject.commit(cache, accepted, slots)
        return cache, (logits, _states(cache))

    return jax.lax.scan(body, cache, (drafts, counts, accepted))
