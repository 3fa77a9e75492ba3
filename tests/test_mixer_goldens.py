"""Every family's published mixer layers, reproduced through steps, drafts with any acceptance, and prompts."""

import numpy as np
import pytest

from replayssm_jax import ReplayPolicy, flush
from tests.golden_data import FAMILIES, LAYERS, STOPS, MixerGolden, import_state, layers, load, mixer_golden
from tests.mixer_oracle import oracle
from tests.mixer_runs import DraftPlan, Run, draft_plan, quick_jit, relative

SLOTS, NUM_SLOTS = (3, 1), 5
TOLERANCE = 2e-5  # relative L2 of every single token, and of every head's state
POLICY = ReplayPolicy(window=16, max_draft=5)
ROUNDS = 80
ONE_OF_EACH = ("qwen3_5", "glm5_next_kda", "mamba2")


def start(golden: MixerGolden, policy: ReplayPolicy) -> Run:
    """A run after the published prompt, in slots 3 and 1; the other slots and every dead row hold NaN."""
    return Run(golden.mixer, *import_state(golden, policy, SLOTS, NUM_SLOTS))


def check_state(golden: MixerGolden, step: int, row: int, state: np.ndarray, history: np.ndarray) -> None:
    assert relative(state, golden.recurrent[step][row], 2) <= TOLERANCE
    assert relative(history, golden.conv[step][row, 1:], 2) <= TOLERANCE


def check_unowned(run: Run) -> None:
    for slot in set(range(NUM_SLOTS)) - set(SLOTS):
        *cache, length, origin, request = run.slot(slot)
        assert all(np.isnan(pool).all() for pool in cache), f"slot {slot} was written"
        assert length == origin == request == 0


def check_rounds(golden: MixerGolden, run: Run, plan: DraftPlan, rng: np.random.Generator) -> None:
    """Runs a plan on the golden's inputs; accepted tokens must match, rejected ones be finite, absent ones zero."""
    y, states, histories = run.rounds(plan.drafts(rng, golden.x), plan.counts, plan.accepted, SLOTS)
    for r, row, begin, count, right in plan:
        assert relative(y[r, row, :right], golden.y[row, begin : begin + right]) <= TOLERANCE
        assert np.isfinite(y[r, row, :count]).all()
        assert not y[r, row, count:].any()
        if begin + right in golden.recurrent:
            check_state(golden, begin + right, row, states[r, row], histories[r, row])


# the reference on one family of each recurrence; on all in `make long`
@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        pytest.param(family, name, marks=[pytest.mark.long] * (name == "reference" and family not in ONE_OF_EACH))
        for family in FAMILIES
        for name in ("xla", "reference")
    ],
)
def test_steps(family, implementation):
    for layer in layers(family):
        golden = mixer_golden(family, layer)
        run = start(golden, ReplayPolicy(window=10))
        for stop in STOPS:
            piece = slice(stop - 16, stop)
            y = run.steps(golden.x[:, piece], SLOTS, implementation)
            assert relative(y, golden.y[:, piece]) <= TOLERANCE
            for row in range(2):
                check_state(golden, stop, row, run.state(SLOTS)[row], run.history(SLOTS)[row])
        check_unowned(run)


