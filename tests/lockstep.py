"""The library and the oracle side by side: every call goes to both, and everything a call must leave alone is compared."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import ReplayState, Tokens, readout
from tests.cases import Case, poison_dead
from tests.compare import assert_heads_close, same_bits
from tests.oracle import OraclePool, advance

_ALWAYS_AVAILABLE = (None, "reference", "xla")

# Most of a test's time is compilation, which no optimisation repays at these sizes.
FAST_COMPILE = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@functools.cache
def jitted(name: str, implementation: str | None = None):
    """A public function, jitted once and shared by all tests of a process; NumPy arrays in and out."""
    door = getattr(rs, name)
    if implementation is not None:
        door = functools.partial(door, implementation=implementation)
    door = jax.jit(door, compiler_options=FAST_COMPILE)
    return lambda *arguments: jax.tree.map(np.asarray, door(*arguments))


encode = jax.jit(readout.encode, static_argnums=0, compiler_options=FAST_COMPILE)


@jax.jit
def decode(state: ReplayState, tokens: Tokens) -> tuple[ReplayState, jax.Array]:
    """Steps through tokens [B, T] in a scan, as a decode loop does. Outputs [T, B, H, V]."""

    def body(state, token):
        state, out = rs.step(state, jax.tree.map(lambda x: x[:, None], token))
        return state, out[:, 0]

    return jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tokens))


def whole_checkpoint(state: ReplayState):
    """Both halves of it where they are kept apart. [N, H, V, K]"""
    if state.policy.readout != readout.PLANE:
        return state.checkpoint
    return np.asarray(readout.join_planes(state.readout.payload, state.checkpoint))


def slot_of(state: ReplayState, slot: int):
    """Everything the pool holds for one slot."""
    return jax.tree.map(lambda pool: pool[slot], state)


def ring_rows(state: ReplayState, slot: int, first: int, count: int) -> np.ndarray:
    """Ring rows of logical records ``first .. first + count - 1`` of a slot."""
    return (int(state.pointer.origin[slot]) + np.arange(first, first + count)) % state.policy.window


class Lockstep:
    """A pool and its oracle. Dead ring rows and dead tokens are NaN in every call; all other slots keep their bits.

    Calls take the library's arguments; ``slots=None`` is passed on as such.

    Args:
        case: row of the case table.
        implementation: backend to drive; a test is skipped, with the reason, where it cannot run here.
        num_slots: N.
        origin: tokens that every slot claims to have folded already; moves the ring's start and changes nothing else.
    """

    def __init__(self, case: Case, implementation: str | None = None, num_slots: int = 4, origin: int = 0):
        self.case, self.implementation, self.num_slots = case, implementation, num_slots
        self.state = jax.tree.map(np.array, rs.init_state(case.recurrence, case.policy, num_slots))
        self.state.pointer.origin[:] = origin
        self.oracle = OraclePool(case.recurrence, num_slots)
        self.oracle.position[:] = origin

    def disown(self, slot: int) -> None:
        """Makes a slot somebody's leftovers: NaN everywhere, a pointer in mid-window."""
        self.state = state = jax.tree.map(np.array, self.state)
        for pool in jax.tree.leaves((state.checkpoint, state.buffer, state.readout)):
            # all bits set are NaN in the patterns of a read-out copy
            pool[slot] = np.iinfo(pool.dtype).max if np.issubdtype(pool.dtype, np.integer) else np.nan
        state.pointer.length[slot], state.pointer.origin[slot] = self.case.window - self.case.max_draft, 3
        self.oracle.position[slot] = 3 + state.pointer.length[slot]
        self.oracle.state[slot], self.oracle.drafts[slot] = np.nan, []

    def poison_rings(self) -> None:
        """NaN in every ring row that holds neither a committed record nor a draft that may still be committed."""
        buffer = jax.tree.map(np.array, self.state.buffer)
        for slot in range(self.num_slots):
            kept = int(self.state.pointer.length[slot]) + len(self.oracle.drafts[slot])
            dead = ring_rows(self.state, slot, kept, self.case.window - kept)
            for pool in jax.tree.leaves(buffer):
                pool[slot][:, dead] = np.nan
        self.state = dataclasses.replace(self.state, buffer=buffer)

    def verify(self, tokens: Tokens, slots, lengths, door: str = "verify") -> np.ndarray:
        given, slots = _int32(slots), range(len(lengths)) if slots is None else slots
        tokens, live = self._prepare(tokens, slots, lengths)
        before = self.state
        self.state, out = self._call(door, before, tokens, given, _int32(lengths))
        self._compare_outputs(out, self.oracle.verify(tokens, slots, lengths), live, slots, tokens.v.dtype)
        if door == "step":
            self.oracle.commit(lengths, slots)
        self._assert_untouched(before, slots, lengths)
        for slot, length in self._rows_with_tokens(slots, lengths):
            self._assert_only_appended(before, slot, length)
        return out

    def step(self, tokens: Tokens, slots, lengths=None) -> np.ndarray:
        return self.verify(tokens, slots, np.ones(len(slots), int) if lengths is None else lengths, door="step")

    def commit(self, accepted, slots) -> None:
        pointer = jitted("commit")(self.state.pointer, _int32(accepted), _int32(slots))
        self.state = dataclasses.replace(self.state, pointer=pointer)
        self.oracle.commit(accepted, range(len(accepted)) if slots is None else slots)

    def prefill(self, tokens: Tokens, slots, lengths) -> np.ndarray:
        given, slots = _int32(slots), range(len(lengths)) if slots is None else slots
        tokens, live = self._prepare(tokens, slots, lengths)
        before = self.state
        self.state, out = self._call("prefill", before, tokens, given, _int32(lengths))
        self._compare_outputs(out, self.oracle.prefill(tokens, slots, lengths), live, slots, tokens.v.dtype)
        self._assert_untouched(before, slots, lengths)
        for slot, _ in self._rows_with_tokens(slots, lengths):
            assert self.state.pointer.length[slot] == 0, f"slot {slot} did not end folded"
        return out

    def flush(self, slots=None, where=None) -> None:
        self.poison_rings()
        before = self.state
        self.state = self._call("flush", before, _int32(slots), None if where is None else np.asarray(where, bool))
        slots = range(self.num_slots) if slots is None else slots
        where = [True] * len(slots) if where is None else where
        self._assert_untouched(before, slots, where)
        assert same_bits(before.buffer, self.state.buffer), "a flush wrote to the ring"
        for slot, _ in self._rows_with_tokens(slots, where):
            assert self.state.pointer.length[slot] == 0, f"slot {slot} still has records after its flush"

    def reset(self, slots) -> None:
        before = self.state
        self.state = jitted("reset")(before, _int32(slots))
        self.oracle.reset(slots)
        self._assert_untouched(before, slots, [1] * len(slots))

    def copy_slots(self, source, target) -> None:
        before = self.state
        self.state = jitted("copy_slots")(before, _int32(source), _int32(target))
        self.oracle.copy_slots(source, target)
        paired = [self.oracle.real(s) and self.oracle.real(t) for s, t in zip(source, target, strict=True)]
        self._assert_untouched(before, target, paired)
        for s, t, both in zip(source, target, paired, strict=True):
            if both:
                assert same_bits(slot_of(before, s), slot_of(self.state, t)), f"slot {t} is no copy of slot {s}"

    def check(self) -> None:
        """Every slot's present state and position, and the promise that no draft can land on a row that is read."""
        self.poison_rings()
        got = jitted("materialize")(self.state)
        for slot, want in enumerate(self.oracle.state):
            assert_heads_close(got[slot], want, self.case.state_tolerance, f"state of slot {slot}", scale=0.01)
        self._assert_copy_is_current()
        length, origin = self.state.pointer.length, self.state.pointer.origin
        assert (length + origin == self.oracle.position).all(), f"positions {length + origin}, not {self.oracle.position}"
        assert (length >= 0).all(), f"negative pointer: {length}"
        assert (length + self.case.max_draft <= self.case.window).all(), f"no room for drafts: {length}"

    def _assert_copy_is_current(self) -> None:
        if self.state.readout is None:
            return
        owned = np.flatnonzero([np.isfinite(state).all() for state in self.oracle.state])
        want = encode(self.case.readout, whole_checkpoint(self.state))
        for slot in owned:
            got, want_slot = (
                jax.tree.map(lambda pool, n=slot: np.asarray(pool)[n], copy) for copy in (self.state.readout, want)
            )
            assert same_bits(got, want_slot), f"slot {slot}: the read-out copy is not that of its checkpoint"

    def _call(self, name: str, *arguments):
        try:
            return jitted(name, self.implementation)(*arguments)
        except NotImplementedError as reason:
            if self.implementation in _ALWAYS_AVAILABLE:
                raise
            pytest.skip(str(reason))

    def _rows_with_tokens(self, slots, lengths) -> list[tuple[int, int]]:
        return [(int(s), int(n)) for s, n in zip(slots, lengths, strict=True) if n and self.oracle.real(s)]

    def _prepare(self, tokens: Tokens, slots, lengths) -> tuple[Tokens, np.ndarray]:
        """Poisons dead tokens and dead ring rows; drafts of the rows about to move on are dead. Also which tokens live."""
        for slot, _ in self._rows_with_tokens(slots, lengths):
            self.oracle.drafts[slot] = []
        self.poison_rings()
        real = np.array([self.oracle.real(slot) for slot in slots])
        live = real[:, None] & (np.arange(tokens.q.shape[1]) < np.asarray(lengths)[:, None])
        return poison_dead(tokens, live), live

    def _compare_outputs(self, out, want, live, slots, dtype) -> None:
        assert out.dtype == dtype, f"outputs are {out.dtype}, the values {dtype}"
        assert (out[~live] == 0).all(), "an output past the row's tokens is not zero"
        for row in np.flatnonzero(live.any(axis=1)):
            # an output is a sum over its state's columns, so its rounding is measured by that state where the sum cancels
            size = self._size(slots[row])
            by_head = (np.swapaxes(x[row, live[row]], 0, 1) for x in (out, want))
            assert_heads_close(*by_head, self.case.output_tolerance, f"outputs of row {row}", scale=max(0.05, size / 5))

    def _size(self, slot: int) -> float:
        """The largest norm of a head's state, before the slot's drafts or after any of them."""
        states = [self.oracle.state[slot]]
        for token in self.oracle.drafts[slot]:
            states.append(advance(self.case.recurrence, states[-1], token)[0])
        return np.linalg.norm(states, axis=(2, 3)).max()

    def _assert_untouched(self, before: ReplayState, slots, touched) -> None:
        named = {int(slot) for slot, yes in zip(slots, touched, strict=True) if yes}
        for slot in set(range(self.num_slots)) - named:
            assert same_bits(slot_of(before, slot), slot_of(self.state, slot)), f"slot {slot} changed and had no part in this"

    def _assert_only_appended(self, before: ReplayState, slot: int, length: int) -> None:
        """A verify writes its own ring rows, and the checkpoint only where the ring was due."""
        records = int(before.pointer.length[slot])
        own = ring_rows(before, slot, records, length)
        others = np.setdiff1d(np.arange(self.case.window), own)
        for old, new in zip(jax.tree.leaves(before.buffer), jax.tree.leaves(self.state.buffer), strict=True):
            same = same_bits(old[slot][:, others], new[slot][:, others])
            assert same, f"slot {slot}: a verify wrote to ring rows besides {own}"
        if records + 2 * self.case.max_draft <= self.case.window:
            for old, new in ((before.checkpoint, self.state.checkpoint), (before.readout, self.state.readout)):
                same = same_bits(*(jax.tree.map(lambda pool: pool[slot], pools) for pools in (old, new)))
                assert same, f"slot {slot}: checkpoint or its copy written early"


def _int32(values) -> np.ndarray | None:
    return None if values is None else np.asarray(values).astype(np.int32)
