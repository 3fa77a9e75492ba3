"""The planner counts real geometries right and says what it assumes."""

import functools
import json

import pytest

from replayssm_jax import plan
from replayssm_jax.models import CheckpointError
from tests.narrow_models import CONFIGS

QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
}
KIMI_LINEAR = {"model_type": "kimi_linear", "vocab_size": 256, **CONFIGS["kimi_linear"]}
MAMBA2_2_7B = {
    "model_type": "mamba2",
    "vocab_size": 50288,
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "num_heads": 80,
    "head_dim": 64,
    "state_size": 128,
    "tie_word_embeddings": True,
}
# billions of weights, recurrent layers, bytes of one layer's float32 state
GEOMETRIES = [
    (QWEN3_NEXT_80B, 80, 36, 32 * 128 * 128 * 4),
    (NEMOTRON_H_8B, 8.1, 24, 128 * 64 * 128 * 4),
    (MAMBA2_2_7B, 2.7, 64, 80 * 64 * 128 * 4),
]


@functools.cache
def _planned(config: str, **options) -> plan.Plan:
    return plan.make_plan(json.loads(config), **options)


def make_plan(config: dict, **options) -> plan.Plan:
    """Planned once for all tests that ask the same: a model of 64 layers takes seconds to trace."""
    return _planned(json.dumps(config), **options)


@pytest.mark.parametrize(("config", "billions", "layers", "state"), GEOMETRIES, ids=["qwen3_next", "nemotron_h", "mamba2"])
def test_weights_and_states_of_real_geometries(config, billions, layers, state):
    planned = make_plan(config, window=16, drafts=0)
    assert planned.weights / 2e9 == pytest.approx(billions, rel=0.03)
    assert planned.recurrent_layers == layers
    assert planned.checkpoint == layers * state


def test_a_head_gate_ring_is_a_small_part_of_its_state():
    planned = make_plan(NEMOTRON_H_8B, window=16, drafts=0)
    # values and keys in bfloat16, weight and log decay in float32, of 16 rows
    assert planned.record == 24 * (128 * 64 * 2 + 8 * 128 * 2 + 128 * 8)
    assert planned.window * planned.record < 0.08 * planned.checkpoint


def test_replay_never_predicts_more_than_twice_a_plain_step():
    planned = make_plan(MAMBA2_2_7B, window=16, drafts=0)
    gain = planned.plain_state(1) / planned.replay_state(1, 1.0)
    assert 1.6 < gain < 2.0


def test_window_2_is_the_plain_recurrence_plus_its_record():
    planned = make_plan(MAMBA2_2_7B, window=2, drafts=0)
    assert planned.replay_state(1, 1.0) == planned.plain_state(1) + planned.record


def test_drafts_are_compared_with_snapshots():
    planned = make_plan(MAMBA2_2_7B, window=16, drafts=4)
    assert planned.plain_state(5) == 6 * planned.checkpoint
    assert planned.plain_state(5) / planned.replay_state(5, 3.0) > 3


def test_sparse_weights_are_read_by_the_tokens_that_chose_them():
    planned = make_plan(QWEN3_NEXT_80B, window=16, drafts=0)
    one = planned.weights_read(1)
    assert planned.weights - planned.experts < one < 0.1 * planned.weights
    assert one < planned.weights_read(32) < planned.weights_read(1024) <= planned.weights
    assert planned.experts_per_token == 10


def test_table_names_the_fit_and_the_source_of_the_bandwidth():
    planned = make_plan(MAMBA2_2_7B, window=16, drafts=0)
    text = plan.table(planned, plan.GPUS["h200"], 256, 32768, 1.0, plan.best_window(planned, 1.0))
    assert "sequences that fit on H200" in text
    assert "measured" in text
    too_large = make_plan(QWEN3_NEXT_80B, window=16, drafts=0)
    assert "0 (the weights alone do not fit)" in plan.table(too_large, plan.GPUS["h100"], 1, 1, 1.0, 16)


