"""One request of an engine, as its caller sees it: what has been generated, whether it goes on, how to stop or fork it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from replayssm_jax.decoding.sampling import SamplingParams
from replayssm_jax.decoding.text import TextStream, Tokenizer

if TYPE_CHECKING:
    from replayssm_jax.decoding.engine import Engine


class RequestError(RuntimeError):
    """A request failed while it ran; others went on."""


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # for a slot, for the first time or again
    RUNNING = "running"  # in a slot, its prompt read or being read
    PAUSED = "paused"  # out of its slot until it is resumed
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of a request.

    Attributes:
        prompt: its tokens.
        tokens: generated; a stop token that ended it included.
        logprobs: of each, natural, under the model's own distribution: before temperature, penalty and restrictions.
        text: of the tokens, without a stop token and from a stop string on; empty without a tokenizer.
        finish_reason: "stop", "length", "cancelled" or "error".
        error: what went wrong, None if nothing.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Delta:
    """What a request has gained: tokens, their log-probabilities, and text that no stop string can take back."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


class Request:
    """A request in an engine. Made by ``Engine.submit`` and ``Engine.fork``; the engine alone changes it.

    Iterating over it runs the engine until there is news of it, and yields a ``Delta`` at a time.

    Attributes:
        number: of the engine's requests in order of arrival.
        prompt: tokens.
        params: what it asks for; ``max_tokens`` as cut to the cache, if the engine truncates.
        priority: higher ones go first, and take the slots of lower ones.
        state: where it is.
        tokens, logprobs: generated so far.
        error: why it failed.
    """

    def __init__(
        self, engine: Engine, number: int, prompt: tuple[int, ...], params: SamplingParams, priority: int, *, memory: Any = None
    ):
        self.number, self.prompt, self.params, self.priority = number, prompt, params, priority
        self.state = State.WAITING
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.memory = memory  # the slot's, while it has none of its own: of some beginning of its text
        self.followers: list[Request] = []  # forks that wait until its prompt has been read
        self.leader: Request | None = None  # the request that it follows
        self.prefix_only = False  # whether its prompt is all there is to it
        self._engine = engine
        self._text = _Text(engine.tokenizer, params.stop)
        self.handed_out = 0, 0  # tokens and characters that ``news`` has given

    def __repr__(self) -> str:
        return f"Request({self.number}, {self.state.value}, {len(self.prompt)} + {len(self.tokens)} tokens)"

    @property
    def done(self) -> bool:
        return self.state in (State.FINISHED, State.CANCELLED, State.FAILED)

    @property
    def length(self) -> int:
        """Of its text: prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def limit(self) -> int:
        """Length at which it ends."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def text(self) -> str:
        """Of the answer so far, but for what may yet become a stop string."""
        return self._text.settled if not self.done else self._text.whole

    def completion(self) -> Completion:
        """What has become of it so far."""
        return Completion(
            prompt=self.prompt,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            text=self.text,
            finish_reason=self.finish_reason or "",
            error=self.error,
        )

    def result(self) -> Completion:
        """Runs the engine until this request is done.

        Raises:
            RequestError: it failed, or it is paused and nothing would ever finish it.
        """
        while not self.done:
            self._run_on()
        if self.error is not None:
            raise RequestError(f"request {self.number} failed after {len(self.tokens)} tokens: {self.error}")
        return self.completion()

    def __iter__(self) -> Iterator[Delta]:
        while True:
            delta = self.news()
            if delta is not None:
                yield delta
            elif self.done:
                if self.error is not None:
                    raise RequestError(f"request {self.number} failed after {len(self.tokens)} tokens: {self.error}")
                return
            else:
                self._run_on()

    def news(self) -> Delta | None:
        """What it has gained since this was last asked; None if nothing. Runs nothing."""
        text = self.text
        num_tokens, num_characters = self.handed_out
        tokens, logprobs, new_text = self.tokens[num_tokens:], self.logprobs[num_tokens:], text[num_characters:]
        if not tokens and not new_text:
            return None
        self.handed_out = len(self.tokens), len(text)
        return Delta(tuple(tokens), tuple(logprobs), new_text)

    def belongs_to(self, engine: Engine) -> bool:
        return self._engine is engine

    def cancel(self) -> None:
        """Ends it where it is; what it has generated stays."""
        self._engine.cancel(self)

    def _run_on(self) -> None:
        if self.state is State.PAUSED:
            raise RequestError(f"request {self.number} is paused: resume it first")
        if not self._engine.busy:
            raise RequestError(f"request {self.number} is {self.state.value}, but its engine has nothing to run")
        self._engine.step()

    # what follows is the engine's

    def extend(self, tokens: list[int], logprobs: list[float], stop_token: bool) -> bool:
        """Takes new tokens, of which the last may be a stop token. Returns whether a stop string has ended it."""
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if not (stop_token and i == len(tokens) - 1) and self._text.push(token):
                return True
        return False

    def finish(self, state: State, reason: str, error: str | None = None) -> None:
        self.state, self.finish_reason, self.error, self.memory = state, reason, error, None
        try:
            self._text.close()
        except Exception as trouble:  # a tokenizer's, with one request
            if error is None:
                self.state, self.finish_reason = State.FAILED, "error"
                self.error = f"its tokenizer raised {type(trouble).__name__}: {trouble}"

    def restore_answer(self, tokens: list[int], logprobs: list[float]) -> None:
        """Takes an answer that another engine, or a parent, has generated."""
        self.extend(list(tokens), list(logprobs), stop_token=False)


class _Text:
    """An answer's text as its tokens come, cut where a stop string begins."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]):
        self._stream: TextStream | None = None if tokenizer is None else tokenizer.stream()
        self._stop, self.whole, self._ended = stop, "", False

    def push(self, token: int) -> bool:
        """Returns whether a stop string has ended the text."""
        return self._stream is not None and self._append(self._stream.push(token))

    def close(self) -> None:
        try:
            if self._stream is not None and not self._ended:
                self._append(self._stream.close())
        finally:
            self._ended = True

    @property
    def settled(self) -> str:
        """The text but for an end that begins a stop string."""
        for held in range(min(max(map(len, self._stop), default=1) - 1, len(self.whole)), 0, -1):
            if any(stop.startswith(self.whole[-held:]) for stop in self._stop):
                return self.whole[:-held]
        return self.whole

    def _append(self, new: str) -> bool:
        if self._ended:
            return True
        longest = max(map(len, self._stop), default=0)
        start = max(0, len(self.whole) - longest)
        self.whole += new
        found = [at for stop in self._stop if (at := self.whole.find(stop, start)) >= 0]
        if found:
            self.whole, self._ended = self.whole[: min(found)], True
        return bool(found)
