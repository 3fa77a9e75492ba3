"""The Qwen3.5 decoder against its published golden: tokens, logits, states, by every way through the model."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from replayssm_jax import ReplayPolicy
from replayssm_jax.models import Qwen3_5
from tests.golden_data import STOPS, load
from tests.mixer_runs import draft_plan, products, quick_jit
from tests.model_runs import BATCH, FOLDER, POLICY, PROMPT, TOTAL, ModelRun, check_states, logits_after, model, sequences

TOLERANCE = 3e-4
ROUNDS = 80


def check_logits(logits: np.ndarray, row: int, count: int) -> None:
    """Logits [V] of one row after ``count`` tokens, in value and in choice."""
    want = logits_after(row, count)
    assert np.abs(logits - want).max() <= TOLERANCE
    assert logits.argmax() == want.argmax()


def after_prompt(policy: ReplayPolicy = POLICY) -> ModelRun:
    run = ModelRun(policy=policy)
    logits = run.prefill([row[:PROMPT] for row in sequences()])
    for row in range(2):
        check_logits(logits[row], row, PROMPT)
        check_states([(state[row], inputs[row]) for state, inputs in run.states()], row, 0)
    return run


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_greedy_decoding(implementation):
    """48 steps from the prompt on, each fed the last one's choice."""
    run, golden = after_prompt(), load("qwen3_5", "golden")
    token = golden["logits"][:, 0].argmax(-1).astype(np.int32)
    for stop in STOPS:
        tokens, logits = run.generate(token, 16, implementation)
        np.testing.assert_array_equal(tokens, golden["tokens"][:, stop - 16 : stop])
        for row in range(2):
            assert np.abs(logits[row] - golden["logits"][row, stop - 15 : stop + 1]).max() <= TOLERANCE
            check_states([(state[row], inputs[row]) for state, inputs in run.states()], row, stop)
        token = logits[:, -1].argmax(-1).astype(np.int32)
    np.testing.assert_array_equal(run.cache.pointer.position[BATCH[[0, 2]]], TOTAL)
    run.check_unowned()


def test_drafts_with_random_acceptance(rng):
    """Drafts are the golden's tokens up to a random point and wrong ones from there; every layer rolls back for free."""
    run, plan = after_prompt(), draft_plan(rng, (0, 0), POLICY.max_draft, STOPS, ROUNDS)
    drafts = rng.integers(0, 128, (ROUNDS, 2, POLICY.max_draft), np.int32)
    for r, row, begin, _, right in plan:
        drafts[r, row, :right] = sequences()[row, PROMPT + begin : PROMPT + begin + right]
    logits, states = run.rounds(drafts, plan.counts, plan.accepted)
    for r, row, begin, count, right in plan:
        for i in range(right):
            check_logits(logits[r, row, i], row, PROMPT + begin + i + 1)
        assert np.isfinite(logits[r, row]).all()
        assert not logits[r, row, count:].any()
        if begin + right in (0, *STOPS):
            # the third layer's convolution inputs, up to 5 in size, are 1.2e-5 off in one plan of three
            check_states([(state[r, row], inputs[r, row]) for state, inputs in states], row, begin + right, 2e-5)
    run.check_unowned()


def test_whole_sequences_as_prompts():
    run = ModelRun()
    logits = run.prefill(list(sequences()))
    for row in range(2):
        check_logits(logits[row], row, TOTAL)
        check_states([(state[row], inputs[row]) for state, inputs in run.states()], row, 48)
    run.check_unowned()


def test_prompts_in_ragged_pieces(rng):
    """Pieces of 0 to 17 tokens, other ones in each row; a row without tokens answers zeros and stays where it is."""
    run, at = ModelRun(), np.zeros(2, int)
    while (at < TOTAL).any():
        lengths = np.minimum(rng.integers(0, 18, 2), TOTAL - at)
        logits = run.prefill([row[p : p + n] for row, p, n in zip(sequences(), at, lengths, strict=True)])
        at += lengths
        for row in range(2):
            if lengths[row]:
                check_logits(logits[row], row, at[row])
            else:
                assert not logits[row].any()
    for row in range(2):
        check_states([(state[row], inputs[row]) for state, inputs in run.states()], row, 48)
    run.check_unowned()


def test_scoring_whole_sequences():
    """``model(tokens)``: every position's logits, and no cache."""
    graph, weights = nnx.split(model())
    logits = quick_jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))(weights, sequences())
    golden = load("qwen3_5", "golden")
    want = np.concatenate([golden["prompt_logits"][:, :-1], golden["logits"]], axis=1)
    assert np.abs(logits - want).max() <= TOLERANCE


def test_rejecting_every_draft_changes_nothing():
    """commit(0): two rows' wrong drafts, of 5 and of 2 tokens, leave no trace in states, attention or convolution."""
    run = after_prompt()
    before = run.states()
    for _ in range(3):
        run.verify([np.arange(5), np.arange(2)])
        run.commit([0, 0])
    for old, new in zip(before, run.states(), strict=True):
        chex.assert_trees_all_equal(old, new)
    logits = run.verify([row[PROMPT : PROMPT + 5] for row in sequences()])
    for row in range(2):
        for i in range(5):
            check_logits(logits[row, i], row, PROMPT + 1 + i)


