"""What is right but cannot be done here is refused, with a word on what works, and not answered wrongly or slowly instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import replay_pallas
from tests.cases import case_named, make_tokens


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"readout": "fp8"}, "readout must be one of checkpoint, bf16, bf16_plane, fp8_e4m3, nvfp4, got 'fp8'"),
        (
            {"readout": "bf16_plane", "checkpoint_dtype": "float16"},
            "readout='bf16_plane' is half of a float32 checkpoint, got checkpoint_dtype=float16",
        ),
        ({"records": "u"}, "records must be one of None, update, raw, got 'u'"),
        (
            {"readout": "nvfp4", "records": "update"},
            "records='update' would fold what a rounded read made: readout='nvfp4' takes",
        ),
        (
            {"rounding": "stochastic"},
            "rounding='stochastic' rounds checkpoints of float16 or bfloat16, checkpoint_dtype=float32",
        ),
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic, got 'up'"),
        ({"seed": 2**32}, "seed must be an int from 0 to .*, got 4294967296"),
        ({"seed": -1}, "seed must be an int from 0 to .*, got -1"),
        ({"seed": 1.0}, "seed must be an int from 0 to .*, got 1.0"),
    ],
)
def test_precisions_that_do_not_go_together(changes, error):
    with pytest.raises(ValueError, match=error):
        rs.ReplayPolicy(**changes)


def test_a_state_without_the_copy_that_its_policy_reads():
    case = case_named("gdn", readout="nvfp4")
    state = rs.init_state(case.recurrence, case.policy, 2)
    with pytest.raises(ValueError, match=r"state\.readout must be a Readout for readout='nvfp4', got NoneType"):
        rs.flush(dataclasses.replace(state, readout=None))
    packed = dataclasses.replace(state.readout, payload=state.readout.payload[..., :2])
    with pytest.raises(ValueError, match=r"state\.readout\.payload must have shape \(2, 4, 6, 8\), got \(2, 4, 6, 2\)"):
        rs.flush(dataclasses.replace(state, readout=packed))
    plain = rs.init_state(case.recurrence, rs.ReplayPolicy(), 2)
    with pytest.raises(ValueError, match=r"state\.readout must be None for readout='checkpoint', got Readout"):
        rs.materialize(dataclasses.replace(plain, readout=state.readout))


def test_request_ids_of_the_wrong_number_or_kind():
    state = rs.init_state(case_named("gla").recurrence, rs.ReplayPolicy(), 4)
    with pytest.raises(ValueError, match=r"request must have one entry per row, shape \(2,\), got \(3,\)"):
        rs.reset(state, jnp.array([0, 1]), jnp.arange(3))
    with pytest.raises(TypeError, match="request must be integers, got float32"):
        rs.reset_pointer(state.pointer, jnp.array([0]), jnp.ones(1))


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
        ("gdn-raw", "v", "float32", "bfloat16", "float32"),
    ],
)
def test_records_that_would_be_rounded(family, field, given, record, needed):
    """bfloat16 values of long-lived inputs must come in as such, not be made so on the way to the ring."""
    family, _, records = family.partition("-")
    case = case_named(family, activations=record, records=records or None)
    state = rs.init_state(case.recurrence, case.policy, 2)
    tokens = make_tokens(case, np.random.default_rng(0), 2, 1)
    tokens = dataclasses.replace(tokens, **{field: jnp.asarray(getattr(tokens, field), given)})
    spared = ", or records='update', which records no values" if case.delta_rule and field == "v" else ""
    error = rf"tokens\.{field} is {given}, .*{record} cannot hold.*record_dtype='{needed}' or cast the tokens{spared}$"
    for door in (rs.verify, rs.step):
        with pytest.raises(ValueError, match=error):
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


_STOCHASTIC = {"checkpoint": "float16", "rounding": "stochastic"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 8, "max_draft": 2}, "window=8: the GPU kernels take window=16 or window=32"),
        ({"dims": (8, 48)}, "key_dim=48: the GPU kernels take multiples of 32 up to 256"),
        ({"dims": (8, 288)}, "key_dim=288"),
        ({"dims": (12, 32)}, "value_dim=12: the GPU kernels take multiples of 8"),
        ({"readout": "nvfp4", "dims": (64, 96)}, "key_dim=96 with readout='nvfp4': the GPU kernels take 64, 128 or 256"),
        ({"records": "raw", "dims": (80, 64)}, "value_dim=80 with records='raw': the GPU kernels take multiples of 64"),
        (
            {"readout": "bf16", "dims": (320, 64)},
            "value_dim=320 with readout='bf16': the GPU kernels take multiples of 64 up to",
        ),
        (_STOCHASTIC, "rounding='stochastic' with records of updates: the GPU kernels take it with records='raw' or a copy"),
        (_STOCHASTIC | {"delta_rule": False}, "key_dim=32 with rounding='stochastic': the GPU kernels take 64, 128 or 256"),
        ({"readout": "nvfp4", "dims": (256, 256)}, "a head of 256 x 256 needs "),
        ({"dims": (64, 256), "gate": "channel", "window": 32, "max_draft": 16}, "T=16 tokens with key_dim=256 need "),
    ],
)
def test_kernels_say_what_would_work(changes, reason):
    case = case_named("gdn", **({"dims": (8, 32)} | changes))
    state = rs.init_state(case.recurrence, case.policy, 2)
    refusal = replay_pallas.unsupported_shape(state, make_tokens(case, np.random.default_rng(0), 1, case.max_draft))
    assert refusal.startswith(reason)
    assert refusal.endswith("implementation='xla' takes any")


@pytest.mark.parametrize("max_draft", [1, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {"readout": "nvfp4"},
        {"readout": "bf16", "gate": "channel", "window": 32},
        {"readout": "fp8_e4m3", "dims": (256, 256), "checkpoint": "float16", "rounding": "stochastic"},
        {"records": "raw"},
        {"records": "raw", "delta_rule": False},
        {"delta_rule": False, "checkpoint": "bfloat16", "rounding": "stochastic"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_kernels_take_copies_raw_records_and_rounding_by_chance(changes, max_draft):
    case = case_named("gdn", **({"dims": (128, 128), "activations": "bfloat16", "max_draft": max_draft} | changes))
    state = rs.init_state(case.recurrence, case.policy, 2)
    tokens = make_tokens(case, np.random.default_rng(0), 1, max_draft)
    assert replay_pallas.unsupported_shape(state, tokens) is None
    assert replay_pallas.unsupported_shape(state) is None
