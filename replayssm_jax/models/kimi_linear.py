"""Kimi-Linear: Kimi Delta Attention layers, latent attention without positions every fourth, mixtures of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers import KimiDeltaAttention, KimiDeltaAttentionConfig
from replayssm_jax.models import weights
from replayssm_jax.models.attention import LatentAttention
from replayssm_jax.models.config import (
    check_int,
    check_list,
    check_mixture,
    check_model_type,
    check_supported,
    from_fields,
    require,
    section,
)
from replayssm_jax.models.decoder import Block, Decoder
from replayssm_jax.models.layers import GatedMLP, RMSNorm
from replayssm_jax.models.moe import SigmoidMoE, SigmoidRouting
from replayssm_jax.models.qwen3_5 import block_sources, linears, outer_sources
from replayssm_jax.models.weights import Checkpoint, CheckpointError, Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig:
    """Sizes of a Kimi-Linear model; names as in its ``config.json``, layers counted from 0."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    attention_layers: tuple[int, ...]
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int
    num_attention_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int | None = None
    attention_bias: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 1
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> KimiLinearConfig:
        """From a parsed ``config.json``. The layers' kinds come from its lists, which count from 1, and from nowhere else.

        Raises:
            CheckpointError: another model type, a missing key, or a value that this model does not implement.
        """
        check_model_type(config, ("kimi_linear",))
        check_supported(config, hidden_act="silu", moe_router_activation_func="sigmoid", mla_use_nope=True)
        linear = section(config, "linear_attn_config")  # says which layers are recurrent
        require(config, "config.json", "num_hidden_layers", "linear_attn_config")
        names = ("kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size")
        require(linear, "linear_attn_config", *names)
        check_int("num_hidden_layers", config["num_hidden_layers"])
        for name in ("kda_layers", "full_attn_layers"):
            check_list(f"linear_attn_config: {name}", linear[name], int)
        layers = range(1, config["num_hidden_layers"] + 1)
        if sorted([*linear["kda_layers"], *linear["full_attn_layers"]]) != list(layers):
            raise CheckpointError("linear_attn_config: kda_layers and full_attn_layers must name every layer from 1 once")
        return from_fields(
            cls,
            {
                **config,
                "attention_layers": [layer - 1 for layer in linear["full_attn_layers"]],
                "linear_num_heads": linear["num_heads"],
                "linear_head_dim": linear["head_dim"],
                "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
            },
        )

    def __post_init__(self) -> None:
        if any(map(self.is_sparse, range(self.num_hidden_layers))):
            routing = ("num_expert_group", "topk_group")
            check_mixture(self, "num_experts", "num_experts_per_token", "moe_intermediate_size", *routing)

    @property
    def mixer(self) -> KimiDeltaAttentionConfig:
        return KimiDeltaAttentionConfig(
            hidden_size=self.hidden_size,
            num_heads=self.linear_num_heads,
            head_dim=self.linear_head_dim,
            conv_width=self.linear_conv_kernel_dim,
            norm_eps=self.rms_norm_eps,
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


class KimiLinear(Decoder):
    """A Kimi-Linear model. Arguments as ``Qwen3_5``."""

    def __init__(self, config: KimiLinearConfig, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, param_dtype=param_dtype)

        blocks = [
            Block(norm(), _mixer(config, i, types), norm(), _mlp(config, i, types)) for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, blocks, norm(), **types)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> KimiLinearConfig:
        return KimiLinearConfig.from_dict(config)

    @classmethod
    def published_sources(cls, config: KimiLinearConfig, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
        del checkpoint
        sources = outer_sources(config)
        for i in range(config.num_hidden_layers):
            here, there = f"layers.{i}", f"model.layers.{i}"
            sources |= block_sources(here, there)
            if config.is_sparse(i):
                sources |= _moe_sources(f"{here}.mlp", f"{there}.block_sparse_moe", config)
            else:
                sources |= linears(f"{here}.mlp", f"{there}.mlp", "gate_proj", "up_proj", "down_proj")
            if i in config.attention_layers:
                sources |= _latent_sources(f"{here}.mixer", f"{there}.self_attn", config)
            else:
                sources |= _mixer_sources(f"{here}.mixer", f"{there}.self_attn")
        return sources


def _mixer(config: KimiLinearConfig, layer: int, types: dict[str, Any]) -> Any:
    if layer not in config.attention_layers:
        return KimiDeltaAttention(config.mixer, **types)
    return LatentAttention(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.qk_nope_head_dim,
        shared_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        kv_rank=config.kv_lora_rank,
        q_rank=config.q_lora_rank,
        bias=config.attention_bias,
        **types,
    )


def _mlp(config: KimiLinearConfig, layer: int, types: dict[str, Any]) -> Any:
    if not config.is_sparse(layer):
        return GatedMLP(config.hidden_size, config.intermediate_size, **types)
    shared = config.moe_intermediate_size * config.num_shared_experts
    return SigmoidMoE(
        config.hidden_size,
        num_experts=config.num_experts,
        intermediate=config.moe_intermediate_size,
        gated=True,
        latent=None,
        routing=SigmoidRouting(
            experts_per_token=config.num_experts_per_token,
            num_groups=config.num_expert_group,
            top_groups=config.topk_group,
            renormalise=config.moe_renormalize,
            scale=config.routed_scaling_factor,
        ),
        shared_expert=GatedMLP(config.hidden_size, shared, **types) if shared else None,
        **types,
    )


def _moe_sources(here: str, there: str, config: KimiLinearConfig) -> dict[str, Source]:
    sources = {
        f"{here}.gate.weight": Source.of(f"{there}.gate.weight", layout=weights.linear),
        f"{here}.gate.correction": Source.of(f"{there}.gate.e_score_correction_bias"),
    }
    if config.num_shared_experts:
        sources |= linears(f"{here}.shared_experts", f"{there}.shared_experts", "gate_proj", "up_proj", "down_proj")
    for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        experts = (f"{there}.experts.{e}.{theirs}.weight" for e in range(config.num_experts))
        sources[f"{here}.experts.{ours}"] = Source.of(*experts, layout=weights.stacked_linear)
    return sources


def _latent_sources(here: str, there: str, config: KimiLinearConfig) -> dict[str, Source]:
    names = ["q_proj"] if config.q_lora_rank is None else ["q_a_proj", "q_b_proj"]
    sources = linears(here, there, *names, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    norms = ["kv_a_layernorm"] if config.q_lora_rank is None else ["kv_a_layernorm", "q_a_layernorm"]
    sources |= {f"{here}.{name}.weight": Source.of(f"{there}.{name}.weight") for name in norms}
    if config.attention_bias:
        biased = ["kv_a_proj_with_mqa", "o_proj"] + (["q_a_proj"] if config.q_lora_rank is not None else [])
        sources |= {f"{here}.{name}.bias": Source.of(f"{there}.{name}.bias") for name in biased}
    return sources


def _mixer_sources(here: str, there: str) -> dict[str, Source]:
    names = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj")
    sources = linears(here, there, *names)
    sources[f"{here}.A_log"] = Source.of(f"{there}.A_log", layout=weights.flat)
    sources[f"{here}.dt_bias"] = Source.of(f"{there}.dt_bias")
    sources[f"{here}.o_norm"] = Source.of(f"{there}.o_norm.weight")
    convs = (f"{there}.{name}_conv1d.weight" for name in "qkv")
    sources[f"{here}.conv1d.weight"] = Source.of(*convs, layout=weights.depthwise)
    return sources