@pytest.mark.parametrize(("family", "window"), [*((family, 16) for family in FAMILIES), ("qwen3_5", 10)])
def test_drafts_with_random_acceptance(family, window, rng):
    """Rejected drafts are garbage, so a rollback that forgets anything shows; so do dead rows, which are NaN."""
    for layer in layers(family):
        golden = mixer_golden(family, layer)
        plan = draft_plan(rng, (0, 0), 5, STOPS, ROUNDS)
        run = start(golden, ReplayPolicy(window=window, max_draft=5))
        check_rounds(golden, run, plan, rng)
        np.testing.assert_array_equal(run.pointer.position[np.array(SLOTS)], golden.seen + 48)
        check_unowned(run)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompt(family):
    for layer in layers(family):
        golden = mixer_golden(family, layer)
        run = start(golden, POLICY)
        assert relative(run.prompt(golden.x, SLOTS), golden.y) <= TOLERANCE
        for row in range(2):
            check_state(golden, 48, row, run.state(SLOTS)[row], run.history(SLOTS)[row])
        check_unowned(run)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_pieces_between_drafts(family, rng):
    """Ragged pieces of 1 to 17 tokens go on from wherever a few rounds of drafts, accepted or not, left the slot."""
    golden = mixer_golden(family, layers(family)[-1])
    run, at = start(golden, POLICY), np.zeros(2, int)
    while (at < 48).any():
        lengths = np.minimum(rng.integers(1, 18, 2), 48 - at)
        x = np.full_like(golden.x, np.nan)
        for row, (begin, length) in enumerate(zip(at, lengths, strict=True)):
            x[row, :length] = golden.x[row, begin : begin + length]
        run.poison(SLOTS)
        y = run.prompt(x, SLOTS, lengths)
        for row, (begin, length) in enumerate(zip(at, lengths, strict=True)):
            assert relative(y[row, :length], golden.y[row, begin : begin + length]) <= TOLERANCE
            assert not y[row, length:].any()
        at += lengths
        plan = draft_plan(rng, at, 5, STOPS, ROUNDS, active=3)
        check_rounds(golden, run, plan, rng)
        at = plan.end
    for row in range(2):
        check_state(golden, 48, row, run.state(SLOTS)[row], run.history(SLOTS)[row])
    check_unowned(run)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "glm5_next_kda", "nemotron_h"])
def test_flushed_checkpoint_is_the_published_state_in_every_gate_mode(family):
    """The state itself, not only the outputs: a gate recomputed by another formula at the flush drifts unseen.

    Row 55, https://github.com/sgl-project/sglang/pull/33630
    """
    golden = mixer_golden(family, layers(family)[0])
    run = start(golden, ReplayPolicy(window=10))
    run.steps(golden.x[:, :16], SLOTS, "xla")
    slots = np.array(SLOTS)
    assert (run.pointer.length[slots] > 0).all(), "records are still to be folded, or this shows nothing"
    flushed = quick_jit(flush)(run.cache.state(run.pointer), slots)
    assert relative(flushed.checkpoint[slots], golden.recurrent[16], 2) <= TOLERANCE
    assert not flushed.pointer.length[slots].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_operator_arguments(family):
    """What enters the recurrence is what entered the published operator: q, k, v, the log decay and beta."""
    golden, trace = mixer_golden(family, layers(family)[0]), load(family, "trace")
    run = start(golden, POLICY)
    tokens = run.tokens(golden.x, SLOTS)
    want = {name.removeprefix("op."): value for name, value in trace.items() if name.startswith("op.")}
    if "dt" in want:
        dt = np.logaddexp(0, want["dt"] + want["dt_bias"])
        want |= {"q": want["C"], "k": want["B"], "v": want["x"], "beta": dt, "g": dt * want["A"]}
    else:
        repeat, dim = want["q"].shape[2] // tokens.q.shape[2], want["q"].shape[-1]
        want["q"], want["k"] = want["q"][:, :, ::repeat], want["k"][:, :, ::repeat]
        assert relative(tokens.q_scale, (np.sum(want["q"] ** 2, -1) + 1e-6) ** -0.5 * dim**-0.5) <= TOLERANCE
        assert relative(tokens.k_scale, (np.sum(want["k"] ** 2, -1) + 1e-6) ** -0.5) <= TOLERANCE
    for name in ("q", "k", "v", "beta"):
        assert relative(getattr(tokens, name), want[name]) <= TOLERANCE, name
    assert tokens.log_decay.shape == want["g"].shape
    # the published softplus is itself 3e-5 off where it is small, 2e-8 in absolute terms
    np.testing.assert_allclose(tokens.log_decay, want["g"], rtol=TOLERANCE, atol=1e-7)


@pytest.mark.parametrize(("family", "layer"), LAYERS)
def test_float64_oracle(family, layer):
    """The oracle that the other tests of mixers answer to is the published model."""
    golden = mixer_golden(family, layer)
    for row in range(2):
        trace = oracle(golden.mixer, golden.x[row], golden.recurrent[0][row], golden.conv[0][row])
        assert relative(trace.y, golden.y[row]) <= TOLERANCE
        for step in STOPS:
            check_state(golden, step, row, trace.states[step - 1], trace.inputs[step - 3 : step])
