"""Continuous batching: requests come and go, slots are reused, the compiled steps stay the same.

    engine = Engine(model, num_slots=16, max_length=4096, tokenizer=tokenizer)
    request = engine.submit("In the beginning ", SamplingParams(max_tokens=100))
    for delta in request: print(delta.text, end="")

``step`` admits what waits, passes a piece of the prompts that are being read through the model, decodes a few rounds of
everything else, and hands out the tokens. Every way into a slot is the same: a request's text, and the memory of some beginning
of it that a slot had before: nothing for a new request, a stored prefix, the parent's for a fork, its own for one that was
preempted. Preempting, forking and saving copy slots, ring and pointer included, in the middle of a window or not.

An engine belongs to one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replayssm_jax.decoding.drafters import Drafter
from replayssm_jax.decoding.engine_config import EngineConfig, TooLongError, check_int, default_policy, encode, fit
from replayssm_jax.decoding.pool import Grown, Pool
from replayssm_jax.decoding.prefixes import Prefixes
from replayssm_jax.decoding.queues import Queues
from replayssm_jax.decoding.requests import Request, RequestError, State
from replayssm_jax.decoding.sampling import SamplingParams
from replayssm_jax.decoding.sequences import Status
from replayssm_jax.decoding.text import Tokenizer
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.state import ReplayPolicy
from replayssm_jax.trees import check_positive_int

_ENDS: dict[Status, tuple] = {
    Status.STOPPED: (State.FINISHED, "stop"),
    Status.FULL: (State.FINISHED, "length"),
    Status.FAILED: (State.FAILED, "error", "the model's logits are not finite"),
}


class Engine:
    """Decodes requests over a pool of slots.

    Args:
        model: a decoder. Its weights are read when the engine is made.
        config: how it works.
        drafter: proposes drafts; None decodes token by token.
        tokenizer: turns text prompts into tokens and tokens into text; needed for either, and for stop strings.
        policy: of the recurrent layers, None for ``default_policy``.
        options: fields of ``config``, instead of it.

    Raises:
        TypeError, ValueError: an option is unknown or out of range, the drafter does not fit the model, or the policy's
            max_draft is less than a round's tokens, or a mesh's data axis does not divide num_slots and prefill_rows.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        *,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
        policy: ReplayPolicy | None = None,
        **options: Any,
    ):
        if config is not None and options:
            raise ValueError(f"give config or its fields, not both: got config and {', '.join(options)}")
        self.config = EngineConfig(**options) if config is None else config
        self.drafter = Drafter() if drafter is None else drafter
        self.tokenizer, self.vocab_size, self.model_name = tokenizer, model.config.vocab_size, repr(model.config)
        self.drafter.check(model)
        self.policy = default_policy(model, self.drafter.num_drafts) if policy is None else policy
        if self.policy.max_draft <= self.drafter.num_drafts:
            raise ValueError(
                f"policy.max_draft={self.policy.max_draft} must be at least a round's tokens: "
                f"the drafter's num_drafts={self.drafter.num_drafts} and one"
            )
        self.pool = Pool(model, self.drafter, self.config, self.policy)
        self.queues = Queues()
        self.slots: list[Request | None] = [None] * self.config.num_slots
        self.prefixes = Prefixes(self.config.max_prefixes)
        self.next_number = 0

    # requests

    def submit(self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0) -> Request:
        """Queues a request.

        Args:
            prompt: text, or at least one token.
            params: what it asks for; None for the defaults.
            priority: higher ones go first; a waiting one takes the slot of a running one that is lower.

        Raises:
            TooLongError: prompt and answer are longer than ``max_length``, and the engine does not truncate.
            TypeError, ValueError: the prompt is empty or holds what is no token, text or stop strings come without a
                tokenizer, there are more than ``max_stop_tokens``, or params or priority are of another type.
        """
        check_int("priority", priority)
        params = SamplingParams() if params is None else params
        tokens, params = fit(self._encode(prompt), params, self.config, has_tokenizer=self.tokenizer is not None)
        return self.queues.wait(Request(self, self._number(), tokens, params, priority))

    def submit_samples(
        self, prompt: str | Sequence[int], params: SamplingParams | None, count: int, *, priority: int = 0
    ) -> list[Request]:
        """Several answers to one prompt, which is read once. The i-th has ``params.seed + i``. Arguments as ``submit``."""
        check_positive_int("count", count)
        first = self.submit(prompt, params, priority=priority)
        return [first, *(self.fork(first, seed=(first.params.seed + i) % 2**32) for i in range(1, count))]

    def fork(self, request: Request, *, seed: int | None = None) -> Request:
        """A second request that goes on from where one is: its text, and what the model knows of it, is copied.

        Args:
            request: waiting, running or paused. Where its prompt is yet to be read, the fork waits for that, or reads it itself
                if the request is paused.
            seed: of the fork's draws; None for the same, which gives the same answer.

        Raises:
            ValueError: the request is done.
        """
        self._check_own(request)
        if request.done:
            raise ValueError(f"request {request.number} is {request.state.value}: there is nothing to fork")
        params = request.params if seed is None else dataclasses.replace(request.params, seed=seed)
        fork = Request(self, self._number(), request.prompt, params, request.priority)
        fork.restore_answer(request.tokens, request.logprobs)
        slot = self.slot_of(request)
        unread = request.memory is None if slot is None else bool(self.pool.unread[slot])
        if unread and request.state is not State.PAUSED:  # whose prompt may never be read
            self.queues.follow(request, fork)
            return fork
        fork.memory = request.memory if slot is None else self.pool.take(slot)
        return self.queues.wait(fork)

    def cancel(self, request: Request) -> None:
        """Ends a request where it is; a request that is done stays as it is."""
        self._check_own(request)
        if not request.done:
            self._end(request, State.CANCELLED, "cancelled")

    def pause(self, request: Request) -> None:
        """Takes a waiting or running request out of its slot, into host memory, until ``resume``."""
        self._check_own(request)
        if request.state not in (State.WAITING, State.RUNNING):
            raise ValueError(f"request {request.number} is {request.state.value}: there is nothing to pause")
        self._evict(request)
        self.queues.remove(request)
        self.queues.release(request)  # or its forks would wait for as long as it is paused
        self.queues.pause(request)

    def resume(self, request: Request) -> None:
        """Queues a paused request again, at its old place."""
        self._check_own(request)
        if request.state is not State.PAUSED:
            raise ValueError(f"request {request.number} is {request.state.value}, not paused")
        self.queues.remove(request)
        self.queues.wait(request)

    def add_prefix(self, prefix: str | Sequence[int]) -> None:
        """Reads a beginning that many prompts share, and keeps its state: a prompt that begins with it starts from there.

        Runs the engine until it has been read; other requests go on meanwhile.

        Raises:
            TooLongError: it leaves no room in a slot.
            RequestError: it could not be read.
            TypeError, ValueError: as ``submit``.
        """
        tokens = self._encode(prefix)
        if len(tokens) >= self.config.max_length:
            raise TooLongError(f"a prefix of {len(tokens)} tokens leaves no room in max_length={self.config.max_length}")
        # its last token stays unread, as every prompt's does: drafting heads read a token with the one behind it
        reader = Request(self, self._number(), tokens, SamplingParams(max_tokens=1), 2**31)
        reader.prefix_only = True
        self.queues.wait(reader)
        while not reader.done:
            self.step()
        if reader.error is not None:
            raise RequestError(f"the prefix: {reader.error}")

    @property
    def requests(self) -> list[Request]:
        """All that are not done, in order of arrival."""
        known = [*(request for request in self.slots if request is not None), *self.queues]
        for request in known:  # grows meanwhile
            known.extend(request.followers)
        return sorted(known, key=lambda request: request.number)

    # running

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.queues) or any(request is not None for request in self.slots)

    def run(self) -> None:
        """Steps until nothing waits or runs."""
        while self.busy:
            self.step()

    def step(self, max_rounds: int | None = None) -> list[Request]:
        """Admits, reads a piece of prompts, decodes up to ``max_rounds`` rounds (None: as configured), hands out tokens.

        Returns:
            The requests that have news or are done now.

        Raises:
            TypeError, ValueError: ``max_rounds`` is no int of at least 0.
        """
        if max_rounds is not None:
            check_int("max_rounds", max_rounds, 0)
        failed = self._admit()
        self._read_prompts()
        running = [slot for slot, request in enumerate(self.slots) if request is not None and not self.pool.unread[slot]]
        if not running:
            return failed
        rounds = self.config.rounds_per_step if max_rounds is None else max_rounds
        if self.pool.unread.any():  # nobody's prompt waits for the others' answers
            rounds = min(rounds, self.config.rounds_per_step)
        # whoever waits for a slot is let in as soon as one is free
        least = len(running) if self.queues else 1
        self.pool.decode(rounds, least)
        news = self._hand_out(running)
        if rounds > 0 and not news:  # or run() would wait for ever
            raise RuntimeError(
                f"the slots {running} should have been decoded and were not: host and device disagree about them"
            )
        return [*failed, *news]

    def _admit(self) -> list[Request]:
        """Gives slots to whoever waits, and returns the requests that failed on their way there."""
        failed = []
        while self.queues:
            request = self.queues.first()
            if None not in self.slots:
                lowest = max((r for r in self.slots if r is not None), key=lambda r: (-r.priority, r.number))
                if lowest.priority >= request.priority:
                    break
                self._evict(lowest)
                self.queues.wait(lowest)
            try:
                self._place(request, self.slots.index(None))
            except Exception as error:  # one request's trouble is that request's alone
                self._end(request, State.FAILED, "error", f"it could not be placed, {type(error).__name__}: {error}")
                failed.append(request)
        return [request for request in failed if not request.prefix_only]

    def _place(self, request: Request, slot: int) -> None:
        text, memory = (*request.prompt, *request.tokens), request.memory
        memory = self.prefixes.find(text) if memory is None else memory
        self.pool.place(slot, text, request.limit, request.params, memory)
        self.queues.remove(request)
        request.state, request.memory, self.slots[slot] = State.RUNNING, None, request
        if not self.pool.unread[slot]:
            self._prompt_read(slot)

    def _read_prompts(self) -> None:
        unread = np.flatnonzero(self.pool.unread).tolist()
        first = sorted(unread, key=lambda slot: (-self._in(slot).priority, self._in(slot).number))
        if first:
            for slot in self.pool.read(first):
                self._prompt_read(slot)

    def _prompt_read(self, slot: int) -> None:
        """What waits for a prompt to have been read: its forks, or a prefix to be stored."""
        request = self._in(slot)
        if request.prefix_only:
            self.prefixes.store(request.prompt, self.pool.take(slot))
            self._end(request, State.FINISHED, "length")
        elif request.followers:
            self.queues.release(request, self.pool.take(slot))

    def _hand_out(self, running: list[int]) -> list[Request]:
        """Fetches what the device has generated and gives it to the requests."""
        news = []
        for slot, grown in self.pool.fetch({slot: self._in(slot).length for slot in running}).items():
            request = self._in(slot)
            if grown.tokens or grown.status is not Status.RUNNING:
                news.append(request)
                self._give(request, grown)
        return news

    def _give(self, request: Request, grown: Grown) -> None:
        ended = grown.status
        try:
            stopped = request.extend(grown.tokens, grown.logprobs, stop_token=ended is Status.STOPPED)
        except Exception as error:  # a tokenizer's trouble with one request is that request's alone
            self._end(request, State.FAILED, "error", f"its tokenizer raised {type(error).__name__}: {error}")
            return
        if stopped:
            self._end(request, State.FINISHED, "stop")
        elif ended is not Status.RUNNING:
            self._end(request, *_ENDS[ended], running=False)

    def _end(self, request: Request, state: State, reason: str, error: str | None = None, *, running: bool = True) -> None:
        slot = self.slot_of(request)
        if slot is not None:
            self._free(slot, running=running)
        self.queues.remove(request)
        self.queues.release(request)
        request.finish(state, reason, error)

    def _evict(self, request: Request) -> None:
        """Moves a running request's slot to host memory and frees it."""
        slot = self.slot_of(request)
        if slot is not None:
            request.memory = jax.device_get(self.pool.take(slot))
            self._free(slot)

    def _free(self, slot: int, *, running: bool = True) -> None:
        self.pool.free(slot, running=running)
        self.slots[slot] = None

    def adopt(self, request: Request, slot: int | None) -> None:
        """Takes a request of a saved engine, which follows no other, to where it was."""
        if slot is not None:
            self.slots[slot] = request
        elif request.state is State.PAUSED:
            self.queues.pause(request)
        else:
            self.queues.wait(request)

    # small things

    def _number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def slot_of(self, request: Request) -> int | None:
        return next((slot for slot, other in enumerate(self.slots) if other is request), None)

    def _in(self, slot: int) -> Request:
        request = self.slots[slot]
        assert request is not None
        return request

    def _check_own(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        if not request.belongs_to(self):
            raise ValueError(f"request {request.number} belongs to another engine")

    def _encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return encode(prompt, self.tokenizer, self.vocab_size)
