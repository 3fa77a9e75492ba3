"""The sequences that are being decoded: what every slot holds on the device, and how one gets in and out.

A sequence's text is its prompt and its answer. All of it but its last token has gone through the model, or has yet to
(``cache.pointer.position < length - 1``): then ``prefill`` has work to do. A sequence is *ready* to be decoded where the last
token alone is missing.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.decoding.drafters import Drafter
from replayssm_jax.decoding.sampling import Sampling, SamplingParams
from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.state import ReplayPolicy
from replayssm_jax.trees import check_positive_int, register

Array = jax.Array

_NO_TOKEN = -1


class Status(enum.IntEnum):
    """Of a slot: whether its sequence goes on, and if not, why."""

    FREE = 0
    RUNNING = 1
    STOPPED = 2  # by a stop token
    FULL = 3  # as long as was asked for
    FAILED = 4  # the model's logits are not finite


@register(("rounds", "drafted", "accepted", "flushes"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What has happened in each slot since its sequence came. [N] int32 each.

    Attributes:
        rounds: passes of the model over it.
        drafted, accepted: drafts proposed, and drafts kept.
        flushes: writes of its checkpoints.
    """

    rounds: Array
    drafted: Array
    accepted: Array
    flushes: Array


@register(("cache", "drafting", "text", "logprob", "length", "limit", "status", "sampling", "stop_tokens", "counts"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """All slots. S is the longest text.

    Attributes:
        cache: of the model.
        drafting: what the drafter keeps, a pytree of arrays with slots first.
        text: prompt and answer, garbage behind. [N, S] int32
        logprob: of the answer's tokens, under the model and before any of ``Sampling``. [N, S] float32
        length: of the text. [N] int32
        limit: length at which it ends, at most S. [N] int32
        status: a ``Status``. [N] int32
        sampling: of the sequences.
        stop_tokens: filled up with -1. [N, M] int32
        counts: statistics.
    """

    cache: ModelCache
    drafting: Any
    text: Array
    logprob: Array
    length: Array
    limit: Array
    status: Array
    sampling: Sampling
    stop_tokens: Array
    counts: Counts

    @property
    def num_slots(self) -> int:
        return self.text.shape[0]

    @property
    def max_length(self) -> int:
        return self.text.shape[1]

    @property
    def unread(self) -> Array:
        """Tokens of the text, its last one aside, that have not gone through the model. [N] int32"""
        return jnp.where(self.status == Status.RUNNING, self.length - 1 - self.cache.pointer.position, 0)

    @property
    def ready(self) -> Array:
        """Sequences that a decode round extends. [N] bool"""
        return (self.status == Status.RUNNING) & (self.unread == 0)


def init_sequences(
    model: Decoder, drafter: Drafter, num_slots: int, max_length: int, policy: ReplayPolicy | None, max_stop_tokens: int
) -> Sequences:
    """Empty slots for sequences of up to ``max_length`` tokens, prompt and answer together."""
    for name, value in (("num_slots", num_slots), ("max_length", max_length), ("max_stop_tokens", max_stop_tokens)):
        check_positive_int(name, value)

    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((num_slots, *shape), dtype)

    return Sequences(
        cache=model.init_cache(num_slots, max_length, policy),
        drafting=drafter.init(num_slots, max_length),
        text=zeros(max_length),
        logprob=zeros(max_length, dtype=jnp.float32),
        length=zeros(),
        limit=zeros(),
        status=zeros(),
        sampling=jax.tree.map(jnp.asarray, Sampling.of([SamplingParams()] * num_slots)),
        stop_tokens=jnp.full((num_slots, max_stop_tokens), _NO_TOKEN, jnp.int32),
        counts=Counts(rounds=zeros(), drafted=zeros(), accepted=zeros(), flushes=zeros()),
    )


def entry(text: Sequence[int], limit: int, params: SamplingParams, sequences: Sequences) -> dict[str, Any]:
    """What ``put`` needs of a sequence beside its memory, as arrays of one row: made on the host.

    Raises:
        ValueError: more stop tokens than the slots have room for.
    """
    size, stops = sequences.max_length, sequences.stop_tokens.shape[1]
    if len(params.stop_tokens) > stops:
        raise ValueError(f"stop_tokens holds {len(params.stop_tokens)} tokens, more than max_stop_tokens={stops}")
    padded = np.zeros(size, np.int32)
    padded[: len(text)] = text
    stop_tokens = np.full(stops, _NO_TOKEN, np.int32)
    stop_tokens[: len(params.stop_tokens)] = params.stop_tokens
    return {
        "text": padded,
        "length": np.int32(len(text)),
        "limit": np.int32(limit),
        "status": np.int32(Status.RUNNING),
        "sampling": jax.tree.map(lambda column: column[0], Sampling.of([params])),
        "stop_tokens": stop_tokens,
    }


def take(sequences: Sequences, slot: Array) -> tuple[ModelCache, Any]:
    """A slot's memory, ring and pointer included: what the model and the drafter know of its text."""
    return jax.tree.map(lambda pool: pool[slot], (sequences.cache, sequences.drafting))


def put(sequences: Sequences, slot: Array, memory: tuple[ModelCache, Any] | None, fields: dict[str, Any]) -> Sequences:
    """Starts a sequence in a slot, whatever was in there.

    Args:
        sequences: all slots.
        slot: [] int32
        memory: what ``take`` gave for some beginning of the text, None for none of it.
        fields: from ``entry``.
    """

    def set_row(pool: Array, row: Any) -> Array:
        return pool.at[slot].set(row)

    pools = sequences.cache, sequences.drafting
    if memory is None:
        # a drafter's memory is addressed by position, or is a model's cache
        cache = sequences.cache.reset(slot[None])
        drafting = jax.tree.map(
            lambda pool: pool.reset(slot[None]) if isinstance(pool, ModelCache) else set_row(pool, jnp.zeros_like(pool[0])),
            sequences.drafting,
            is_leaf=lambda x: isinstance(x, ModelCache),
        )
    else:
        cache, drafting = jax.tree.map(set_row, pools, memory)
    # what rounds stochastically draws by the request's own seed, as its samples do
    seed = jax.lax.bitcast_convert_type(jnp.asarray(fields["sampling"].seed), jnp.int32)
    pointer = dataclasses.replace(cache.pointer, request=set_row(cache.pointer.request, seed))
    cache = dataclasses.replace(cache, pointer=pointer)
    own = {name: getattr(sequences, name) for name in fields}
    zero = jax.tree.map(lambda pool: set_row(pool, 0), sequences.counts)
    return dataclasses.replace(sequences, cache=cache, drafting=drafting, counts=zero, **jax.tree.map(set_row, own, fields))


def halt(sequences: Sequences, where: Array) -> Sequences:
    """Frees slots. ``where`` [N] bool"""
    return dataclasses.replace(sequences, status=jnp.where(where, Status.FREE, sequences.status))
