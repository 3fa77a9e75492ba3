"""Every public argument of a mixer given wrong once: the error is of the right kind and names the argument."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax import ReplayPolicy, init_pointer, init_state
from replayssm_jax.mixers import GatedDeltaNetConfig, KimiDeltaAttentionConfig, Mamba2Config
from tests.mixer_oracle import HIDDEN, MIXERS, gated_delta_net, kimi_delta, mamba2

POLICY = ReplayPolicy(window=8, max_draft=2)
SLOTS = 3
X = jnp.ones((2, 2, HIDDEN))
POINTER = init_pointer(SLOTS, 8, 2)

GDN = functools.partial(
    GatedDeltaNetConfig, hidden_size=8, num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=4
)
KDA = functools.partial(KimiDeltaAttentionConfig, hidden_size=8, num_heads=2, head_dim=4)
MAMBA2 = functools.partial(Mamba2Config, hidden_size=8, num_heads=4, head_dim=4, state_size=4, num_groups=2)


def trace(mixer, *arguments, **options):
    """Traces a call and runs nothing: what these tests ask for is known then."""
    return jax.eval_shape(lambda: mixer(*arguments, **options))


@functools.cache
def make(name):
    return MIXERS[name]()


every_mixer = pytest.mark.parametrize("name", MIXERS)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (GDN, "num_key_heads", 3),
        (GDN, "num_value_heads", 2.0),
        (GDN, "key_head_dim", 0),
        (GDN, "value_head_dim", -4),
        (GDN, "hidden_size", 0),
        (GDN, "conv_width", 0),
        (KDA, "num_heads", 0),
        (KDA, "head_dim", "4"),
        (KDA, "hidden_size", -1),
        (KDA, "conv_width", 0),
        (KDA, "gate_lower_bound", 5.0),
        (KDA, "gate_lower_bound", 0.0),
        (KDA, "gate_lower_bound", math.nan),
        (MAMBA2, "num_heads", 0),
        (MAMBA2, "head_dim", 0),
        (MAMBA2, "state_size", 0),
        (MAMBA2, "hidden_size", 0),
        (MAMBA2, "conv_width", 0),
        (MAMBA2, "num_groups", 3),
        (MAMBA2, "norm_groups", 3),
        (MAMBA2, "norm_groups", 0),
        (MAMBA2, "time_step_limit", (1.0, 0.5)),
        (MAMBA2, "time_step_limit", (-1.0, 1.0)),
        (MAMBA2, "time_step_limit", 0.5),
    ],
    ids=lambda value: type(value()).__name__ if callable(value) else str(value),
)
def test_config_names_its_wrong_field(config, name, value):
    """At construction, where the caller's mistake is."""
    with pytest.raises((ValueError, TypeError), match=name):
        config(**{name: value})


