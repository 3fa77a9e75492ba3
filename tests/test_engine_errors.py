"""What goes wrong in an engine is named, is its own request's alone, and leaves nobody waiting for ever."""

import json

import pytest

from replayssm_jax import ReplayPolicy
from replayssm_jax.decoding import RequestError, SamplingParams, State, restore, save
from replayssm_jax.decoding.text import ByteTokenizer
from tests.decoding_runs import SIZES, check, engine, model, poisoned, prompts, solo

TEN = SamplingParams(max_tokens=10)


def test_one_slots_nan_ends_its_request_alone(rng):
    runs = engine()
    requests = [runs.submit(text, SamplingParams(max_tokens=20)) for text in prompts(rng, 5, 15)]
    runs.step()
    slot = runs.slot_of(requests[1])
    poisoned(runs, slot)
    runs.run()
    check([requests[0], *requests[2:]])
    assert requests[1].state is State.FAILED
    with pytest.raises(RequestError, match="not finite"):
        requests[1].result()
    again = runs.submit(requests[1].prompt, TEN)
    runs.run()
    check([again])


def test_a_tokenizers_trouble_is_its_requests_alone():
    class Picky(ByteTokenizer):
        def stream(self):
            inner = super().stream()
            inner_push = inner.push

            def push(token):
                if token == troublesome:
                    raise KeyError("no such token")
                return inner_push(token)

            inner.push = push
            return inner

    troublesome = solo((1, 2, 3), 10)[4]
    runs = engine(tokenizer=Picky(128))
    bad, good = runs.submit((1, 2, 3), TEN), runs.submit((9, 9), TEN)
    runs.run()
    assert bad.state is State.FAILED
    assert "KeyError" in bad.error
    if troublesome not in solo((9, 9), 10):
        check([good])


def test_a_tokenizer_that_fails_at_the_end_fails_its_request_alone():
    class Last(ByteTokenizer):
        made = 0

        def stream(self):
            inner = super().stream()
            if self.made == 0:
                inner.close = lambda: {}["nothing"]
            self.made += 1
            return inner

    runs = engine(tokenizer=Last(128))
    bad, good = runs.submit((1, 2, 3), TEN), runs.submit((9, 9), TEN)
    fork = runs.fork(bad)
    runs.run()
    check([good, fork])
    assert (bad.state, bad.finish_reason, tuple(bad.tokens)) == (State.FAILED, "error", solo((1, 2, 3), 10))
    assert "KeyError" in bad.error
    cancelled = engine(tokenizer=Last(128)).submit((1, 2, 3), TEN)
    fork = cancelled._engine.fork(cancelled)
    cancelled.cancel()
    fork.result()
    check([fork])


def test_a_request_that_cannot_be_placed_fails_alone(monkeypatch):
    runs = engine()
    place = runs.pool.place

    def refusing(slot, text, *others):
        if text[0] == 9:
            raise OverflowError("no room for 9")
        place(slot, text, *others)

    monkeypatch.setattr(runs.pool, "place", refusing)
    bad, good = runs.submit((9, 9), TEN), runs.submit((1, 2, 3), TEN)
    fork = runs.fork(bad)
    assert bad in runs.step()
    runs.run()
    check([good])
    for request in (bad, fork):
        assert request.state is State.FAILED
        with pytest.raises(RequestError, match="could not be placed, OverflowError: no room for 9"):
            request.result()
    with pytest.raises(RequestError, match="the prefix: it could not be placed"):
        runs.add_prefix((9, 8))


def test_nobody_waits_for_what_will_never_come():
    runs = engine()
    request = runs.submit((1, 2, 3), TEN)
    runs.queues.remove(request)
    with pytest.raises(RequestError, match="request 0 is waiting, but its engine has nothing to run"):
        request.result()


def test_a_saved_engine_wants_what_it_was_made_for(tmp_path):
    runs = engine()
    save(runs, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"made for drafter='PromptLookup, 3 drafts', got 'Drafter"):
        restore(tmp_path / "saved", model("qwen3_5"))
    with pytest.raises(ValueError, match="made for model="):
        restore(tmp_path / "saved", model("qwen3_next"), drafter=runs.drafter)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        restore(tmp_path / "nowhere", model("qwen3_5"))
    saved = engine(tokenizer=ByteTokenizer(128))
    saved.submit((1,), SamplingParams(max_tokens=9, stop=("x",)))
    save(saved, tmp_path / "text")
    with pytest.raises(ValueError, match=r"made for tokenizer='ByteTokenizer', got None"):
        restore(tmp_path / "text", model("qwen3_5"), drafter=runs.drafter)


