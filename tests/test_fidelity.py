"""The fidelity benchmark at toy size: training, measuring and drawing, and what is compared with what."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replayssm_jax as rs
from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity import measure, plot, train
from benchmarks.fidelity.models import FAMILIES, SIZES, make_model
from benchmarks.fidelity.variants import BASE, VARIANTS, init_cache, round_updates, shared
from replayssm_jax.mixers.cache import MixerCache, init_mixer_cache
from replayssm_jax.models.cache import ModelCache
from replayssm_jax.readout import decode, encode
from tests.cases import case_named, make_tokens
from tests.compare import relative_error, same_bits
from tests.lockstep import FAST_COMPILE, jitted


@pytest.mark.long
def test_a_toy_run_trains_measures_and_draws(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}. " for n in range(400)))
    shape = ["--family=mamba2", "--size=toy", "--batch=2", "--length=16", "--minutes=0"]
    train.main([*shape, f"--text={text}", f"--out={tmp_path}"])
    learned = json.loads((tmp_path / "mamba2.json").read_text())
    assert learned["curve"][-1]["held_out"] < 9

    sizes = ["--tokens=96", "--generated=96", "--sequences=2", "--drafts=4", "--piece=48", "--bin=24", "--last=48"]
    paths = [f"--text={text}", f"--weights={tmp_path}", f"--out={tmp_path / 'result.json'}"]
    chosen = ["--families=mamba2", "--variants=shared nvfp4,bf16 updates"]
    fidelity.main([*sizes, *paths, *chosen])
    result = json.loads((tmp_path / "result.json").read_text())
    entries = result["measurements"]
    found = {(entry["text"], entry["variant"]): entry for entry in entries}
    assert len(found) == len(entries) == 2  # Mamba-2 records no updates
    for entry in entries:
        assert (entry["sequences"], entry["tokens"]) == (2, 96)
        assert len(entry["kl_by_bin"]) == 4
        assert 0 < entry["kl_last"] < 1
        assert entry["kl_mean"] == pytest.approx(np.mean(entry["kl_by_bin"]), rel=1e-3)
    assert (tmp_path / "result.svg").read_text().count("KL divergence") == 2
    assert set(plot.headline(result)) == {"mamba2_kl_shared_nvfp4"}
    assert len(plot.merge([result, result])["measurements"]) == 4
    with pytest.raises(ValueError, match="results differ in bin"):
        plot.merge([result, result | {"bin": 7}])

    # the texts were as long as each other and read in one batch; now each is read alone
    fidelity.main([*sizes, *paths, *chosen, "--generated=144", "--texts=generated,held_out"])
    generated, held_out = json.loads((tmp_path / "result.json").read_text())["measurements"]
    assert (generated["text"], generated["tokens"], held_out["text"]) == ("generated", 144, "held_out")
    assert held_out["kl_by_bin"] == pytest.approx(found["held_out", "shared nvfp4"]["kl_by_bin"], rel=1e-2)
    assert held_out.keys() == found["held_out", "shared nvfp4"].keys()


def test_every_family_and_variant_can_be_set_up():
    """Recurrent layers only; each rounds by a seed of its own, each sequence by its number."""
    for family in FAMILIES:
        model = nnx.eval_shape(lambda f=family: make_model(f, SIZES["toy"], "float32"))
        layers = [layer for layer in jax.eval_shape(lambda m=model: m.init_cache(1, 1)).layers if layer is not None]
        assert layers
        assert all(isinstance(layer, MixerCache) for layer in layers)
    for variant in (BASE, *VARIANTS):
        cache = jax.eval_shape(lambda v=variant: init_cache(model, v, 3, 4))
        assert [layer.policy.seed for layer in cache.layers] == list(range(len(cache.layers)))
    assert init_cache(model, BASE, 3, 4).pointer.request.tolist() == [0, 1, 2]
    assert {variant.name for variant in VARIANTS} <= set(plot.STYLES)
    with pytest.raises(ValueError, match="family must be one of gdn, mamba2, kda, got 'gla'"):
        make_model("gla", SIZES["toy"], "float32")


def _mixer(rng, **changes) -> ModelCache:
    """A cache of one mixer with four committed records per slot."""
    case = case_named("gdn", **changes)
    state = rs.init_state(case.recurrence, case.policy, 2)
    state, _ = jitted("verify")(state, make_tokens(case, rng, 2, 4))
    cache = init_mixer_cache(case.recurrence, case.policy, 2, 4, 8, jnp.dtype("float32"))
    cache = dataclasses.replace(cache, checkpoint=state.checkpoint, buffer=state.buffer)
    return ModelCache(layers=(cache, None), pointer=jitted("commit")(state.pointer, np.int32([4, 4])))


def test_a_shared_copy_is_what_the_recurrence_goes_on_from(rng):
    cache = _mixer(rng)
    after = jax.jit(shared("nvfp4"), compiler_options=FAST_COMPILE)(cache)
    exact = jitted("flush")(cache.layers[0].state(cache.pointer)).checkpoint
    assert same_bits(after.layers[0].checkpoint, decode("nvfp4", encode("nvfp4", exact), 8))
    assert 1e-2 < relative_error(after.layers[0].checkpoint, exact) < 0.3
    assert after.pointer.length.tolist() == [0, 0]
    assert after.pointer.origin.tolist() == [4, 4]


def test_rounded_updates_are_bfloat16_and_nothing_else_changes(rng):
    cache = _mixer(rng)
    after = round_updates(cache)
    update = cache.layers[0].buffer.update
    np.testing.assert_array_equal(after.layers[0].buffer.update, jnp.asarray(update).astype(jnp.bfloat16).astype(jnp.float32))
    assert same_bits(after.layers[0].buffer.key, cache.layers[0].buffer.key)
    assert same_bits(after.pointer, cache.pointer)


def test_sequences_of_a_text_start_far_apart():
    text = np.arange(100, dtype=np.uint8)
    apart = measure.take_sequences(text, 4, 20)
    assert apart.tolist() == [list(range(start, start + 20)) for start in (0, 25, 50, 75)]
    assert measure.take_sequences(text, 2, 120)[1, 49:52].tolist() == [99, 0, 1]


def test_the_rate_rises_and_cools_down():
    rates = [train.rate_at(done) for done in np.linspace(0, 1, 101)]
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert np.argmax(rates) == 5
    assert rates[-1] == pytest.approx(0.05)


@pytest.mark.parametrize("distance", [1e-4, 1e-2, 1.0])
def test_divergence_keeps_its_digits(distance, rng):
    """Of distributions so close that float32's sum of p log(p / q) would be nothing but rounding."""
    logits = rng.standard_normal((2, 3, 256))
    logs = [np.float32(x - np.log(np.exp(x).sum(-1, keepdims=True))) for x in (logits, logits + distance * logits[..., ::-1])]
    kl, other = measure.divergence(*logs)
    p, q = (np.exp(x.astype(np.float64)) for x in logs)
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    np.testing.assert_allclose(kl, (p * np.log(p / q)).sum(-1), rtol=0.02)
    np.testing.assert_array_equal(other, logs[0].argmax(-1) != logs[1].argmax(-1))
