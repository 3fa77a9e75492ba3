"""What every mixer owes its caller, whichever family: slots, prompts, drafts and reuse, against a float64 oracle."""

import functools

import numpy as np
import pytest

from replayssm_jax import ReplayPolicy
from tests.mixer_oracle import HIDDEN, MIXERS, Trace, oracle
from tests.mixer_runs import Run, draft_plan, relative

POLICY = ReplayPolicy(window=10, max_draft=4)
NUM_SLOTS, PROMPT, DRAFTS, ROUNDS = 5, 12, 4, 80
TOLERANCE = 1e-5

every_mixer = pytest.mark.parametrize("name", MIXERS)


@functools.cache
def make(name):
    return MIXERS[name]()


@functools.cache
def streams(name: str) -> tuple[np.ndarray, list[Trace]]:
    """Three sequences of 32 tokens [3, 32, hidden], and what they do to a fresh slot."""
    x = np.random.default_rng(7).standard_normal((3, 32, HIDDEN)).astype(np.float32)
    return x, [oracle(make(name), row) for row in x]


def fresh(name: str) -> Run:
    """A pool of empty slots in which all that is dead is NaN: the convolutions too."""
    run = Run.fresh(make(name), NUM_SLOTS, POLICY)
    run.poison_slots(range(NUM_SLOTS))
    run.reset(range(NUM_SLOTS))
    return run


def padded(pieces: list[np.ndarray], count: int) -> np.ndarray:
    """Pieces [T_b, hidden] side by side, NaN behind their ends. [B, count, hidden]"""
    x = np.full((len(pieces), count, HIDDEN), np.nan, np.float32)
    for row, piece in enumerate(pieces):
        x[row, : len(piece)] = piece
    return x


def check_slots(run: Run, slots: list[int], traces: list[Trace], counts: list[int]) -> None:
    """The slots hold what ``counts`` tokens of their sequences leave behind, in the state and in the convolution."""
    states, histories = run.state(slots), run.history(slots)
    for state, history, trace, count in zip(states, histories, traces, counts, strict=True):
        assert relative(state, trace.states[count - 1], 2) <= TOLERANCE
        assert relative(history, trace.history(count), 2) <= TOLERANCE
    np.testing.assert_array_equal(run.pointer.position[np.array(slots)], counts)


def prompt(run: Run, name: str, slots: list[int], lengths: list[int]) -> None:
    """The first tokens of the three streams as ragged prompts."""
    x, traces = streams(name)
    y = run.prompt(padded([row[:n] for row, n in zip(x, lengths, strict=True)], PROMPT), slots, lengths)
    for row, (trace, length) in enumerate(zip(traces, lengths, strict=True)):
        assert relative(y[row, :length], trace.y[:length]) <= TOLERANCE
        assert not y[row, length:].any()
    check_slots(run, slots, traces, lengths)


def go_on(run: Run, name: str, slots: list[int], begin: list[int]) -> None:
    """Twelve more tokens of the three streams, one by one."""
    x, traces = streams(name)
    y = run.steps(np.stack([row[at : at + 12] for row, at in zip(x, begin, strict=True)]), slots)
    for row, (trace, at) in enumerate(zip(traces, begin, strict=True)):
        assert relative(y[row], trace.y[at : at + 12]) <= TOLERANCE
    check_slots(run, slots, traces, [at + 12 for at in begin])


@every_mixer
@pytest.mark.parametrize("lengths", [[1, 2, 3], [4, 5, 12]])
def test_prompts_of_any_length_then_steps(name, lengths):
    """Prompts shorter than the convolution, as long as a verify, one longer, and ragged; a one-token prompt on a slot
    that held NaN starts from zeros.

    Row 18, https://github.com/vllm-project/vllm/pull/32118
    Row 21, https://github.com/vllm-project/vllm/pull/47123
    """
    run = fresh(name)
    prompt(run, name, [4, 0, 2], lengths)
    go_on(run, name, [4, 0, 2], lengths)


@every_mixer
def test_steps_from_an_empty_slot(name):
    """No prompt at all: the first token is a decode step."""
    go_on(fresh(name), name, [4, 0, 2], [0, 0, 0])


