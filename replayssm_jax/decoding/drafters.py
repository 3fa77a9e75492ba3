"""Who proposes drafts: nobody, the text itself, a smaller model, or a head that the model was trained with.

A drafter may be wrong at no cost but speed: ``speculative.choose`` keeps the model's own distribution. It is an ``nnx.Module``,
so that its weights, if any, travel as arguments of the compiled step, and four functions over a pytree of its own:

    drafting = init(num_slots, max_length)
    drafting = read(model, drafting, piece)                         # a piece of the prompts went through the model
    drafting, drafts, counts, proposals = propose(model, drafting, sequences)
    drafting = keep(model, drafting, sequences, hidden, tokens, emitted)   # what became of the drafts

Arrays have slots first, are addressed by position or belong to a ``ModelCache``, so that a slot is moved as a whole.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from replayssm_jax.decoding.engine_config import default_policy
from replayssm_jax.decoding.sampling import DRAFT, adjust, draw, token_keys
from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.models.qwen3_5_mtp import Qwen3_5MTP
from replayssm_jax.pointer import ReplayPointer, init_pointer
from replayssm_jax.trees import check_positive_int

if TYPE_CHECKING:
    from replayssm_jax.decoding.sequences import Sequences

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of R prompts, as the model has just read it.

    Attributes:
        tokens: [R, C] int32
        following: the token behind each. [R, C] int32
        hidden: the model's normed hidden state after each. [R, C, hidden_size]
        slots, lengths: as in ``Decoder.prefill``. [R] int32
    """

    tokens: Array
    following: Array
    hidden: Array
    slots: Array
    lengths: Array


class Drafter(nnx.Module):
    """Proposes nothing: plain decoding, and the base of those that do.

    Attributes:
        num_drafts: D, most drafts of a round.
    """

    num_drafts = 0

    def check(self, model: Decoder) -> None:
        """Raises ValueError where this drafter cannot serve a model."""

    def init(self, num_slots: int, max_length: int) -> Any:
        """An empty memory. Pytree of arrays with slots first."""
        del num_slots, max_length
        return ()

    def read(self, model: Decoder, drafting: Any, piece: Piece) -> Any:
        """Takes note of a piece of prompts."""
        del model, piece
        return drafting

    def propose(self, model: Decoder, drafting: Any, sequences: Sequences) -> tuple[Any, Array, Array, Array | None]:
        """Drafts for every slot; what it says of those that are not ready is not used.

        Returns:
            The memory, drafts [N, D] int32, how many of them [N] int32, and the logits they were drawn from [N, D, V]
            float32, or None where each was chosen, not drawn.
        """
        del model
        num_slots = sequences.num_slots
        return drafting, jnp.zeros((num_slots, 0), jnp.int32), jnp.zeros(num_slots, jnp.int32), None

    def keep(self, model: Decoder, drafting: Any, sequences: Sequences, hidden: Array, tokens: Array, emitted: Array) -> Any:
        """Takes note of what became of the drafts.

        Args:
            model: whose text it is.
            drafting: as ``propose`` returned it.
            sequences: before the round.
            hidden: the model's hidden states after the last token of the text and after each draft. [N, D + 1, hidden_size]
            tokens: the tokens that now follow the text. [N, D + 1] int32
            emitted: how many of them, 0 for a slot without a round. [N] int32
        """
        del model, sequences, hidden, tokens, emitted
        return drafting