def test_a_damaged_folder_is_named(tmp_path):
    runs, folder = engine(), tmp_path / "saved"
    save(runs, folder)
    arrays, rest = (folder / "arrays.safetensors").read_bytes(), json.loads((folder / "engine.json").read_text())
    (folder / "arrays.safetensors").write_bytes(arrays[:-1])
    with pytest.raises(ValueError, match=r"arrays\.safetensors is damaged"):
        restore(folder, model("qwen3_5"), drafter=runs.drafter)
    for content, message in (
        (json.dumps(rest)[:-9], "engine.json is damaged"),
        (json.dumps({"format": rest["format"]}), "engine.json is damaged: it lacks config"),
        (json.dumps({**rest, "requests": [{"number": 0}]}), "engine.json is damaged: a request lacks followers, handed_out"),
        (json.dumps({**rest, "format": 1}), "engine.json has format 1"),
        ("[]", "engine.json has format None"),
    ):
        (folder / "engine.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            restore(folder, model("qwen3_5"), drafter=runs.drafter)


def test_an_engine_of_the_format_before_keeps_its_records(tmp_path):
    """What it did not name were updates; today's default may be another."""
    runs, folder = engine(), tmp_path / "saved"
    runs.submit((1, 2, 3), TEN)
    runs.step()
    save(runs, folder)
    rest = json.loads((folder / "engine.json").read_text())
    assert rest["format"] == 3
    assert rest["made_for"]["policy"]["records"] is None
    (folder / "engine.json").write_text(json.dumps({**rest, "format": 2}))
    back = restore(folder, model("qwen3_5"), drafter=runs.drafter)
    assert back.policy.records == "update"
    want, got = (list(each.requests[0]) for each in (runs, back))
    assert got[-1].tokens == want[-1].tokens


def test_host_and_device_that_disagree_are_an_error_and_no_endless_loop():
    runs = engine()
    runs.submit((1, 2, 3), TEN)
    runs._admit()
    runs.pool.unread[:] = 0  # the host believes that the prompt has been read
    with pytest.raises(RuntimeError, match=r"slots \[0\] should have been decoded"):
        runs.run()


def test_mistakes_are_named(rng):
    runs = engine()
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer"):
        runs.submit((1,), SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match="more than max_stop_tokens=2"):
        runs.submit((1,), SamplingParams(stop_tokens=(1, 2, 3)))
    with pytest.raises(ValueError, match="another engine"):
        runs.cancel(engine().submit((1,), TEN))
    with pytest.raises(ValueError, match=r"max_draft=3 .*num_drafts=3"):
        engine(policy=ReplayPolicy(max_draft=3))
    with pytest.raises(ValueError, match="num_slots must be at least 1"):
        engine(num_slots=0)
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        engine(max_length=1)
    with pytest.raises(TypeError, match="truncate must be a bool"):
        engine(truncate="no")
    with pytest.raises(ValueError, match=r"implementation must be None or one of .*'foo'"):
        engine(implementation="foo")
    assert not runs.busy
    assert SIZES["num_slots"] == len(runs.slots)


def test_arguments_of_the_wrong_type_are_named():
    runs = engine()
    for priority in ("high", float("nan"), True):
        with pytest.raises(TypeError, match="priority must be an int"):
            runs.submit((1,), TEN, priority=priority)
    for prompt in (None, 5):
        with pytest.raises(TypeError, match=f"prompt must be text or a sequence of tokens, got {prompt}"):
            runs.submit(prompt)
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        runs.submit((1,), {"max_tokens": 2})
    with pytest.raises(TypeError, match="max_rounds must be an int"):
        runs.step("a")
    with pytest.raises(ValueError, match="max_rounds must be at least 0"):
        runs.step(-1)
    assert not runs.busy
    samples = engine(truncate=True).submit_samples((1,), None, 2)
    assert [sample.params.seed for sample in samples] == [0, 1]
    last = runs.submit((1, 2, 3), TEN)
    runs.step(2**40)
    check([last])