@every_mixer
def test_reused_slot_forgets_its_last_request(name):
    """A slot with committed records and drafts, then filled with NaN everywhere, is as good as new after a reset.

    Row 19, https://github.com/vllm-project/vllm/pull/51483
    """
    run = fresh(name)
    prompt(run, name, [0, 1, 2], [12, 5, 3])
    go_on(run, name, [0, 1, 2], [12, 5, 3])
    run.poison_slots([1])
    run.reset([1, NUM_SLOTS, -1])  # padding resets nothing
    prompt(run, name, [3, 1, 4], [2, 6, 1])
    check_slots(run, [0, 2], [streams(name)[1][row] for row in (0, 2)], [24, 15])


@every_mixer
def test_fresh_and_continued_rows_in_one_batch(name):
    """Each row goes on from its own slot, be it empty, after a prompt or in the middle of a ring.

    Row 20, https://github.com/vllm-project/tpu-inference/pull/2431
    """
    run, (x, traces) = fresh(name), streams(name)
    prompt(run, name, [3, 1, 0], [12, 7, 4])
    go_on(run, name, [3, 1, 0], [12, 7, 4])
    run.poison_slots([1])
    run.reset([1])
    begin, lengths = [24, 0, 16], [8, 5, 1]
    pieces = [row[at : at + n] for row, at, n in zip(x, begin, lengths, strict=True)]
    y = run.prompt(padded(pieces, PROMPT), [3, 1, 0], lengths)
    for row, (trace, at, length) in enumerate(zip(traces, begin, lengths, strict=True)):
        assert relative(y[row, :length], trace.y[at : at + length]) <= TOLERANCE
    check_slots(run, [3, 1, 0], traces, [32, 5, 17])


@every_mixer
@pytest.mark.parametrize("prefill", [True, False], ids=["prompt", "drafts"])
def test_row_without_tokens_leaves_its_slot_bit_equal(name, prefill):
    """Even where its ring is due for a flush."""
    run = fresh(name)
    prompt(run, name, [0, 1, 2], [12, 5, 3])
    go_on(run, name, [0, 1, 2], [12, 5, 3])
    while not run.pointer.due[1]:
        run.verify(padded([np.zeros((0, HIDDEN)), np.zeros((1, HIDDEN)), np.zeros((0, HIDDEN))], DRAFTS), None, [0, 1, 0])
        run.commit([0, 1, 0])
    before = run.slot(1)
    x = np.full((3, PROMPT if prefill else DRAFTS, HIDDEN), np.nan, np.float32)
    x[0] = 1
    y = (run.prompt if prefill else run.verify)(x, [0, 1, 2], [x.shape[1], 0, 0])
    assert not y[1:].any()
    for old, new in zip(before, run.slot(1), strict=True):
        np.testing.assert_array_equal(old, new)


@every_mixer
@pytest.mark.parametrize("prefill", [True, False], ids=["prompt", "drafts"])
@pytest.mark.parametrize("padding", [-1, NUM_SLOTS, 2**31 - 1])
def test_padding_rows_write_nothing_and_answer_zero(name, prefill, padding):
    run = fresh(name)
    prompt(run, name, [0, 1, NUM_SLOTS - 1], [12, 5, 3])
    before = [run.slot(slot) for slot in range(NUM_SLOTS)]
    x = np.full((3, PROMPT if prefill else DRAFTS, HIDDEN), np.nan, np.float32)
    x[1] = streams(name)[0][1, 5 : 5 + x.shape[1]]
    slots = [padding, 1, padding]
    y = (run.prompt if prefill else run.verify)(x, slots, None)
    assert relative(y[1], streams(name)[1][1].y[5 : 5 + x.shape[1]]) <= TOLERANCE
    assert not y[[0, 2]].any()
    if not prefill:
        run.commit([4, 4, 4], slots)
    check_slots(run, [1], streams(name)[1][1:2], [5 + x.shape[1]])
    for slot in set(range(NUM_SLOTS)) - {1}:
        for old, new in zip(before[slot], run.slot(slot), strict=True):
            np.testing.assert_array_equal(old, new)


@every_mixer
def test_rows_of_one_token_among_rows_of_four(name):
    """A row padded to T with one real token stands after one token.

    Row 29, https://github.com/vllm-project/vllm/pull/55178
    """
    run, (x, traces) = fresh(name), streams(name)
    slots, at = [2, 4, 0], [0, 0, 0]
    for lengths in ([1, 4, 2], [4, 1, 1], [1, 1, 4], [4, 4, 1], [1, 3, 1]):
        y = run.verify(padded([row[p : p + n] for row, p, n in zip(x, at, lengths, strict=True)], DRAFTS), slots, lengths)
        for row, (trace, begin, length) in enumerate(zip(traces, at, lengths, strict=True)):
            assert relative(y[row, :length], trace.y[begin : begin + length]) <= TOLERANCE
            assert not y[row, length:].any()
        run.commit(lengths, slots)
        at = [begin + length for begin, length in zip(at, lengths, strict=True)]
        check_slots(run, slots, traces, at)
        run.poison(slots)