class PromptLookup(Drafter):
    """Proposes what followed the last tokens where they occurred before: no weights, good for text that repeats itself.

    The latest of the longest matches, up to ``max_ngram`` tokens, wins. A match near the end is continued periodically.

    Args:
        num_drafts: D
        max_ngram, min_ngram: most and fewest tokens that must match.

    Raises:
        TypeError, ValueError: an argument is no int of at least 1, or ``min_ngram > max_ngram``.
    """

    def __init__(self, num_drafts: int = 4, *, max_ngram: int = 4, min_ngram: int = 2):
        for name, value in (("num_drafts", num_drafts), ("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            check_positive_int(name, value)
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram={min_ngram} must be at most max_ngram={max_ngram}")
        self.num_drafts, self.max_ngram, self.min_ngram = num_drafts, max_ngram, min_ngram

    def propose(self, model: Decoder, drafting: Any, sequences: Sequences) -> tuple[Any, Array, Array, Array | None]:
        del model
        text, last = sequences.text, (sequences.length - 1)[:, None]
        place = jnp.arange(sequences.max_length)
        still = place < last  # tokens before the last one
        run = jnp.zeros(text.shape, jnp.int32)
        for back in range(self.max_ngram):
            token = jnp.take_along_axis(text, jnp.maximum(last - back, 0), axis=1)
            here = jnp.roll(text, back, axis=1) == token
            still = still & here & (place >= back) & (last >= back)
            run = run + still
        score = jnp.where(run >= self.min_ngram, run * sequences.max_length + place, -1)
        match = jnp.argmax(score, axis=1)[:, None]
        found = jnp.take_along_axis(score, match, axis=1)[:, 0] >= 0
        period = jnp.maximum(last - match, 1)
        source = match + 1 + jnp.arange(self.num_drafts) % period
        drafts = jnp.take_along_axis(text, jnp.minimum(source, sequences.max_length - 1), axis=1)
        return drafting, drafts, jnp.where(found, self.num_drafts, 0), None


class SmallModel(Drafter):
    """Draws drafts from a smaller model with the same vocabulary, under the request's own temperature and restrictions.

    Its drafts stay uncommitted in its own rings until the large model has spoken: each of its D passes verifies the drafts
    before it anew, and acceptance moves its pointer too. Nothing is copied or rolled back.

    Args:
        model: a decoder.
        num_drafts: D
    """

    def __init__(self, model: Decoder, num_drafts: int = 4):
        check_positive_int("num_drafts", num_drafts)
        self.model, self.num_drafts = model, num_drafts
        self.policy = default_policy(model, num_drafts)

    def check(self, model: Decoder) -> None:
        if self.model.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"the drafting model's vocab_size={self.model.config.vocab_size} must be the model's, {model.config.vocab_size}"
            )

    def init(self, num_slots: int, max_length: int) -> ModelCache:
        return self.model.init_cache(num_slots, max_length, self.policy)

    def read(self, model: Decoder, drafting: ModelCache, piece: Piece) -> ModelCache:
        del model
        return self.model.forward(drafting, piece.tokens, piece.slots, piece.lengths, prefill=True)[0]

    def propose(self, model: Decoder, drafting: ModelCache, sequences: Sequences) -> tuple[Any, Array, Array, Array | None]:
        del model
        num_slots, count = sequences.num_slots, self.num_drafts
        rows, position, known = jnp.arange(num_slots), drafting.pointer.position, self._unread(drafting, sequences)
        place = jnp.minimum(position[:, None] + jnp.arange(count + 2), sequences.max_length - 1)
        fed = jnp.take_along_axis(sequences.text, place, axis=1)
        shape = (num_slots, count, self.model.config.vocab_size)

        def one(i: Array, carry: tuple[ModelCache, Array, Array]) -> tuple[ModelCache, Array, Array]:
            cache, fed, proposals = carry
            cache, hidden = self.model.forward(cache, fed[:, :-1], lengths=jnp.where(known > 0, known + i, 0))
            hidden = jnp.take_along_axis(hidden, jnp.maximum(known + i - 1, 0)[:, None, None], axis=1)
            logits = adjust(self.model.logits(hidden), sequences.sampling)[:, 0]
            draft = draw(logits, token_keys(sequences.sampling.seed, sequences.length + i, DRAFT))
            target = rows, jnp.where(known > 0, known + i, count + 2)
            return cache, fed.at[target].set(draft, mode="drop"), proposals.at[:, i].set(logits)

        drafting, fed, proposals = lax.fori_loop(0, count, one, (drafting, fed, jnp.zeros(shape, jnp.float32)))
        drafts = jnp.take_along_axis(fed, known[:, None] + jnp.arange(count), axis=1)
        return drafting, drafts, jnp.where(known > 0, count, 0), proposals

    def keep(
        self, model: Decoder, drafting: ModelCache, sequences: Sequences, hidden: Array, tokens: Array, emitted: Array
    ) -> ModelCache:
        del model, hidden, tokens
        known = self._unread(drafting, sequences)
        # of the drafts it has read all but the last one
        drafts = jnp.minimum(emitted - 1, self.num_drafts - 1)
        return self.model.commit(drafting, jnp.where(emitted > 0, known + drafts, 0))

    @staticmethod
    def _unread(drafting: ModelCache, sequences: Sequences) -> Array:
        """Tokens of a ready text that it has yet to read: the last one, and the one before if it was its last draft. [N]"""
        return jnp.where(sequences.ready, sequences.length - drafting.pointer.position, 0)


class MultiTokenPrediction(Drafter):
    """Proposes what a multi-token-prediction head thinks most likely, one token at a time from the model's hidden states.

    Args:
        head: of the model's own checkpoint.
        num_drafts: D. The head was trained to look one token ahead; further ones are drafted from its own hidden states.
    """

    def __init__(self, head: Qwen3_5MTP, num_drafts: int = 2):
        check_positive_int("num_drafts", num_drafts)
        self.head, self.num_drafts = head, num_drafts

    def check(self, model: Decoder) -> None:
        if self.head.config != model.config:
            raise ValueError(f"the head belongs to another model: its config is {self.head.config}, the model's {model.config}")

    def init(self, num_slots: int, max_length: int) -> dict[str, Any]:
        hidden = jnp.zeros((num_slots, self.head.config.hidden_size), self.head.dtype)
        pointer = init_pointer(num_slots, window=2, max_draft=1)
        return {"cache": self.head.init_cache(num_slots, max_length), "hidden": hidden, "pointer": pointer}

    def read(self, model: Decoder, drafting: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return self._pair(model, drafting, piece.hidden, piece.following, piece.slots, piece.lengths)

    def propose(
        self, model: Decoder, drafting: dict[str, Any], sequences: Sequences
    ) -> tuple[dict[str, Any], Array, Array, Array | None]:
        hidden, pointer, cache, drafts = drafting["hidden"][:, None], drafting["pointer"], drafting["cache"], []
        for i in range(self.num_drafts):
            drafts.append(jnp.argmax(model.logits(hidden)[:, 0], axis=-1).astype(jnp.int32))
            if i + 1 < self.num_drafts:  # its cache is addressed by position: what comes of drafts is overwritten
                ahead = dataclasses.replace(pointer, origin=pointer.origin + i)
                lengths = sequences.ready.astype(jnp.int32)
                cache, hidden = self.head(model, cache, hidden, drafts[-1][:, None], ahead, None, lengths)
        # nothing to go by before its first pair
        counts = jnp.where(pointer.position > 0, self.num_drafts, 0)
        return {**drafting, "cache": cache}, jnp.stack(drafts, axis=1), counts, None

    def keep(
        self, model: Decoder, drafting: dict[str, Any], sequences: Sequences, hidden: Array, tokens: Array, emitted: Array
    ) -> dict[str, Any]:
        del sequences
        return self._pair(model, drafting, hidden, tokens, jnp.arange(emitted.shape[0]), emitted)

    def _pair(
        self, model: Decoder, drafting: dict[str, Any], hidden: Array, following: Array, slots: Array, lengths: Array
    ) -> dict[str, Any]:
        """Reads hidden states with the tokens that follow them, and remembers its own last hidden state."""
        pointer: ReplayPointer = drafting["pointer"]
        cache, own = self.head(model, drafting["cache"], hidden, following, pointer, slots, lengths)
        last = jnp.take_along_axis(own, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        rows = jnp.where(lengths > 0, slots, pointer.num_slots)
        return {
            "cache": cache,
            "hidden": drafting["hidden"].at[rows].set(last, mode="drop"),
            "pointer": dataclasses.replace(pointer, origin=pointer.origin.at[rows].add(lengths, mode="drop")),
        }
