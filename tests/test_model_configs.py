"""Configs of every model type: a value that would be misread is a named error, and no other error escapes."""

import contextlib
import functools
import math
from typing import Any

import pytest

from replayssm_jax.models import MODELS, CheckpointError
from tests.golden_data import read_json

FAMILIES = {"qwen3_next": "qwen3_next", "kimi_linear": "kimi_linear", "mamba2": "mamba2", "nemotron_h": "nemotron_h"}


@functools.cache
def published(family: str) -> dict[str, Any]:
    if family == "qwen3_5_moe":  # Qwen3-Next's sizes under the newer names
        return read_json("qwen3_next", "config") | {"model_type": "qwen3_5_moe_text"}
    return read_json(family, "config")


def config(family: str, **changes: Any) -> dict[str, Any]:
    """The golden's config with some keys changed; a value of ``...`` removes the key."""
    decoded = {"time_step_limit": [0.0, math.inf]} if "time_step_limit" in published(family) else {}
    return {key: value for key, value in (published(family) | decoded | changes).items() if value is not ...}


def linear(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": published("kimi_linear")["linear_attn_config"] | changes}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Qwen3-Next and the mixtures of Qwen3.5
    *((family, changes, message) for family in ("qwen3_next", "qwen3_5_moe") for changes, message in [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"num_experts": ...}, "lacks num_experts"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": "4"}, "num_experts must be an integer"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most num_experts=4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer of at least 1, got 0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be an integer of at least 1"),
        ({"layer_types": ["linear_attention", "mamba"], "num_hidden_layers": 2}, "layer_types holds mamba"),
        ({"layer_types": "linear_attention", "num_hidden_layers": ...}, "layer_types"),
        ({"layer_types": 4, "num_hidden_layers": ...}, "layer_types"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads=4 must be divisible by linear_num_key_heads=3"),
    ]),
    ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1, got 0"),
    ("qwen3_next", {"mlp_only_layers": [4]}, "mlp_only_layers holds 4"),
    ("qwen3_next", {"mlp_only_layers": 2}, "mlp_only_layers"),
    # Kimi-Linear
    ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' is not supported"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
    ("kimi_linear", {"linear_attn_config": ...}, "lacks linear_attn_config"),
    ("kimi_linear", {"linear_attn_config": [1, 2]}, "linear_attn_config must be an object"),
    ("kimi_linear", {"num_hidden_layers": "4"}, "num_hidden_layers must be an integer"),
    ("kimi_linear", {"num_hidden_layers": 5}, "must name every layer from 1 once"),
    ("kimi_linear", linear(kda_layers=[0, 1, 2]), "must name every layer from 1 once"),
    ("kimi_linear", linear(kda_layers=[1, 2, 3, 4]), "must name every layer from 1 once"),
    ("kimi_linear", linear(kda_layers=3), "kda_layers"),
    ("kimi_linear", linear(full_attn_layers=["4"]), "must name every layer|full_attn_layers"),
    ("kimi_linear", linear(num_heads=None), "linear_attn_config lacks num_heads"),
    ("kimi_linear", linear(head_dim=0), "head_dim must be an integer of at least 1, got 0"),
    ("kimi_linear", {"num_experts_per_token": 5}, "num_experts_per_token=5 must be at most num_experts=4"),
    ("kimi_linear", {"num_expert_group": 3}, "num_experts=4 must be divisible by num_expert_group=3"),
    ("kimi_linear", {"num_expert_group": 2, "topk_group": 3}, "topk_group=3 must be at most num_expert_group=2"),
    ("kimi_linear", {"moe_layer_freq": 0}, "moe_layer_freq must be an integer of at least 1, got 0"),
    ("kimi_linear", {"moe_intermediate_size": ...}, "moe_intermediate_size"),
    ("kimi_linear", {"kv_lora_rank": ...}, "lacks kv_lora_rank"),
    # Mamba-2
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("mamba2", {"rms_norm": False}, "rms_norm=False is not supported"),
    ("mamba2", {"n_groups": 3}, "num_heads=8 must be divisible by n_groups=3"),
    ("mamba2", {"n_groups": 0}, "n_groups must be an integer of at least 1, got 0"),
    ("mamba2", {"state_size": 16.5}, "state_size must be an integer"),
    ("mamba2", {"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
    ("mamba2", {"conv_kernel": 0}, "conv_kernel must be an integer of at least 1, got 0"),
    ("mamba2", {"time_step_limit": [0.1, 0.0]}, "time_step_limit must be"),
    ("mamba2", {"time_step_limit": 0.1}, "time_step_limit must be"),
    ("mamba2", {"vocab_size": ...}, "lacks vocab_size"),
    # Nemotron-H
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported, only 'relu2'"),
    ("nemotron_h", {"use_bias": True}, "use_bias=True is not supported"),
    ("nemotron_h", {"sliding_window": 128}, "sliding_window=128 is not supported"),
    ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts=2 is not supported"),
    ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "holds conv"),
    ("nemotron_h", {"layers_block_type": ...}, "lacks layers_block_type and hybrid_override_pattern"),
    ("nemotron_h", {"layers_block_type": ..., "hybrid_override_pattern": "MX*"}, "hybrid_override_pattern holds"),
    ("nemotron_h", {"layers_block_type": ..., "hybrid_override_pattern": 3}, "hybrid_override_pattern"),
    ("nemotron_h", {"layers_block_type": 3}, "layers_block_type"),
    ("nemotron_h", {"n_groups": 3}, "mamba_num_heads=8 must be divisible by n_groups=3"),
    ("nemotron_h", {"num_key_value_heads": 3}, "num_attention_heads=4 must be divisible by num_key_value_heads=3"),
    ("nemotron_h", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most n_routed_experts=4"),
    ("nemotron_h", {"n_routed_experts": 0}, "n_routed_experts"),
    ("nemotron_h", {"n_group": 3}, "n_routed_experts=4 must be divisible by n_group=3"),
    ("nemotron_h", {"moe_intermediate_size": ...}, "moe_intermediate_size"),
    ("nemotron_h", {"intermediate_size": ...}, "intermediate_size"),
    ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size"),
    ("nemotron_h", {"ssm_state_size": "32"}, "ssm_state_size must be an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(family, changes, message):
    with pytest.raises(CheckpointError, match=message):
        MODELS[config(family)["model_type"]].read_config(config(family, **changes))


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_moe"])
def test_another_model_type_is_named(family):
    model = MODELS[config(family)["model_type"]]
    assert model.read_config(config(family)).vocab_size == 128
    for other in ("llama", None, 3):
        with pytest.raises(CheckpointError, match=rf"model_type must be one of .*{family}.*, got {other!r}"):
            model.read_config(config(family, model_type=other))


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_moe"])
def test_no_key_with_a_wrong_type_raises_anything_else(family):
    """Every key, replaced by values of other types: read, or refused by name."""
    model = MODELS[config(family)["model_type"]]
    for key in published(family):
        for value in ("x", -1, 0, 2.5, [], {}, [0], {"a": 1}, True, [[]]):
            with contextlib.suppress(CheckpointError):
                model.read_config(config(family, **{key: value}))
