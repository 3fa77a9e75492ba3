"""Jitted runs of a mixer over a pool of slots: prompts, steps, drafts with any acceptance, and NaN in all that is dead."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replayssm_jax import (
    ReplayPointer,
    ReplayPolicy,
    Tokens,
    after_prefill,
    after_verify,
    commit,
    copy_slots,
    init_pointer,
    materialize,
    reset_pointer,
)
from replayssm_jax.mixers import Mamba2, MixerCache

Array = jax.Array

# These programs are tiny and many: compiling them is what takes the time.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass
class Run:
    """A mixer, its slots and their pointer, moved along by calls that are compiled once per shape."""

    mixer: nnx.Module
    cache: MixerCache
    pointer: ReplayPointer

    @classmethod
    def fresh(cls, mixer: nnx.Module, num_slots: int, policy: ReplayPolicy) -> "Run":
        return cls(mixer, mixer.init_cache(num_slots, policy), init_pointer(num_slots, policy.window, policy.max_draft))

    def prompt(self, x: Any, slots: Any = None, lengths: Any = None, implementation: str | None = None) -> np.ndarray:
        return self._call(x, slots, lengths, True, implementation)

    def verify(self, x: Any, slots: Any = None, lengths: Any = None, implementation: str | None = None) -> np.ndarray:
        return self._call(x, slots, lengths, False, implementation)

    def commit(self, accepted: Any, slots: Any = None) -> None:
        self.pointer = _commit(self.pointer, _ints(accepted), None if slots is None else _ints(slots))

    def steps(self, x: Any, slots: Any = None, implementation: str | None = None) -> np.ndarray:
        """One token at a time in a ``lax.scan``. x [B, T, hidden] -> [B, T, hidden]"""
        slots = _ints(range(x.shape[0]) if slots is None else slots)
        self.cache, self.pointer, y = _steps(*self._split(), self.cache, self.pointer, jnp.asarray(x), slots, implementation)
        return np.asarray(y)

    def rounds(self, x: Any, counts: Any, accepted: Any, slots: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rounds of verify and commit in a ``lax.scan``; before each, what is dead in the rows' slots turns NaN.

        Args:
            x: drafts. [rounds, B, T, hidden]
            counts, accepted: per round and row. [rounds, B]
            slots: [B]

        Returns:
            Outputs [rounds, B, T, hidden], and after each round the states [rounds, B, H, V, K] and the convolution's
            last width - 1 inputs [rounds, B, width - 1, C].
        """
        plan = _ints(counts), _ints(accepted), _ints(slots)
        (self.cache, self.pointer), out = _rounds(*self._split(), self.cache, self.pointer, jnp.asarray(x), *plan)
        return tuple(np.asarray(o) for o in out)

    def reset(self, slots: Any) -> None:
        self.cache, self.pointer = _reset(self.cache, self.pointer, _ints(slots))

    def copy(self, source: Any, target: Any) -> None:
        self.cache, self.pointer = _copy((self.cache, self.pointer), _ints(source), _ints(target))

    def poison(self, slots: Any) -> None:
        """NaN in all that is dead in these slots."""
        self.cache = _poison_dead(self.cache, self.pointer, _ints(slots))

    def poison_slots(self, slots: Any) -> None:
        """NaN in all of these slots."""
        self.cache = _poison_slots(self.cache, _ints(slots))

    def tokens(self, x: Any, slots: Any = None) -> Tokens:
        """What the mixer hands to the recurrence for x; nothing moves."""
        slots = _ints(range(x.shape[0]) if slots is None else slots)
        return _tokens_of(*self._split(), self.cache, self.pointer, jnp.asarray(x), slots)

    def state(self, slots: Any = None) -> np.ndarray:
        """[B, H, V, K]"""
        state = np.asarray(_materialize(self.cache, self.pointer))
        return state if slots is None else state[np.asarray(slots)]

    def history(self, slots: Any) -> np.ndarray:
        """Last width - 1 inputs of the convolution, newest last. [B, width - 1, C]"""
        return np.asarray(_history(self.cache, self.pointer, jnp.arange(self.cache.num_slots)))[np.asarray(slots)]

    def slot(self, slot: int) -> list[np.ndarray]:
        """Every array of one slot, for comparisons bit by bit."""
        return [np.asarray(pool)[slot] for pool in jax.tree.leaves((self.cache, self.pointer))]

    def _split(self) -> tuple[Any, Any]:
        return nnx.split(self.mixer)

    def _call(self, x: Any, slots: Any, lengths: Any, prefill: bool, implementation: str | None) -> np.ndarray:
        slots = _ints(range(x.shape[0]) if slots is None else slots)
        lengths = _ints([x.shape[1]] * x.shape[0] if lengths is None else lengths)
        self.cache, self.pointer, y = _call(
            *self._split(), self.cache, self.pointer, jnp.asarray(x), slots, lengths, prefill, implementation
        )
        return np.asarray(y)