def test_a_config_file_or_a_folder_is_read_and_a_wrong_one_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MAMBA2_2_7B))
    assert plan.read(tmp_path) == plan.read(tmp_path / "config.json") == MAMBA2_2_7B
    with pytest.raises(CheckpointError, match=r"missing\.json"):
        plan.read(tmp_path / "missing.json")
    with pytest.raises(CheckpointError, match="model_type"):
        plan.make_plan({"model_type": "gpt2"}, window=16, drafts=0)
    with pytest.raises(ValueError, match="window"):
        plan.make_plan(MAMBA2_2_7B, window=8, drafts=4)


def test_a_window_by_hand_may_be_the_only_one_for_its_drafts():
    planned = make_plan(MAMBA2_2_7B, window=100, drafts=40)
    assert plan.best_window(planned, 10.0) == 100


@pytest.mark.parametrize(
    ("form", "bytes_per_value"), [("bf16", 2), ("fp8_e4m3", 1 + 4 / 128), ("nvfp4", 9 / 16 + 4 / (64 * 128))]
)
def test_read_out_copies_cost_their_bytes_and_are_read_in_place_of_the_state(form, bytes_per_value):
    """Codes and scales; a float32 state of 64 x 128 per head of Mamba-2."""
    plain, planned = (make_plan(MAMBA2_2_7B, window=16, drafts=0, readout=r) for r in ("checkpoint", form))
    assert plain.readout == 0
    assert planned.readout == planned.checkpoint / 4 * bytes_per_value
    assert planned.sequence(0) - plain.sequence(0) == planned.readout
    assert planned.record == plain.record  # without the delta rule records are raw inputs in any case
    ordinary, flush = planned.readout, 2 * (planned.checkpoint + planned.readout)
    records = planned.record * (7 + 1)
    assert planned.replay_state(1, 1.0) == pytest.approx((14 * ordinary + flush) / 15 + records)
    assert planned.replay_state(1, 1.0) < plain.replay_state(1, 1.0)
    assert "its read-out copy" in plan.table(planned, plan.GPUS["h200"], 256, 1, 1.0, 16)


def test_the_upper_half_of_a_state_is_read_in_its_place_and_costs_no_memory():
    plain, planned = (make_plan(MAMBA2_2_7B, window=16, drafts=0, readout=r) for r in ("checkpoint", "bf16_plane"))
    assert planned.sequence(9) == plain.sequence(9)
    assert planned.plain_state(1) == plain.plain_state(1)
    state, records = planned.checkpoint, planned.record * (7 + 1)
    assert planned.replay_state(1, 1.0) == pytest.approx(state / 2 + 2 * state / 15 + records)
    assert "copy" not in plan.table(planned, plan.GPUS["h200"], 256, 1, 1.0, 16)


def test_raw_records_of_a_delta_rule_are_counted():
    planned = make_plan(QWEN3_NEXT_80B, window=16, drafts=0, readout="nvfp4")
    # values and keys in bfloat16; beta, the key's factor and log decay in float32
    assert planned.record == 36 * (32 * 128 * 2 + 16 * 128 * 2 + 32 * 4 + 16 * 4 + 32 * 4)
    with pytest.raises(ValueError, match="readout must be one of"):
        plan.make_plan(MAMBA2_2_7B, window=16, drafts=0, readout="int4")


def test_records_are_counted_as_the_default_policy_keeps_them():
    """Kimi Delta Attention, 3 layers of 4 heads of 128: updates in float32 without drafts, inputs as they come with them."""
    inputs = 128 * 2 + 128 * 4  # a key in bfloat16 and its gate, one number a channel
    plain, drafted = (make_plan(KIMI_LINEAR, window=16, drafts=drafts) for drafts in (0, 4))
    assert plain.record == 3 * 4 * (inputs + 128 * 4)
    assert drafted.record == 3 * 4 * (inputs + 128 * 2 + 4 + 4)  # beta and the key's factor
    assert drafted.sequence(0) - drafted.conv == drafted.checkpoint + 16 * drafted.record