@every_mixer
@pytest.mark.parametrize("bonus", [0, 1])
def test_ten_full_rejections(name, bonus, rng):
    """Ten rounds of wrong drafts of which nothing, or the bonus token alone, is kept.

    Row 37, https://github.com/kekzl/imp/pull/1503
    """
    run, (x, traces) = fresh(name), streams(name)
    prompt(run, name, [3, 1, 2], [3, 1, 8])
    at = np.array([3, 1, 8])
    for _ in range(10):
        drafts = 3 * rng.standard_normal((3, DRAFTS, HIDDEN)).astype(np.float32)
        drafts[range(3), 0] = x[range(3), at]
        run.poison([3, 1, 2])
        y = run.verify(drafts, [3, 1, 2])
        assert relative(y[:, 0], np.stack([trace.y[p] for trace, p in zip(traces, at, strict=True)])) <= TOLERANCE
        run.commit([bonus] * 3, [3, 1, 2])
        at += bonus
        check_slots(run, [3, 1, 2], traces, list(at))


@every_mixer
def test_random_drafts_from_an_empty_slot(name, rng):
    """The first tokens of a sequence come as drafts, some rejected: positions before the first stay zeros."""
    run, (x, traces) = fresh(name), streams(name)
    plan = draft_plan(rng, (0, 0, 0), DRAFTS, (32,), ROUNDS)
    y, states, _ = run.rounds(plan.drafts(rng, x), plan.counts, plan.accepted, [1, 4, 3])
    for r, row, begin, count, right in plan:
        assert relative(y[r, row, :right], traces[row].y[begin : begin + right]) <= TOLERANCE
        assert not y[r, row, count:].any()
        if begin + right:
            assert relative(states[r, row], traces[row].states[begin + right - 1], 2) <= TOLERANCE
        else:
            assert not states[r, row].any()
    check_slots(run, [1, 4, 3], traces, [32, 32, 32])


@every_mixer
def test_fork_continues_both_ways(name):
    """A copied slot takes its convolution, ring and pointer along, and the two then go separate ways."""
    run, (x, _) = fresh(name), streams(name)
    prompt(run, name, [0, 1, 2], [12, 5, 3])
    go_on(run, name, [0, 1, 2], [12, 5, 3])
    run.copy([1, 0, 2], [4, NUM_SLOTS, -1])  # two pairs are padding
    for new, old in zip(run.slot(4), run.slot(1), strict=True):
        np.testing.assert_array_equal(new, old)
    ways = np.stack([x[1, 17:21], x[0, 17:21]])
    y = run.verify(np.concatenate([ways, ways[:1]]), [1, 4, NUM_SLOTS])
    run.commit([4, 4, 4], [1, 4, NUM_SLOTS])
    forked = [oracle(make(name), np.concatenate([x[1, :17], way])) for way in ways]
    for row in range(2):
        assert relative(y[row], forked[row].y[17:]) <= TOLERANCE
    check_slots(run, [1, 4], forked, [21, 21])


@every_mixer
def test_slot_and_row_number_do_not_matter(name):
    x, _ = streams(name)
    results = []
    for slots, row in (([0, 1, 2], 0), ([3, 0, 4], 1), ([1, 2, 0], 2)):
        run = fresh(name)
        batch = np.roll(x, row, axis=0)
        y = run.prompt(batch[:, :PROMPT], slots)[row], run.verify(batch[:, 12:16], slots)[row]
        run.commit([3] * 3, slots)
        results.append((*y, run.state([slots[row]])))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first, second)


@every_mixer
def test_reference_implementation_agrees(name):
    run, (x, traces) = fresh(name), streams(name)
    y = run.prompt(padded([x[0, :12], x[1, :2], x[2, :7]], PROMPT), [4, 0, 1], [12, 2, 7], implementation="reference")
    assert relative(y[1, :2], traces[1].y[:2]) <= TOLERANCE
    y = run.verify(np.stack([x[0, 12:16], x[1, 2:6], x[2, 7:11]]), [4, 0, 1], implementation="reference")
    run.commit([4, 2, 0], [4, 0, 1])
    assert relative(y[0], traces[0].y[12:16]) <= TOLERANCE
    check_slots(run, [4, 0, 1], traces, [16, 4, 7])
