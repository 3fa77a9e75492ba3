"""Generation: every way of decoding gives the tokens that the published implementations recorded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from replayssm_jax.decoding import Delta, Engine, PromptLookup, RequestError, SamplingParams, generate, stream
from replayssm_jax.decoding.text import ByteTokenizer
from replayssm_jax.mixers.parts import linear
from replayssm_jax.models import Decoder
from tests.decoding_runs import MODELS, SIZES, answers, drafter, engine, model, prompts, recorded, solo

GREEDY = SamplingParams(max_tokens=48)
DRAFTERS = {"qwen3_5": ("plain", "itself", "mtp"), "qwen3_next": ("mtp",), "kimi_linear": ("smaller",)}


@pytest.mark.parametrize(
    "family", [name if name in ("qwen3_5", "mamba2") else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_every_way_gives_the_recorded_tokens(family, rng):
    """Plain, with each drafter, and through an engine into which requests come at random."""
    texts, expected = recorded(family)
    for name in ("lookup", *DRAFTERS.get(family, ())):
        assert answers(family, name, texts, GREEDY) == expected, name
    busy = engine(family, "lookup")
    requests = []
    for number in range(10):
        # a recorded text cut anywhere goes on as recorded
        row, cut = int(rng.integers(len(texts))), int(rng.integers(0, 40))
        text = (*texts[row], *expected[row][:cut])
        requests.append((busy.submit(text, SamplingParams(max_tokens=48 - cut)), expected[row][cut:]))
        for _ in range(int(rng.integers(0, 3)) if number < 9 else 0):
            busy.step()
    busy.run()
    assert [tuple(request.tokens) for request, _ in requests] == [answer for _, answer in requests]


def test_a_drafter_that_is_always_right_saves_rounds():
    """And one that is always wrong costs none: each round brings a token at least."""
    texts, expected = recorded("qwen3_5")
    rounds = {}
    for name in ("itself", "mtp"):
        runs = engine(drafts=name)
        requests = [runs.submit(text, GREEDY) for text in texts]
        runs.run()
        assert [tuple(request.tokens) for request in requests] == expected
        rounds[name] = int(runs.pool.sequences.counts.rounds.max())
    assert rounds["itself"] == 48 / 4
    assert rounds["mtp"] <= 48


@pytest.mark.parametrize("name", ["plain", "lookup", "itself"])
def test_a_sample_does_not_depend_on_its_batch(name, rng):
    texts = prompts(rng, 6, longest=20)
    params = [SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7 * i) for i in range(6)]
    runs = engine(drafts=name)
    together = [runs.submit(text, p) for text, p in zip(texts, params, strict=True)]
    runs.run()
    for i in (1, 4):
        assert answers("qwen3_5", name, texts[i : i + 1], params[i : i + 1]) == [tuple(together[i].tokens)]


def test_lookup_draws_what_plain_decoding_draws(rng):
    """Where drafts are chosen and not drawn, speculation changes no sample, whatever it asks for."""
    texts = [(5, 6, 7) * 6, *prompts(rng, 2)]
    params = [
        SamplingParams(max_tokens=30, temperature=0.7, seed=1),
        SamplingParams(max_tokens=30, temperature=0.9, top_k=20, min_p=0.02, seed=2),
        SamplingParams(max_tokens=30, repetition_penalty=1.3),
    ]
    assert answers("qwen3_5", "plain", texts, params) == answers("qwen3_5", "lookup", texts, params)


def test_log_probabilities_are_the_models_own():
    texts, expected = recorded("qwen3_5")
    (first, _) = generate(model("qwen3_5"), texts, GREEDY, drafter=drafter("lookup", "qwen3_5"), **SIZES)
    logits = jax.jit(model("qwen3_5"))(np.array([[*texts[0], *expected[0]]], np.int32))[0]
    wanted = jax.nn.log_softmax(logits)[np.arange(6, 54), np.array(expected[0])]
    np.testing.assert_allclose(first.logprobs, wanted, atol=2e-4)


@pytest.mark.parametrize("name", ["plain", "lookup", "itself"])
def test_an_answer_ends_at_its_limit_or_its_stop_token(name):
    """Also where drafts that would be right run past either."""
    texts, expected = recorded("qwen3_5")
    runs = engine(drafts=name)
    limits = [runs.submit(texts[0], SamplingParams(max_tokens=count)) for count in (1, 2, 3, 5, 8)]
    stops = {token: expected[1].index(token) for token in expected[1][3:20]}
    ended = [runs.submit(texts[1], SamplingParams(max_tokens=40, stop_tokens=(token, 127))) for token in stops]
    runs.run()
    for request in limits:
        assert tuple(request.tokens) == expected[0][: request.params.max_tokens]
        assert request.finish_reason == "length"
    for request, at in zip(ended, stops.values(), strict=True):
        assert tuple(request.tokens) == expected[1][: at + 1]
        assert request.finish_reason == "stop"


def test_text_ends_before_a_stop_string_and_never_shows_its_beginning():
    demo = engine("qwen3_5", "plain", tokenizer=ByteTokenizer(128))
    texts, expected = recorded("qwen3_5")
    whole = "".join(map(chr, expected[0]))
    stop = whole[20:23]
    request = demo.submit(texts[0], SamplingParams(max_tokens=48, stop=(stop, "never in there")))
    shown = ""
    for delta in request:
        shown += delta.text
        assert whole.startswith(shown)
    assert shown == request.completion().text == whole[: whole.index(stop)]
    assert tuple(request.tokens) == expected[0][: whole.index(stop) + 3]
    assert request.finish_reason == "stop"


def test_streams_are_the_answers_in_pieces():
    texts, expected = recorded("qwen3_5")
    seen: dict[int, list[Delta]] = {0: [], 1: []}
    for row, delta in stream(model("qwen3_5"), texts, GREEDY, **{**SIZES, "rounds_per_step": 5}):
        seen[row].append(delta)
    for row, deltas in seen.items():
        assert len(deltas) > 5
        assert tuple(token for delta in deltas for token in delta.tokens) == expected[row]


def test_progress_is_shown_when_asked_for(capsys):
    generate(model("qwen3_5"), [[1, 2]], SamplingParams(max_tokens=5), progress=True, **SIZES)
    assert "5 of up to 5 tokens" in capsys.readouterr().err


def test_prompts_of_every_length_up_to_a_rounds_tokens(rng):
    """None of them is taken for a row of drafts, and one token needs no prefill at all."""
    for size in range(1, 7):
        text = tuple(rng.integers(0, 128, size).tolist())
        runs = engine()
        assert runs.submit(text, SamplingParams(max_tokens=10)).result().tokens == solo(text, 10)


def test_prompt_lookup_goes_on_as_the_text_did_before():
    texts = [(9, 1, 2, 3, 4, 5, 6, 1, 2, 3), (7, 8, 7, 8, 7), (1, 2, 3, 4), (5,), (3, 1, 2, 9, 1, 2)]
    runs = Engine(model("mamba2"), drafter=PromptLookup(3, max_ngram=3, min_ngram=2), num_slots=5, max_length=12)
    for slot, text in enumerate(texts):
        runs.pool.place(slot, text, 12, SamplingParams(), None)
    _, drafts, counts, proposals = runs.drafter.propose(model("mamba2"), (), runs.pool.sequences)
    assert proposals is None
    assert counts.tolist() == [3, 3, 0, 0, 3]
    assert drafts[0].tolist() == [4, 5, 6]
    assert drafts[1].tolist() == [8, 7, 8]  # the match runs into its own end and is continued
    assert drafts[4].tolist() == [9, 1, 2]


def test_mistakes_are_named():
    subject = model("qwen3_5")
    for wrong, message in (
        ([[]], "at least one token"),
        ([[128]], r"\[0, 128\).*128"),
        ([["a"]], "hold tokens"),
        ([], "prompts"),
        (5, "prompts"),
        ([1, 2], "prompt must be text or a sequence of tokens, got 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            generate(subject, wrong)
    with pytest.raises(TypeError, match="tokenizer"):
        generate(subject, ["text"])
    with pytest.raises(ValueError, match=r"params.*1 for 2"):
        generate(subject, [[1], [2]], [GREEDY])
    for params in ([None], {"max_tokens": 3}):
        with pytest.raises(TypeError, match="params must be SamplingParams"):
            generate(subject, [[1]], params)
    with pytest.raises(TypeError, match="no_such_option"):
        generate(subject, [[1]], no_such_option=3)
    for field, value in {"max_tokens": 0, "top_k": -1, "top_p": 0.0, "min_p": 2, "seed": -1, "stop": ("",)}.items():
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})
    for field, value in {"temperature": "hot", "stop": "text", "stop_tokens": ("a",), "seed": 1.0}.items():
        with pytest.raises(TypeError, match=field):
            SamplingParams(**{field: value})


def test_a_failure_is_that_prompts_alone():
    """The model's weights make the logits after one token NaN."""
    broken = with_an_embedding_of_nan(77)
    texts = [(1, 2, 3), (1, 77, 3), (4, 5, 6)]
    good = generate(model("mamba2"), texts, SamplingParams(max_tokens=6), **SIZES)
    got = generate(broken, texts, SamplingParams(max_tokens=6), **SIZES)
    assert got[1].error == "the model's logits are not finite"
    assert got[1].finish_reason == "error"
    assert [got[0], got[2]] == [good[0], good[2]]
    with pytest.raises(RequestError, match="not finite"):
        list(stream(broken, texts, SamplingParams(max_tokens=6), **SIZES))


def with_an_embedding_of_nan(token: int) -> Decoder:
    """The mamba2 golden; its head, which shares the embedding, is made a matrix of its own and stays whole."""
    broken, embedding = nnx.clone(model("mamba2")), model("mamba2").embed_tokens.get_value()
    broken.embed_tokens.set_value(embedding.at[token].set(np.nan))
    if broken.lm_head is None:
        broken.lm_head = linear(*embedding.shape[::-1], dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        broken.lm_head.kernel.set_value(embedding.T)
    return broken


def test_params_are_kept_as_they_are():
    assert dataclasses.replace(GREEDY, stop_tokens=[3]).stop_tokens == (3,)
