"""An engine's slots, seen from the host: texts go in and tokens come out. Which text goes where is the engine's business."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replayssm_jax.decoding import loop, sequences
from replayssm_jax.decoding.drafters import Drafter
from replayssm_jax.decoding.engine_config import EngineConfig
from replayssm_jax.decoding.sampling import SamplingParams
from replayssm_jax.decoding.sequences import Sequences, Status
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.per_device import check_rows_divide
from replayssm_jax.state import ReplayPolicy

Array = jax.Array

# Tokens of a slot that are fetched at a time.
_FETCH = 64


class Grown(NamedTuple):
    """What a slot's text has gained: tokens, their log-probabilities, and the status it has now."""

    tokens: list[int]
    logprobs: list[float]
    status: Status


class Pool:
    """Slots on the device, and how much of each one's text is still unread.

    Args:
        model, drafter: whose weights are read now.
        config: of the engine.
        policy: of the recurrent layers.

    Raises:
        ValueError: the model lies on a mesh whose data axis does not divide num_slots and prefill_rows.
    """

    def __init__(self, model: Decoder, drafter: Drafter, config: EngineConfig, policy: ReplayPolicy):
        self._config = config
        self._shards = 1 if model.sharding is None else model.sharding.data_size
        if model.sharding is not None:
            check_rows_divide(model.sharding, "num_slots", config.num_slots)
            check_rows_divide(model.sharding, "prefill_rows", config.prefill_rows)
        self._graph, self._weights = nnx.split((model, drafter))
        sizes = config.num_slots, config.max_length, policy, config.max_stop_tokens
        self.sequences = sequences.init_sequences(model, drafter, *sizes)
        self.unread = np.zeros(config.num_slots, np.int64)

    def place(self, slot: int, text: Sequence[int], limit: int, params: SamplingParams, memory: Any) -> None:
        """Starts a text in a free slot. ``memory`` is what ``take`` gave for some beginning of it, or None."""
        fields = sequences.entry(text, limit, params, self.sequences)
        self.sequences = _put(self.sequences, np.int32(slot), memory, fields)
        read = 0 if memory is None else int(memory[0].pointer.length) + int(memory[0].pointer.origin)
        self.unread[slot] = len(text) - 1 - read

    def read(self, slots: Sequence[int]) -> list[int]:
        """Passes the next piece of the first texts through the model, as many as there are rows for.

        On a mesh a row reads slots of its own data shard alone.

        Args:
            slots: that have something to read, in order of preference.

        Returns:
            Those that are now ready.
        """
        rows, size = np.full(self._config.prefill_rows, self._config.num_slots, np.int32), self._config.num_slots
        by_shard = rows.reshape(self._shards, -1)
        own = [[slot for slot in slots if slot * self._shards // size == i][: by_shard.shape[1]] for i in range(self._shards)]
        for row, chosen in zip(by_shard, own, strict=True):
            row[: len(chosen)] = chosen
        slots = [slot for chosen in own for slot in chosen]
        chunk, implementation = self._config.prefill_chunk, self._config.implementation
        self.sequences = _prefill(self._graph, self._weights, self.sequences, rows, chunk, implementation)
        self.unread[slots] = np.maximum(self.unread[slots] - chunk, 0)
        return [slot for slot in slots if not self.unread[slot]]

    def decode(self, max_rounds: int, min_ready: int) -> None:
        """Decodes all ready slots until so many rounds have passed or fewer than ``min_ready`` are left."""
        limits = np.int32(min(max_rounds, 2**31 - 1)), np.int32(min_ready)
        self.sequences = _decode(self._graph, self._weights, self.sequences, *limits, self._config.implementation)

    def fetch(self, known: dict[int, int]) -> dict[int, Grown]:
        """What the texts in some slots have gained beyond the lengths that are known of them. Waits for the device."""
        start = np.zeros(self._config.num_slots, np.int32)
        start[list(known)] = list(known.values())
        text, logprob, length, status = jax.device_get(_fetch(self.sequences, start))
        grown = {slot: Grown([], [], Status(status[slot])) for slot in known}
        behind = list(known)
        while True:
            for slot in behind:
                count = min(_FETCH, length[slot] - start[slot])
                grown[slot].tokens.extend(text[slot, :count].tolist())
                grown[slot].logprobs.extend(logprob[slot, :count].tolist())
            start = np.minimum(start + _FETCH, length)
            behind = [slot for slot in behind if start[slot] < length[slot]]
            if not behind:
                return grown
            text, logprob, *_ = jax.device_get(_fetch(self.sequences, start))

    def take(self, slot: int) -> Any:
        """A copy of what model and drafter know of a slot's text, ring and pointer included, on the device."""
        return _take(self.sequences, np.int32(slot))

    def free(self, slot: int, *, running: bool = True) -> None:
        """Frees a slot, which has to be told if it is still running."""
        if running:
            self.sequences = _halt(self.sequences, np.arange(self._config.num_slots) == slot)
        self.unread[slot] = 0

    def restore(self, saved: Sequences) -> None:
        """Takes slots that another pool of the same sizes had. On a mesh they lie as this pool's do."""

        def place(new: Any, old: Array) -> Array:
            return jax.device_put(new, old.sharding) if old.committed else jnp.asarray(new)

        self.sequences = jax.tree.map(place, saved, self.sequences)
        self.unread = np.array(self.sequences.unread, np.int64)


# Functions of the module, so that all pools of the same model, drafter and sizes share what is compiled.


@functools.partial(jax.jit, static_argnames=("graph", "implementation"), donate_argnames="sequences")
def _decode(graph: Any, weights: Any, sequences: Any, max_rounds: Array, min_ready: Array, implementation: str | None) -> Any:
    model, drafter = nnx.merge(graph, weights)
    return loop.decode(model, drafter, sequences, max_rounds, min_ready, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("graph", "chunk", "implementation"), donate_argnames="sequences")
def _prefill(graph: Any, weights: Any, sequences: Any, slots: Array, chunk: int, implementation: str | None) -> Any:
    model, drafter = nnx.merge(graph, weights)
    return loop.prefill(model, drafter, sequences, slots, chunk, implementation=implementation)


_put = jax.jit(sequences.put, donate_argnums=0)
_halt = jax.jit(sequences.halt, donate_argnums=0)
_take = jax.jit(sequences.take)


@jax.jit
def _fetch(sequences: Any, start: Array) -> tuple[Array, Array, Array, Array]:
    """Texts and log-probabilities of all slots from ``start`` on, [N, 64] each, lengths and states [N]."""
    place = jnp.minimum(start[:, None] + jnp.arange(_FETCH), sequences.max_length - 1)
    text, logprob = (jnp.take_along_axis(x, place, axis=1) for x in (sequences.text, sequences.logprob))
    return text, logprob, sequences.length, sequences.status