def test_reused_slot_forgets_its_last_sequence():
    run = after_prompt()
    run.generate(sequences()[:, PROMPT], 16, "xla")
    run.reset([BATCH[0], -1, 99])
    rows = [sequences()[1, :PROMPT], sequences()[1, PROMPT + 16 : PROMPT + 20]]
    logits = run.prefill(rows)
    check_logits(logits[0], 1, PROMPT)
    check_logits(logits[1], 1, PROMPT + 20)
    check_states([(state[0], inputs[0]) for state, inputs in run.states()], 1, 0)


def test_fork_takes_every_layer_along():
    """The second sequence's slot becomes a copy of the first's, in the middle of a ring, and goes on as it."""
    run = after_prompt()
    run.generate(sequences()[:, PROMPT], 16, "xla")
    run.copy([BATCH[0]], [BATCH[2]])
    logits = run.verify([sequences()[0, 23:28], sequences()[0, 23:26]])
    for i in range(5):
        check_logits(logits[0, i], 0, 24 + i)
    for i in range(3):
        check_logits(logits[1, i], 0, 24 + i)
    run.commit([5, 3])
    positions = run.cache.pointer.position[BATCH[[0, 2]]]
    np.testing.assert_array_equal(positions, [28, 26])


def test_bfloat16_is_near():
    """Weights lose nothing in bfloat16 here, activations do; teacher-forced, the answers stay near and finite."""
    subject = Qwen3_5.from_pretrained(FOLDER, dtype=jnp.bfloat16)
    kept = {".".join(map(str, path)): v.get_value().dtype for path, v in nnx.to_flat_state(nnx.state(subject, nnx.Param))}
    for name, dtype in kept.items():
        assert dtype == (jnp.float32 if name.endswith(("A_log", "dt_bias")) else jnp.bfloat16), name
    run = ModelRun(subject, ReplayPolicy(window=10, max_draft=5, record_dtype="bfloat16"))
    drafts = np.zeros((ROUNDS, 2, 5), np.int32)
    drafts[:11] = np.swapaxes(sequences().reshape(2, 11, 5), 0, 1)
    counts = np.where(np.arange(ROUNDS)[:, None] < 11, 5, 0).repeat(2, axis=1)
    logits, _ = run.rounds(drafts, counts, counts)
    got = np.swapaxes(logits[:11], 0, 1).reshape(2, TOTAL, -1)
    assert got.dtype == np.float32
    error = got - [[logits_after(row, count + 1) for count in range(TOTAL)] for row in range(2)]
    assert np.abs(error).max() <= 1
    assert np.sqrt(np.mean(error**2)) <= 0.1


@pytest.mark.parametrize("prefill", [True, False], ids=["prompt", "drafts"])
def test_no_float32_product_is_rounded(prefill):
    """Row 69, https://github.com/vllm-project/tpu-inference/pull/2408"""
    subject, cache = model(), model().init_cache(2, 16, POLICY)
    call = functools.partial(subject.prefill if prefill else subject.verify, cache)
    dots = products(jax.make_jaxpr(call)(jnp.zeros((2, 4), jnp.int32)).jaxpr)
    assert len(dots) > 30
    for eqn in dots:
        assert set(eqn.params["precision"]) == {jax.lax.Precision.HIGHEST}, eqn


def test_decode_loop_compiles_once():
    """Other slots, lengths, acceptances and fill levels are values: nothing is traced again, and the cache is donated."""
    chex.clear_trace_counter()
    graph, weights = nnx.split(model())

    @functools.partial(quick_jit, donate_argnames="cache")
    @chex.assert_max_traces(n=1)
    def step(weights, cache, tokens, slots, lengths, accepted):
        subject = nnx.merge(graph, weights)
        cache, logits = subject.verify(cache, tokens, slots, lengths)
        return subject.commit(cache, accepted, slots), logits

    cache = model().init_cache(3, 32, ReplayPolicy(window=6, max_draft=2))
    position = np.zeros(3, int)
    for i in range(12):
        slots = np.array([i % 4, (i + 1) % 4], np.int32)  # slot 3 is padding
        accepted = np.array([i % 3, 1], np.int32)
        tokens = np.stack([np.resize(sequences()[0, position[s % 3] :], 2) for s in slots]).astype(np.int32)
        old = cache
        cache, logits = step(weights, cache, tokens, slots, np.maximum(accepted, 1), accepted)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        for row, slot in enumerate(slots):
            if slot < 3:
                check_logits(logits[row, 0], 0, position[slot] + 1)
                position[slot] += accepted[row]
    np.testing.assert_array_equal(cache.pointer.position, position)


@pytest.mark.parametrize(
    ("tokens", "message"), [(jnp.zeros((2, 3)), "tokens must be integers"), (jnp.zeros(3, jnp.int32), r"\[B, T\]")]
)
def test_wrong_tokens_are_named(tokens, message):
    cache = model().init_cache(2, 8)
    for call in (model().prefill, model().verify):
        with pytest.raises(ValueError, match=message):
            call(cache, tokens)