@functools.partial(quick_jit, static_argnames=("graph",))
def _tokens_of(graph, weights, cache, pointer, x, slots):
    mixer = nnx.merge(graph, weights)
    x = x.astype(mixer.dtype)
    if isinstance(mixer, Mamba2):
        _, inputs, dt = jnp.split(mixer.in_proj(x), [mixer.config.inner_width, -mixer.config.num_heads], axis=-1)
        return mixer._tokens(mixer.conv1d(cache.conv, inputs, pointer, slots, None)[1], dt)
    parts = [mixer.in_proj_qkv] if hasattr(mixer, "in_proj_qkv") else [mixer.q_proj, mixer.k_proj, mixer.v_proj]
    inputs = jnp.concatenate([part(x) for part in parts], axis=-1)
    return mixer._tokens(x, mixer.conv1d(cache.conv, inputs, pointer, slots, None)[1])


def _ints(values: Any) -> Array:
    return jnp.asarray(np.asarray(values, np.int32))


@functools.partial(quick_jit, static_argnames=("graph", "prefill", "implementation"))
def _call(graph, weights, cache, pointer, x, slots, lengths, prefill, implementation):
    mixer = nnx.merge(graph, weights)
    options = {"slots": slots, "lengths": lengths, "prefill": prefill, "implementation": implementation}
    cache, y = mixer(cache, x, pointer, **options)
    return cache, (after_prefill if prefill else after_verify)(pointer, slots, lengths), y


@functools.partial(quick_jit, static_argnames=("graph", "implementation"))
def _steps(graph, weights, cache, pointer, x, slots, implementation):
    mixer = nnx.merge(graph, weights)

    def body(carry, x):
        cache, pointer = carry
        cache, y = mixer(cache, x[:, None], pointer, slots=slots, implementation=implementation)
        ones = jnp.ones_like(slots)
        return (cache, commit(after_verify(pointer, slots, ones), ones, slots)), y[:, 0]

    (cache, pointer), y = jax.lax.scan(body, (cache, pointer), jnp.swapaxes(x, 0, 1))
    return cache, pointer, jnp.swapaxes(y, 0, 1)


@functools.partial(quick_jit, static_argnames=("graph",))
def _rounds(graph, weights, cache, pointer, x, counts, accepted, slots):
    mixer = nnx.merge(graph, weights)

    def body(carry, inputs):
        (cache, pointer), (x, counts, accepted) = carry, inputs
        cache = poison_dead(cache, pointer, slots)
        cache, y = mixer(cache, x, pointer, slots=slots, lengths=counts)
        pointer = commit(after_verify(pointer, slots, counts), accepted, slots)
        state = materialize(cache.state(pointer), slots)
        return (cache, pointer), (y, state, history(cache, pointer, slots))

    return jax.lax.scan(body, (cache, pointer), (x, counts, accepted))


_commit = quick_jit(commit)


@quick_jit
def _reset(cache, pointer, slots):
    return cache.reset(slots), reset_pointer(pointer, slots)


@quick_jit
def _copy(pools, source, target):
    return tuple(copy_slots(pool, source, target) for pool in pools)


@quick_jit
def _poison_slots(cache, slots):
    return jax.tree.map(lambda pool: pool.at[slots].set(jnp.nan), cache)


@quick_jit
def _materialize(cache, pointer):
    return materialize(cache.state(pointer))


def history(cache: MixerCache, pointer: ReplayPointer, slots: Array) -> Array:
    """The convolution's last width - 1 inputs, newest last, zeros before the first. [B, width - 1, C]"""
    ring = cache.conv.shape[1]
    before = ring - cache.policy.max_draft
    position = pointer.position[slots][:, None] - before + jnp.arange(before)
    return jnp.where((position >= 0)[..., None], cache.conv[slots[:, None], position % ring], 0)