@pytest.mark.parametrize("config", [GDN(), KDA(), MAMBA2()], ids=lambda config: type(config).__name__)
def test_config_is_frozen_and_hashable(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 4
    assert hash(config) == hash(dataclasses.replace(config))


@every_mixer
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x": jnp.ones((2, HIDDEN))}, ValueError, rf"x must be \[B, T, {HIDDEN}\].*\(2, {HIDDEN}\)"),
        ({"x": jnp.ones((2, 2, 5))}, ValueError, rf"x must be \[B, T, {HIDDEN}\].*\(2, 2, 5\)"),
        ({"x": jnp.ones((2, 0, HIDDEN))}, ValueError, "x must be .* at least 1"),
        ({"x": jnp.ones((2, 3, HIDDEN))}, ValueError, "T=3 .* max_draft=2"),
        ({"x": jnp.ones((4, 2, HIDDEN))}, ValueError, "slots=None .* 4 rows and 3 slots"),
        ({"slots": jnp.zeros((2, 1), jnp.int32)}, ValueError, r"slots must be a vector .* \(2, 1\)"),
        ({"slots": jnp.zeros(2)}, TypeError, "slots must be integers, got float32"),
        ({"slots": jnp.zeros(3, jnp.int32)}, ValueError, r"slots must have one entry per row, shape \(2,\), got \(3,\)"),
        ({"lengths": jnp.ones(2)}, TypeError, "lengths must be integers, got float32"),
        ({"lengths": jnp.ones(3, jnp.int32)}, ValueError, r"lengths must have one entry per row, shape \(2,\), got \(3,\)"),
        ({"implementation": "fast"}, ValueError, "implementation must be .* got 'fast'"),
        ({"pointer": init_pointer(SLOTS, 16, 2)}, ValueError, "pointer has window=16.* window=8"),
        ({"pointer": init_pointer(SLOTS, 8, 1)}, ValueError, "pointer has .*max_draft=1.* max_draft=2"),
        ({"pointer": init_pointer(4, 8, 2)}, ValueError, r"pointer.* \(3,\), got \(4,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_call_names_its_wrong_argument(name, options, error, message):
    mixer = make(name)
    arguments = {"x": X, "pointer": POINTER} | options
    with pytest.raises(error, match=message):
        trace(mixer, mixer.init_cache(SLOTS, POLICY), **arguments)


@every_mixer
@pytest.mark.parametrize("prefill", [True, False])
def test_named_implementation_runs_or_raises(name, prefill):
    mixer = make(name)
    with pytest.raises(NotImplementedError, match=r"pallas.*Hopper GPU.*'xla' runs anywhere"):
        trace(mixer, mixer.init_cache(SLOTS, POLICY), X, POINTER, implementation="pallas", prefill=prefill)


@pytest.mark.parametrize(
    "cache",
    [
        lambda: mamba2().init_cache(SLOTS, POLICY),
        lambda: kimi_delta().init_cache(SLOTS, POLICY),
        lambda: gated_delta_net(num_key_heads=1).init_cache(SLOTS, POLICY),
        lambda: gated_delta_net(conv_width=2).init_cache(SLOTS, POLICY),
        lambda: gated_delta_net(dtype=jnp.bfloat16).init_cache(SLOTS, POLICY),
        lambda: init_state(gated_delta_net().config.recurrence, POLICY, SLOTS),
    ],
    ids=["mamba2", "kimi_delta", "other heads", "other conv_width", "other dtype", "ReplayState"],
)
def test_cache_of_another_mixer_is_refused(cache):
    """By name: a message of jnp about shapes that differ does not say what the caller did."""
    with pytest.raises((ValueError, TypeError), match="cache"):
        trace(gated_delta_net(), cache(), X, POINTER)


def test_x_of_token_ids_is_refused():
    """Integers in the place of activations are token ids that missed their embedding."""
    mixer = gated_delta_net()
    with pytest.raises(TypeError, match="x must be"):
        trace(mixer, mixer.init_cache(SLOTS, POLICY), X.astype(jnp.int32), POINTER)


def test_records_that_would_round_the_activations_are_refused():
    mixer = gated_delta_net()
    cache = mixer.init_cache(SLOTS, ReplayPolicy(window=8, max_draft=2, record_dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"k is float32.*record_dtype=bfloat16"):
        trace(mixer, cache, X, POINTER)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "num_slots must be at least 1, got 0"),
        ((2.0,), TypeError, "num_slots must be an int, got 2.0"),
        ((2, "fast"), TypeError, "policy must be a ReplayPolicy, got str"),
    ],
)
def test_init_cache_names_its_wrong_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        gated_delta_net().init_cache(*arguments)


@pytest.mark.parametrize(("slots", "error"), [(np.zeros(2, np.float32), TypeError), (np.zeros((1, 1), np.int32), ValueError)])
def test_reset_names_its_wrong_argument(slots, error):
    with pytest.raises(error, match="slots must be"):
        gated_delta_net().init_cache(SLOTS).reset(slots)
