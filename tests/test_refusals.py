"""What is right but cannot be done here is refused, with a word on what works, and not answered wrongly or slowly instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import replay_pallas
from tests.cases import case_named, make_tokens


@pytest.mark.parametrize("readout", ["bf16", "fp8_e4m3", "nvfp4"])
def test_readouts_that_do_not_exist_yet(readout):
    with pytest.raises(NotImplementedError, match=f"readout='{readout}' is not implemented yet; readout='checkpoint' works"):
        rs.ReplayPolicy(readout=readout)


def test_rounding_that_does_not_exist_yet():
    with pytest.raises(NotImplementedError, match="rounding='stochastic' is not implemented yet; rounding='nearest' works"):
        rs.ReplayPolicy(rounding="stochastic")


def test_more_drafts_than_the_policy_keeps_room_for():
    case = case_named("gdn")
    state = rs.init_state(case.recurrence, case.policy, 2)
    with pytest.raises(ValueError, match=r"tokens holds T=5 drafts, more than .*max_draft=4; a prompt goes through prefill"):
        rs.verify(state, make_tokens(case, np.random.default_rng(0), 2, 5))


@pytest.mark.parametrize(
    ("family", "field", "given", "record", "needed"),
    [
        ("gdn", "k", "float32", "bfloat16", "float32"),
        ("gdn", "k", "float16", "bfloat16", "float32"),
        ("gla", "k", "bfloat16", "float16", "float32"),
        ("gla", "v", "float32", "float16", "float32"),
    ],
)
def test_records_that_would_be_rounded(family, field, given, record, needed):
    """bfloat16 values of long-lived inputs must come in as such, not be made so on the way to the ring."""
    case = case_named(family, activations=record)
    state = rs.init_state(case.recurrence, case.policy, 2)
    tokens = make_tokens(case, np.random.default_rng(0), 2, 1)
    tokens = dataclasses.replace(tokens, **{field: jnp.asarray(getattr(tokens, field), given)})
    for door in (rs.verify, rs.step):
        with pytest.raises(ValueError, match=rf"tokens\.{field} is {given}, .*{record} cannot hold.*record_dtype='{needed}'"):
            door(state, tokens)
    rs.prefill(state, tokens)  # records nothing, so rounds nothing


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernels may run here")
@pytest.mark.parametrize("door", [rs.verify, rs.step, rs.prefill])
def test_a_named_backend_that_cannot_run_is_not_replaced(door):
    case = case_named("gdn")
    state = rs.init_state(case.recurrence, case.policy, 2)
    tokens = make_tokens(case, np.random.default_rng(0), 2, 1)
    with pytest.raises(NotImplementedError, match=r"implementation='pallas': needs a Hopper GPU .*'xla' runs anywhere"):
        door(state, tokens, implementation="pallas")
    with pytest.raises(NotImplementedError, match=r"implementation='pallas': needs a Hopper GPU .*'xla' runs anywhere"):
        rs.flush(state, implementation="pallas")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 8, "max_draft": 2}, "window=8: the GPU kernels take window=16 or window=32"),
        ({"dims": (8, 48)}, "key_dim=48: the GPU kernels take multiples of 32 up to 256"),
        ({"dims": (8, 288)}, "key_dim=288"),
        ({"dims": (12, 32)}, "value_dim=12: the GPU kernels take multiples of 8"),
        ({"dims": (64, 256), "gate": "channel", "window": 32, "max_draft": 16}, "T=16 tokens with key_dim=256 need "),
    ],
)
def test_kernels_say_what_would_work(changes, reason):
    case = case_named("gdn", **({"dims": (8, 32)} | changes))
    state = rs.init_state(case.recurrence, case.policy, 2)
    refusal = replay_pallas.unsupported_shape(state, make_tokens(case, np.random.default_rng(0), 1, case.max_draft))
    assert refusal.startswith(reason)
    assert refusal.endswith("implementation='xla' takes any")
