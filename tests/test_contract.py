"""One contract for every implementation on every row of the case table: outputs, states and what must stay as it was."""

import numpy as np
import pytest

from tests.cases import CASES, IMPLEMENTATIONS, case_named, make_tokens
from tests.lockstep import Lockstep, jitted

PADDING = (-1, 6, 13, np.iinfo(np.int32).min)  # of a pool of 6 slots


# The reference is the law and no faster path to it: a row for each recurrence, and its copies; all rows in `make long`.
BY_THE_LAW = (
    "gdn-ratio4-bf16-checkpoint",
    "kda-ratio2",
    "mamba2-g8",
    "gla-ratio2-bf16-checkpoint",
    "kda-nvfp4-readout-fp16-stochastic",
)
every_row = pytest.mark.parametrize(
    ("case", "implementation"),
    [
        pytest.param(case, name, marks=[pytest.mark.long] * (name == "reference" and case.id not in BY_THE_LAW))
        for case in CASES
        for name in IMPLEMENTATIONS
    ],
    ids=lambda value: getattr(value, "id", value),
    scope="module",  # keeps the tests of one row together, so that what they compile is compiled once
)


@every_row
def test_prompts(case, implementation, rng):
    """Ragged prompts of 1, 63, 64, 65 and 130 tokens into fresh slots, then again from the middle of a window."""
    pair = Lockstep(case, implementation, num_slots=6)
    pair.disown(4)
    pair.prefill(make_tokens(case, rng, 7, 130), [5, 0, 3, 1, 2, -1, 6], [1, 63, 64, 65, 130, 130, 7])
    pair.check()
    _accept_drafts(pair, rng, [3, 0, 5, 1], rounds=2)
    pair.prefill(make_tokens(case, rng, 7, 130), [0, 1, 2, 3, 13, 5, 6], [65, 0, 64, 130, 63, 1, 130])
    pair.check()


@every_row
def test_steps(case, implementation, rng):
    """One token at a time over more than two windows, rows pausing, changing places and padded."""
    pair = Lockstep(case, implementation, num_slots=6)
    pair.disown(5)
    for count in range(4 * case.window + 5):
        slots = rng.permutation([0, 1, 2, 3, rng.choice(PADDING)])[:4]
        lengths = 1 * (rng.random(4) < 0.9)
        if case.max_draft > 1 and implementation != "reference":
            pair.step(make_tokens(case, rng, 4, 1), slots, lengths)
        else:  # the same by definition, and compiled for the drafts anyway
            pair.verify(make_tokens(case, rng, 4, case.max_draft), slots, lengths)
            pair.commit(lengths, slots)
        if count % 5 == 0:
            pair.check()
    pair.flush(range(4), [True] * 4)
    pair.check()


@every_row
def test_drafts(case, implementation, rng):
    """Ragged drafts, any prefix accepted, none and all included, with flushes of some slots in between."""
    pair = Lockstep(case, implementation, num_slots=6)
    pair.disown(0)
    for _ in range(4):
        _accept_drafts(pair, rng, rng.permutation([1, 2, 3, 4, *rng.choice(PADDING, 2)])[:4], rounds=3)
        pair.flush(rng.permutation([1, 2, 3, 4, *PADDING])[:4], rng.random(4) < 0.5)
        pair.check()


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "reference"])
@pytest.mark.parametrize("name", ["gdn", "gla"])
def test_rows_in_their_own_slots(name, implementation, rng):
    """slots=None puts row b in slot b: fewer rows than slots, and as many."""
    case = case_named(name)
    pair = Lockstep(case, implementation, num_slots=3)
    pair.prefill(make_tokens(case, rng, 2, 9), None, [9, 4])
    for _ in range(6):
        pair.verify(make_tokens(case, rng, 2, 4), None, [4, 3])
        pair.commit([4, 1], None)
        pair.step(make_tokens(case, rng, 3, 1), None, [1, 0, 1])
        pair.check()
    pair.flush(None, [True, False, True])
    pair.check()
    present = jitted("materialize")(pair.state, np.array([2, -1, 0, 2, 3]))
    everyone = jitted("materialize")(pair.state)
    np.testing.assert_array_equal(present, np.stack([everyone[2], 0 * everyone[0], everyone[0], everyone[2], 0 * everyone[0]]))


def _accept_drafts(pair: Lockstep, rng, slots, rounds: int) -> None:
    for turn in range(rounds):
        lengths = rng.integers(1, pair.case.max_draft + 1, 4) * (rng.random(4) < 0.8)
        pair.verify(make_tokens(pair.case, rng, 4, pair.case.max_draft), slots, lengths)
        pair.check()
        accepted = (np.zeros_like(lengths), lengths, rng.integers(0, lengths + 1))[turn % 3]
        pair.commit(accepted, slots)
        pair.check()
