"""Random programs against the oracle: any order of calls, any slots, padding, NaN in everything that must not matter.

Shapes are fixed, so each recurrence compiles each function once; raggedness comes from lengths and padded slots.
"""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import FAMILIES, IMPLEMENTATIONS, case_named, make_tokens
from tests.lockstep import Lockstep

ROWS, SLOTS, PROMPT = 3, 4, 9
PADDING = (-1, SLOTS, SLOTS + 7, np.iinfo(np.int32).min)
POLICIES = {"gdn": (5, 2), "kda": (8, 3), "mamba2": (7, 3), "gla": (2, 1)}
POOLS = [
    case_named(f.id, window=POLICIES[f.id][0], max_draft=POLICIES[f.id][1], factors=f.id in ("gdn", "mamba2")) for f in FAMILIES
]


def _first_real_wins(slots):
    """A slot named twice is undefined, so a repeated one becomes padding. Padding may repeat."""
    return [s if not 0 <= s < SLOTS or s not in slots[:i] else PADDING[i] for i, s in enumerate(slots)]


def _calls(max_draft: int):
    any_slot = st.integers(0, SLOTS - 1) | st.sampled_from(PADDING)
    slots = st.lists(any_slot, min_size=ROWS, max_size=ROWS).map(_first_real_wins)
    seed = st.integers(0, 2**32 - 1)

    def per_row(most):
        return st.lists(st.integers(0, most), min_size=ROWS, max_size=ROWS)

    return st.one_of(
        st.tuples(st.just("verify"), slots, per_row(max_draft), seed),
        st.tuples(st.just("commit"), slots, per_row(max_draft)),
        st.tuples(st.just("step"), slots, per_row(1), seed),
        st.tuples(st.just("flush"), slots, st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)),
        st.tuples(st.just("flush_all")),
        st.tuples(st.just("prefill"), slots, per_row(PROMPT), seed),
        st.tuples(st.just("copy_slots"), st.lists(any_slot, min_size=ROWS, max_size=ROWS), slots),
        st.tuples(st.just("reset"), slots),
    )


def _run(pair: Lockstep, call) -> None:
    name, *arguments = call
    match name:
        case "verify" | "step" | "prefill":
            slots, lengths, seed = arguments
            count = {"verify": pair.case.max_draft, "step": 1, "prefill": PROMPT}[name]
            tokens = make_tokens(pair.case, np.random.default_rng(seed), ROWS, count)
            getattr(pair, name)(tokens, slots, np.array(lengths))
        case "commit":
            slots, wanted = arguments
            drafts = [len(pair.oracle.drafts[slot]) if pair.oracle.real(slot) else 0 for slot in slots]
            pair.commit(np.minimum(wanted, drafts), slots)
        case "flush_all":
            pair.flush()
        case _:
            getattr(pair, name)(*arguments)


# of the reference the pool with a delta rule and a head gate; all four in `make long`
@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        pytest.param(case, name, marks=[pytest.mark.long] * (name == "reference" and case.id != "gdn"))
        for case in POOLS
        for name in IMPLEMENTATIONS
    ],
    ids=lambda value: getattr(value, "id", value),
)
def test_any_program_agrees_with_the_oracle(case, implementation):
    @settings(deadline=None, max_examples=25)
    @given(
        program=st.lists(_calls(case.max_draft), min_size=12, max_size=40),
        unowned=st.sets(st.integers(0, SLOTS - 1), max_size=2),
        origin=st.sampled_from([0, 1, 13, 2**31 - 2000]),
    )
    def run(program, unowned, origin):
        pair = Lockstep(case, implementation, SLOTS, origin)
        for slot in unowned:
            pair.disown(slot)
        for call in program:
            _run(pair, call)
            pair.check()

    run()


@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.id)
def test_a_row_does_not_depend_on_its_company(case, rng):
    """The same tokens give the same bits in any row, any slot, next to anything."""
    alone, crowded = Lockstep(case, num_slots=SLOTS), Lockstep(case, num_slots=SLOTS)
    crowded.disown(1)
    for _ in range(4 * case.window):
        mine, others = make_tokens(case, rng, ROWS, case.max_draft), make_tokens(case, rng, ROWS, case.max_draft)
        length = rng.integers(1, case.max_draft + 1)
        accepted = rng.integers(0, length + 1)
        out = alone.verify(mine, [-1, 0, -1], [0, length, 0])[1]
        alone.commit([0, accepted, 0], [-1, 0, -1])
        mixed = jax.tree.map(lambda a, b: np.stack([b[0], b[1], a[1]]), mine, others)
        beside = crowded.verify(mixed, [2, 0, 3], [1, rng.integers(0, 2), length])[2]
        crowded.commit([1, 0, accepted], [2, 0, 3])
        np.testing.assert_array_equal(out, beside)
    alone.flush()
    crowded.flush([0, 2, 3], [True] * 3)
    np.testing.assert_array_equal(alone.state.checkpoint[0], crowded.state.checkpoint[3])
