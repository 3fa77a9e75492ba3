"""An engine under a stream of random orders: whatever is done to whom, every answer is the one of a solo run."""

import pathlib
import tempfile

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from replayssm_jax.decoding import SamplingParams, State, restore, save
from tests.decoding_runs import engine, model, solo

# Few, so that solo runs are shared: a token, shorter and longer than a piece, repetitive and not, some with one beginning.
PROMPTS = [(3,), (7, 8) * 9, tuple(range(20)), (*range(20), 5, 5, 5), tuple(np.resize([1, 2, 3, 4], 41).tolist()), (90, 1, 55)]
LONGEST = 24

prompts = st.sampled_from(PROMPTS)
sizes = st.integers(1, LONGEST)


class EngineMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.engine = engine()
        self.all = []

    @rule(target=requests, prompt=prompts, count=sizes, priority=st.integers(0, 2))
    def submit(self, prompt, count, priority):
        return self._add(self.engine.submit(prompt, SamplingParams(max_tokens=count), priority=priority))

    @rule(target=requests, prompt=prompts, count=st.integers(2, 4))
    def submit_samples(self, prompt, count):
        return multiple(*map(self._add, self.engine.submit_samples(prompt, SamplingParams(max_tokens=9), count)))

    @rule(target=requests, parent=requests)
    def fork(self, parent):
        parent = self._now(parent)
        return multiple() if parent is None or parent.done else self._add(self.engine.fork(parent))

    @rule(request=consumes(requests))
    def cancel(self, request):
        if (request := self._now(request)) is not None:
            request.cancel()

    @rule(request=requests)
    def pause(self, request):
        request = self._now(request)
        if request is not None and request.state in (State.WAITING, State.RUNNING):
            self.engine.pause(request)

    @rule(request=requests)
    def resume(self, request):
        request = self._now(request)
        if request is not None and request.state is State.PAUSED:
            self.engine.resume(request)

    @rule(size=st.integers(1, 19))
    def add_prefix(self, size):
        self.engine.add_prefix(range(size))

    @rule(times=st.integers(1, 4), rounds=st.integers(1, 5))
    def step(self, times, rounds):
        for _ in range(times):
            self.engine.step(rounds)

    @rule()
    def save_and_restore(self):
        with tempfile.TemporaryDirectory() as folder:
            save(self.engine, pathlib.Path(folder) / "saved")
            self.engine = restore(pathlib.Path(folder) / "saved", model("qwen3_5"), drafter=self.engine.drafter)

    @invariant()
    def answers_are_beginnings_of_solo_answers(self):
        for request in self.engine.requests:
            assert tuple(request.tokens) == solo(request.prompt, LONGEST)[: len(request.tokens)]

    def teardown(self):
        for request in self.engine.requests:
            if request.state is State.PAUSED:
                self.engine.resume(request)
        left = self.engine.requests
        self.engine.run()
        assert all(request.state is State.FINISHED for request in left)
        for request in [*left, *(self._now(r) or r for r in self.all if r.state is State.FINISHED)]:
            assert tuple(request.tokens) == solo(request.prompt, LONGEST)[: request.params.max_tokens]

    def _add(self, request):
        self.all.append(request)
        return request

    def _now(self, request):
        """The same request in the engine of now, None if it is done."""
        return next((other for other in self.engine.requests if other.number == request.number), None)


EngineMachine.TestCase.settings = hypothesis.settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
