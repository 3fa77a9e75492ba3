"""The decode loop on the device: rounds of draft, verify, choose and commit, as many as the host asks for in one call.

A round passes every ready sequence's last token and its drafts through the model at once. What is kept moves pointers and
lengths; checkpoints are written by a flush alone, once in a window, whatever was drafted or rejected.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from replayssm_jax.decoding.drafters import Drafter, Piece
from replayssm_jax.decoding.sampling import adjust, penalize
from replayssm_jax.decoding.sequences import Sequences, Status
from replayssm_jax.decoding.speculative import choose
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.slots import gather_index, in_range

Array = jax.Array


def decode(
    model: Decoder,
    drafter: Drafter,
    sequences: Sequences,
    max_rounds: Array | int,
    min_ready: Array | int = 1,
    *,
    implementation: str | None = None,
) -> Sequences:
    """Decodes all ready sequences until ``max_rounds`` have passed or fewer than ``min_ready`` are left.

    Args:
        model, drafter: static but for their weights.
        sequences: donate it: its arrays are updated in place.
        max_rounds, min_ready: [] int32
        implementation: as in ``replayssm_jax.verify``.
    """

    def going(carry: tuple[Sequences, Array]) -> Array:
        sequences, rounds = carry
        ready = sequences.ready.sum()
        return (rounds < max_rounds) & (ready >= jnp.maximum(min_ready, 1))

    def one(carry: tuple[Sequences, Array]) -> tuple[Sequences, Array]:
        sequences, rounds = carry
        return decode_round(model, drafter, sequences, implementation=implementation), rounds + 1

    return lax.while_loop(going, one, (sequences, jnp.int32(0)))[0]


def decode_round(model: Decoder, drafter: Drafter, sequences: Sequences, *, implementation: str | None = None) -> Sequences:
    """One round over all ready sequences; the others are left alone."""
    s, ready, length = sequences, sequences.ready, sequences.length
    drafting, drafts, counts, proposals = drafter.propose(model, s.drafting, s)
    # the last token of a text is never drafted for: its place is the model's own
    counts = jnp.where(ready, jnp.clip(counts, 0, s.limit - length - 1), 0)
    last = jnp.take_along_axis(s.text, jnp.maximum(length - 1, 0)[:, None], axis=1)
    fed = jnp.concatenate([last, drafts], axis=1)
    due = s.cache.pointer.due & ready
    live = jnp.where(ready, counts + 1, 0)
    cache, hidden = model.forward(s.cache, fed, lengths=live, implementation=implementation)
    logits = model.logits(hidden)
    targets = lax.cond(
        jnp.any(ready & (s.sampling.repetition_penalty != 1)),
        lambda: penalize(logits, s.sampling.repetition_penalty, s.text, length, drafts),
        lambda: logits,
    )
    tokens, accepted = choose(adjust(targets, s.sampling), drafts, counts, proposals, s.sampling.seed, length)

    place = jnp.arange(fed.shape[1])
    stops = (tokens[..., None] == s.stop_tokens[:, None]).any(axis=-1) & (place <= accepted[:, None])
    emitted = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1), accepted) + 1
    finite = jnp.isfinite(logits).all(axis=-1) | (place >= emitted[:, None])
    failed = ready & ~finite.all(axis=1)
    emitted = jnp.where(ready & ~failed, emitted, 0)
    cache = model.commit(cache, emitted)
    drafting = drafter.keep(model, drafting, s, hidden, tokens, emitted)

    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    logprob = chosen - jax.nn.logsumexp(logits, axis=-1)
    rows = jnp.arange(s.num_slots)[:, None]
    target = rows, jnp.where(place < emitted[:, None], length[:, None] + place, s.max_length)
    length = length + emitted
    status = jnp.where(ready & (length >= s.limit), Status.FULL, s.status)
    status = jnp.where(ready & stops.any(axis=1), Status.STOPPED, status)
    return dataclasses.replace(
        s,
        cache=cache,
        drafting=drafting,
        text=s.text.at[target].set(tokens, mode="drop"),
        logprob=s.logprob.at[target].set(logprob, mode="drop"),
        length=length,
        status=jnp.where(failed, Status.FAILED, status),
        counts=dataclasses.replace(
            s.counts,
            rounds=s.counts.rounds + ready,
            drafted=s.counts.drafted + counts,
            accepted=s.counts.accepted + jnp.maximum(emitted - 1, 0),
            flushes=s.counts.flushes + due,
        ),
    )


def prefill(
    model: Decoder,
    drafter: Drafter,
    sequences: Sequences,
    slots: Array,
    chunk: int,
    *,
    implementation: str | None = None,
) -> Sequences:
    """Passes the next piece of R texts through the model.

    Args:
        model, drafter, sequences, implementation: as in ``decode``.
        slots: sequences to advance; values outside [0, N) are padding. [R] int32
        chunk: most tokens of each, static.
    """
    s = sequences
    rows = gather_index(slots, s.num_slots)
    lengths = jnp.where(in_range(slots, s.num_slots), jnp.clip(s.unread[rows], 0, chunk), 0)
    place = s.cache.pointer.position[rows][:, None] + jnp.arange(chunk + 1)
    tokens = jnp.take_along_axis(s.text[rows], jnp.minimum(place, s.max_length - 1), axis=1)
    cache, hidden = model.forward(s.cache, tokens[:, :-1], slots, lengths, prefill=True, implementation=implementation)
    piece = Piece(tokens[:, :-1], tokens[:, 1:], hidden, slots, lengths)
    return dataclasses.replace(s, cache=cache, drafting=drafter.read(model, s.drafting, piece))