def poison_dead(cache: MixerCache, pointer: ReplayPointer, slots: Array) -> MixerCache:
    """NaN in every ring row and convolution row of these slots that no live token may read; other slots keep their bits."""
    chosen = jnp.zeros(cache.num_slots, bool).at[slots].set(True)[:, None]
    window, ring = pointer.window, cache.conv.shape[1]
    logical = (jnp.arange(window) - pointer.origin[:, None]) % window
    dead = chosen & (logical >= pointer.length[:, None])  # [N, L]

    def ring_rows(pool: Array) -> Array:  # [N, heads, L, ...]
        return jnp.where(dead.reshape(dead.shape[0], 1, window, *(1,) * (pool.ndim - 3)), jnp.nan, pool)

    age = (pointer.position[:, None] - 1 - jnp.arange(ring)) % ring  # 0 for the newest row
    needed = age < jnp.minimum(ring - pointer.max_draft, pointer.position[:, None])
    conv = jnp.where((chosen & ~needed)[..., None], jnp.nan, cache.conv)
    return dataclasses.replace(cache, conv=conv, buffer=jax.tree.map(ring_rows, cache.buffer))


_history, _poison_dead = quick_jit(history), quick_jit(poison_dead)


def relative(got: Any, want: Any, axes: int = 1) -> float:
    """Largest relative L2 error over the last ``axes`` axes; NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    tail = tuple(range(-axes, 0))
    error = np.sqrt(np.sum((got - want) ** 2, tail)) / np.maximum(np.sqrt(np.sum(want**2, tail)), 1e-30)
    return float(np.where(np.isnan(error), np.inf, error).max(initial=0.0))


def products(jaxpr: Any) -> list[Any]:
    """Every dot_general in a jaxpr and the jaxprs within it."""
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    for inner in jax.tree.leaves([list(eqn.params.values()) for eqn in jaxpr.eqns]):
        inner = getattr(inner, "jaxpr", inner)
        found += products(inner) if hasattr(inner, "eqns") else []
    return found


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """Rounds of drafts of a stream: where each row stands, how many tokens it brings, how many of them are right.

    Attributes:
        start, counts, accepted: [rounds, B] int32
        end: where each row stands afterwards. [B]
        most: tokens of the longest draft that could have come.
    """

    start: np.ndarray
    counts: np.ndarray
    accepted: np.ndarray
    end: np.ndarray
    most: int

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int]]:
        """round, row, start, count, accepted of every round in which a row brings tokens."""
        for r, row in np.argwhere(self.counts):
            yield r, row, self.start[r, row], self.counts[r, row], self.accepted[r, row]

    def drafts(self, rng: np.random.Generator, stream: np.ndarray) -> np.ndarray:
        """The stream's own tokens as far as they are accepted, then garbage, then NaN where a row brings no more.

        Args:
            rng: for the garbage.
            stream: [B, tokens, hidden]

        Returns:
            [rounds, B, most, hidden] float32
        """
        x = np.full((*self.counts.shape, self.most, stream.shape[-1]), np.nan, np.float32)
        for r, row, begin, count, right in self:
            x[r, row, :right] = stream[row, begin : begin + right]
            x[r, row, right:count] = 3 * rng.standard_normal((count - right, stream.shape[-1]))
        return x


def draft_plan(
    rng: np.random.Generator, begin: Sequence[int], most: int, stops: Sequence[int], rounds: int, active: int | None = None
) -> DraftPlan:
    """Random drafts of 2 .. most tokens, 0 to all of them accepted, that halt at each stop; now and then a row rests.

    Without ``active`` every row must reach the last stop; with it, nothing happens after that many rounds.
    """
    plan, end = np.zeros((3, rounds, len(begin)), np.int32), np.array(begin)
    for r, row in np.ndindex(rounds, len(begin)):
        plan[0, r, row] = end[row]
        if end[row] == stops[-1] or rng.random() < 0.1 or (active is not None and r >= active):
            continue
        count = rng.integers(2, most + 1)
        room = next(stop for stop in stops if stop > end[row]) - end[row]
        plan[1:, r, row] = count, min(rng.integers(0, count + 1), room)
        end[row] += plan[2, r, row]
    assert active is not None or (end == stops[-1]).all(), "more rounds are needed"
    return DraftPlan(*plan, end, most)
