"""How an engine works, and which requests it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from replayssm_jax.checks import IMPLEMENTATIONS
from replayssm_jax.decoding.sampling import SamplingParams
from replayssm_jax.decoding.text import Tokenizer
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.state import ReplayPolicy
from replayssm_jax.trees import check_positive_int


class TooLongError(ValueError):
    """A request asks for more tokens than a slot holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine works.

    Attributes:
        num_slots: sequences that are decoded together.
        max_length: longest text of a sequence, prompt and answer.
        prefill_chunk: most tokens of a prompt that pass through the model between two decode bursts.
        prefill_rows: prompts that are read together.
        rounds_per_step: most decode rounds between two looks at what has come.
        max_stop_tokens: most stop tokens of a request.
        max_prefixes: most stored prefixes; the one unused for longest makes room.
        truncate: whether a request too long for a slot is cut to it, its answer first and then its prompt from the front,
            or refused.
        implementation: of the model, as in ``replayssm_jax.verify``; a drafting model takes the fastest that can.

    Raises:
        TypeError, ValueError: a size is no int of at least 1, ``truncate`` no bool, or no implementation has this name.
    """

    num_slots: int = 16
    max_length: int = 2048
    prefill_chunk: int = 64
    prefill_rows: int = 4
    rounds_per_step: int = 16
    max_stop_tokens: int = 8
    max_prefixes: int = 16
    truncate: bool = False
    implementation: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "int":
                check_positive_int(field.name, getattr(self, field.name))
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, a token and its answer, got {self.max_length}")
        if not isinstance(self.truncate, bool):
            raise TypeError(f"truncate must be a bool, got {self.truncate!r}")
        if self.implementation is not None and self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {self.implementation!r}")


def check_int(name: str, value: Any, least: int | None = None) -> None:
    """Raises TypeError or ValueError naming ``name`` unless ``value`` is an int, of at least ``least`` if that is given."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def default_policy(model: Decoder, num_drafts: int) -> ReplayPolicy:
    """Of the recurrent layers, for rounds of up to ``num_drafts`` drafts: the shorter window that leaves room for records."""
    most = num_drafts + 1
    window = next((size for size in (16, 32) if size >= 4 * most), max(32, 2 * most))
    return ReplayPolicy(window=window, max_draft=most, record_dtype=model.dtype)


def encode(prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """A prompt's tokens.

    Raises:
        TypeError, ValueError: it is empty, holds what is no token, or is text and there is no tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("prompt is text, but there is no tokenizer: give tokens, or a tokenizer")
        tokens = tuple(tokenizer.encode(prompt))
    else:
        try:
            tokens = tuple(prompt)
        except TypeError as error:
            raise TypeError(f"prompt must be text or a sequence of tokens, got {prompt!r}") from error
    if not tokens:
        raise ValueError("prompt must hold at least one token, got none")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"prompt must hold tokens, got {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt must hold tokens in [0, {vocab_size}), got {token}")
    return tuple(map(int, tokens))


def fit(
    tokens: tuple[int, ...], params: SamplingParams, config: EngineConfig, *, has_tokenizer: bool
) -> tuple[tuple[int, ...], SamplingParams]:
    """A request as an engine can run it: cut to a slot's length, if the engine truncates.

    Raises:
        TooLongError: it is longer than a slot, and the engine does not truncate.
        TypeError: params are no ``SamplingParams``.
        ValueError: stop strings without a tokenizer, or too many stop tokens.
    """
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams, got {params!r}")
    if params.stop and not has_tokenizer:
        raise ValueError(f"stop={params.stop!r} needs a tokenizer: give one to the engine, or use stop_tokens")
    if len(params.stop_tokens) > config.max_stop_tokens:
        raise ValueError(
            f"stop_tokens holds {len(params.stop_tokens)} tokens, more than max_stop_tokens={config.max_stop_tokens}"
        )
    room = config.max_length
    if len(tokens) + params.max_tokens <= room:
        return tokens, params
    if not config.truncate:
        raise TooLongError(
            f"a prompt of {len(tokens)} tokens and max_tokens={params.max_tokens} are longer than max_length={room}: "
            f"ask for less, or let the engine truncate"
        )
    tokens = tokens[-(room - 1) :]
    return tokens, dataclasses.replace(params, max_tokens=min(params.max_tokens, room - len(tokens)))
