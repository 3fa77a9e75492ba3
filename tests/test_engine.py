"""The engine: whatever comes, goes, waits, forks or fails beside it, a request's greedy tokens are those of a solo run."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from replayssm_jax.decoding import Engine, RequestError, SamplingParams, State, TooLongError, pool, restore, save
from replayssm_jax.decoding.queues import Queues
from tests.decoding_runs import check, engine, model, poisoned, prompts, solo

TEN = SamplingParams(max_tokens=10)


def test_more_requests_than_slots_and_slots_full_of_nan(rng):
    """Case B 18, 19, 24, 25: nothing of whoever had a slot before is left, prompts of one token included."""
    runs = engine()
    poisoned(runs)
    requests = [runs.submit(text, TEN) for text in [(5,), *prompts(rng, 9)]]
    runs.run()
    check(requests)
    assert not runs.busy


def test_the_compiled_steps_are_one_per_shape(rng):
    runs = engine()
    runs.submit((1, 2, 3), TEN).result()
    before = pool._decode._cache_size(), pool._prefill._cache_size(), pool._fetch._cache_size()
    requests = [runs.submit(text, SamplingParams(max_tokens=int(rng.integers(1, 30)))) for text in prompts(rng, 8, 90)]
    runs.submit_samples((4, 5, 6), SamplingParams(max_tokens=4, temperature=1.0), 3)
    runs.run()
    assert before == (pool._decode._cache_size(), pool._prefill._cache_size(), pool._fetch._cache_size())
    check(requests)


def test_priority_takes_a_slot_and_gives_it_back(rng):
    """Preempted in the middle of a window or of its prompt, a request goes on as if nothing had been."""
    runs = engine()
    low = [runs.submit(text, SamplingParams(max_tokens=20)) for text in prompts(rng, 3, 60)]
    runs.step()
    runs.step()
    high = [runs.submit(text, TEN, priority=1) for text in prompts(rng, 2)]
    runs.step()
    assert [request.state for request in high] == [State.RUNNING] * 2
    assert sorted(request.state.value for request in low) == ["running", "waiting", "waiting"]
    runs.run()
    check([*low, *high])


def test_pausing_holds_a_request_until_it_is_resumed(rng):
    runs = engine()
    first, second = (runs.submit(text, SamplingParams(max_tokens=20)) for text in prompts(rng, 2, 10))
    runs.step()
    runs.pause(first)
    runs.run()
    assert first.state is State.PAUSED
    with pytest.raises(RequestError, match="paused"):
        first.result()
    with pytest.raises(ValueError, match="paused"):
        runs.pause(first)
    runs.resume(first)
    first.result()
    check([first, second])


def test_cancelling_frees_the_slot_and_keeps_the_answer(rng):
    runs = engine()
    requests = [runs.submit(text, SamplingParams(max_tokens=30)) for text in prompts(rng, 5, 10)]
    runs.step()
    requests[0].cancel()  # running
    requests[4].cancel()  # waiting
    runs.run()
    check(requests[1:4])
    answer = requests[0].completion()
    assert answer.finish_reason == "cancelled"
    assert answer.tokens == solo(requests[0].prompt, 30)[: len(answer.tokens)]
    requests[1].cancel()
    assert requests[1].state is State.FINISHED


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_fork_goes_on_from_where_its_parent_is(steps, rng):
    """Before, while and after its prompt is read; more forks than slots."""
    runs = engine()
    (text,) = prompts(rng, 1, 1)
    parent = runs.submit(text * 40, SamplingParams(max_tokens=25))
    for _ in range(steps):
        runs.step()
    same = [runs.fork(parent) for _ in range(4)]
    other = runs.fork(same[0], seed=3)
    runs.run()
    check([parent, *same, other])
    with pytest.raises(ValueError, match="nothing to fork"):
        runs.fork(parent)


def test_samples_of_one_prompt_read_it_once(rng):
    runs = engine()
    (text,) = prompts(rng, 1, 60)
    asked = SamplingParams(max_tokens=8, temperature=1.0, seed=11)
    samples = runs.submit_samples(text, asked, 5)
    runs.run()
    for i, sample in enumerate(samples):
        alone = engine().submit(text, dataclasses.replace(asked, seed=11 + i)).result()
        assert alone.tokens == tuple(sample.tokens)
    assert len({tuple(sample.tokens) for sample in samples}) > 1


def test_a_parents_end_does_not_take_waiting_forks_along(rng):
    runs = engine()
    text = prompts(rng, 1, 30)[0]
    parent = runs.submit(text, TEN)
    forks = [runs.fork(parent) for _ in range(3)]
    forks[0].cancel()
    runs.pause(forks[1])
    parent.cancel()
    runs.run()
    runs.resume(forks[1])
    runs.run()
    check(forks[1:])
    assert forks[0].state is State.CANCELLED


def test_a_paused_parent_does_not_keep_its_forks_waiting(rng):
    """Nor whoever waits for their result."""
    runs = engine()
    parent = runs.submit(prompts(rng, 1, 60)[0], TEN)
    fork = runs.fork(parent)
    runs.pause(parent)
    fork.result()
    check([fork])
    assert parent.state is State.PAUSED


def test_a_fork_of_a_paused_request_does_not_wait_for_it():
    runs = engine()
    parent = runs.submit((1, 2, 3), TEN)
    runs.pause(parent)
    fork = runs.fork(parent)
    fork.result()
    runs.resume(parent)
    runs.run()
    check([parent, fork])


def test_a_prefix_is_read_once_and_starts_many_prompts(rng):
    """Case B 26: ring and pointer come along; the longest fitting prefix is taken, which may be the whole prompt.

    Its last token is left unread: what follows it is not known, and drafting heads read a token with the one behind it.
    """
    runs = engine(max_prefixes=2)
    base = tuple(rng.integers(0, 128, 50).tolist())
    for size in (5, 20, 37):
        runs.add_prefix(base[:size])
    assert [len(prefix) for prefix in runs.prefixes] == [20, 37]
    requests = [runs.submit(text, TEN) for text in (base[:37], (*base[:37], 3), base[:30], base[:6], (1, *base))]
    unread = []
    while runs.queues:
        runs._admit()
        unread += [int(count) for count in runs.pool.unread]
        runs.run()
    check(requests)
    assert unread[:3] == [0, 1, 10]
    with pytest.raises(TooLongError, match="leaves no room"):
        runs.add_prefix((1,) * 128)


def test_a_request_too_long_is_refused_or_cut():
    runs = engine()
    with pytest.raises(TooLongError, match=r"120 tokens and max_tokens=9 .*max_length=128"):
        runs.submit((1,) * 120, SamplingParams(max_tokens=9))
    exact = runs.submit((1,) * 120, SamplingParams(max_tokens=8))
    cutting = engine(truncate=True)
    shorter = cutting.submit((1,) * 120, SamplingParams(max_tokens=50))
    front = cutting.submit(tuple(range(120)) * 2, SamplingParams(max_tokens=50))
    runs.run()
    cutting.run()
    check([exact])
    assert tuple(shorter.tokens) == tuple(exact.tokens)
    assert front.prompt == (tuple(range(120)) * 2)[-127:]
    assert len(front.tokens) == 1


def test_a_saved_engine_goes_on_bit_for_bit(rng, tmp_path):
    """Case C 40: mid-window, with waiting, paused, preempted and forked requests, and prefixes."""
    runs = engine()
    texts = prompts(rng, 6, 60)
    runs.add_prefix(texts[0][:5])
    requests = [runs.submit(text, SamplingParams(max_tokens=25, temperature=0.5 * (i % 2))) for i, text in enumerate(texts)]
    requests.append(runs.fork(requests[5]))
    for _ in range(3):
        runs.step()
    paused = next(request for request in requests if request.state is State.RUNNING)
    runs.pause(paused)
    runs.submit(texts[1], TEN, priority=1)
    runs.step()
    save(runs, tmp_path / "saved")
    with pytest.raises(FileExistsError, match="saved"):
        save(runs, tmp_path / "saved")
    back = restore(tmp_path / "saved", model("qwen3_5"), drafter=runs.drafter)
    assert [str(request) for request in back.requests] == [str(request) for request in runs.requests]
    pairs = list(zip(runs.requests, back.requests, strict=True))
    for one in (runs, back):
        one.resume(next(request for request in one.requests if request.state is State.PAUSED))
        one.run()
    for mine, other in pairs:
        assert mine.completion() == other.completion()
    for mine, other in zip(jax.tree.leaves(runs.pool.sequences), jax.tree.leaves(back.pool.sequences), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_restored_request_goes_on_where_its_reader_was(tmp_path):
    runs = engine()
    request = runs.submit((1, 2, 3), SamplingParams(max_tokens=12))
    runs.step(2)
    seen = list(request.news().tokens)
    save(runs, tmp_path / "saved")
    (back,) = restore(tmp_path / "saved", model("qwen3_5"), drafter=runs.drafter).requests
    for delta in back:
        seen.extend(delta.tokens)
    assert tuple(seen) == solo((1, 2, 3), 12)


def test_restored_slots_lie_where_the_pools_do(tmp_path):
    """Those that nobody has put anywhere aside, which follow the others."""
    runs = engine()
    saved = jax.tree.map(np.asarray, runs.pool.sequences)
    place = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec())
    runs.pool.sequences = dataclasses.replace(runs.pool.sequences, cache=jax.device_put(runs.pool.sequences.cache, place))
    runs.pool.restore(saved)
    assert all(leaf.sharding == place for leaf in jax.tree.leaves(runs.pool.sequences.cache))
    assert not runs.pool.sequences.text.committed


def test_the_queue_is_by_priority_and_then_by_arrival(rng, monkeypatch):
    queues, left = Queues(), {}
    for number in range(300):
        request = types.SimpleNamespace(number=number, priority=int(rng.integers(3)), leader=None)
        left[number] = queues.wait(request)
        if number % 3:  # gone, and some of them back
            queues.remove(left.pop(number))
            if number % 3 == 2:
                left[number] = queues.wait(request)
    order = []
    while queues:
        order.append(queues.first())
        queues.remove(order[-1])
    assert order == sorted(left.values(), key=lambda request: (-request.priority, request.number))
    # and an engine does not look at all of its requests when one of them ends
    monkeypatch.setattr(Engine, "requests", property(lambda engine: pytest.fail("all requests were listed")))
    runs = engine()
    requests = [runs.submit((number, 1), TEN) for number in range(5)]
    requests.pop().cancel()
    runs.run()
    check(requests)
