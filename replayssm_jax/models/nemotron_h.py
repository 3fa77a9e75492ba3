"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, squared-ReLU MLPs and mixtures, one of them a layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers import Mamba2, Mamba2Config
from replayssm_jax.models import weights
from replayssm_jax.models.attention import PlainAttention
from replayssm_jax.models.config import (
    check_divisible,
    check_int,
    check_layer_types,
    check_list,
    check_mixture,
    check_model_type,
    check_supported,
    from_fields,
)
from replayssm_jax.models.decoder import Block, Decoder
from replayssm_jax.models.layers import RMSNorm, SquaredReluMLP
from replayssm_jax.models.mamba2 import mamba2_sources
from replayssm_jax.models.moe import SigmoidMoE, SigmoidRouting
from replayssm_jax.models.weights import Checkpoint, CheckpointError, Source

_KINDS = ("linear_attention", "full_attention", "mlp", "moe")
# the same kinds as older configs write them: names, and letters of a pattern
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_PUBLISHED = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_limit": "mamba_dt_limit",
    "use_conv_bias": "mamba_conv_bias",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig:
    """Sizes of a Nemotron-H or Nemotron 3 model; names as in its ``config.json``."""

    vocab_size: int
    hidden_size: int
    layers_block_type: tuple[str, ...]
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0
    conv_kernel: int = 4
    use_conv_bias: bool = True
    mamba_proj_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    n_routed_experts: int = 0
    n_shared_experts: int = 1
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        """From a parsed ``config.json``, the layers as a list or as a ``hybrid_override_pattern`` such as "M-M*-".

        Raises:
            CheckpointError: another model type, a missing key, or a value that this model does not implement.
        """
        check_model_type(config, ("nemotron_h",))
        check_supported(
            config, mlp_hidden_act="relu2", mamba_hidden_act="silu", use_bias=False, sliding_window=None, n_shared_experts=1
        )
        merged = {**{ours: config[theirs] for ours, theirs in _PUBLISHED.items() if theirs in config}, **config}
        kinds = config.get("layers_block_type") or config.get("layer_types")
        if kinds is None:
            pattern = config.get("hybrid_override_pattern")
            if pattern is None:
                raise CheckpointError("config.json lacks layers_block_type and hybrid_override_pattern")
            if not isinstance(pattern, str):
                raise CheckpointError(f"hybrid_override_pattern must be a string, got {pattern!r}")
            if unknown := sorted(set(pattern) - set(_PATTERN)):
                raise CheckpointError(f"hybrid_override_pattern holds {unknown}, only {sorted(_PATTERN)} are known")
            kinds = [_PATTERN[letter] for letter in pattern]
        check_list("layers_block_type", kinds, str)
        merged["layers_block_type"] = [_OLD_NAMES.get(kind, kind) for kind in kinds]
        return from_fields(cls, merged)

    def __post_init__(self) -> None:
        check_layer_types(self.layers_block_type, _KINDS)
        check_divisible("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)
        check_divisible("mamba_num_heads", self.mamba_num_heads, "n_groups", self.n_groups)
        if "mlp" in self.layers_block_type:
            check_int("intermediate_size", self.intermediate_size)
        if "moe" in self.layers_block_type:
            check_int("moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size)
            routing = ("n_group", "topk_group")
            check_mixture(self, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", *routing)

    @property
    def mixer(self) -> Mamba2Config:
        return Mamba2Config(
            hidden_size=self.hidden_size,
            num_heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            state_size=self.ssm_state_size,
            num_groups=self.n_groups,
            norm_groups=self.n_groups,
            conv_width=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            proj_bias=self.mamba_proj_bias,
            norm_eps=self.layer_norm_epsilon,
            time_step_limit=self.time_step_limit,
        )


class NemotronH(Decoder):
    """A Nemotron-H or Nemotron 3 model. Arguments as ``Qwen3_5``."""

    def __init__(self, config: NemotronHConfig, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.layer_norm_epsilon, dtype=dtype, param_dtype=param_dtype)

        blocks = [
            Block(norm(), _mixer(config, kind, types), float32_residual=config.residual_in_fp32)
            for kind in config.layers_block_type
        ]
        super().__init__(config, blocks, norm(), **types)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        return NemotronHConfig.from_dict(config)

    @classmethod
    def published_name(cls, name: str, checkpoint: Checkpoint) -> str:
        """Some publishers write ``model.`` for ``backbone.``."""
        plain = "model.embeddings.weight" in checkpoint.names
        return name.replace("backbone.", "model.", 1) if plain and name.startswith("backbone.") else name

    @classmethod
    def published_sources(cls, config: NemotronHConfig, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
        del checkpoint
        sources = {
            "embed_tokens": Source.of("backbone.embeddings.weight"),
            "norm.weight": Source.of("backbone.norm_f.weight"),
        }
        if not config.tie_word_embeddings:
            sources["lm_head.kernel"] = Source.of("lm_head.weight", layout=weights.linear)
        for i, kind in enumerate(config.layers_block_type):
            here, there = f"layers.{i}.mixer", f"backbone.layers.{i}.mixer"
            sources[f"layers.{i}.norm.weight"] = Source.of(f"backbone.layers.{i}.norm.weight")
            if kind == "linear_attention":
                sources |= mamba2_sources(here, there, config.mixer)
            elif kind == "full_attention":
                sources |= _linears(here, there, config.attention_bias, "q_proj", "k_proj", "v_proj", "o_proj")
            elif kind == "mlp":
                sources |= _linears(here, there, config.mlp_bias, "up_proj", "down_proj")
            else:
                sources |= _moe_sources(here, there, config)
        return sources


def _mixer(config: NemotronHConfig, kind: str, types: dict[str, Any]) -> Any:
    if kind == "linear_attention":
        return Mamba2(config.mixer, **types)
    if kind == "full_attention":
        return PlainAttention(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            **types,
        )
    if kind == "mlp":
        return SquaredReluMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, **types)
    shared = config.moe_shared_expert_intermediate_size
    return SigmoidMoE(
        config.hidden_size,
        num_experts=config.n_routed_experts,
        intermediate=config.moe_intermediate_size,
        gated=False,
        latent=config.moe_latent_size,
        routing=SigmoidRouting(
            experts_per_token=config.num_experts_per_tok,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            renormalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        ),
        shared_expert=SquaredReluMLP(config.hidden_size, shared, bias=config.mlp_bias, **types),
        bias=config.mlp_bias,
        **types,
    )


def _linears(here: str, there: str, bias: bool, *names: str) -> dict[str, Source]:
    sources = {f"{here}.{name}.kernel": Source.of(f"{there}.{name}.weight", layout=weights.linear) for name in names}
    if bias:
        sources |= {f"{here}.{name}.bias": Source.of(f"{there}.{name}.bias") for name in names}
    return sources


def _moe_sources(here: str, there: str, config: NemotronHConfig) -> dict[str, Source]:
    sources = _linears(f"{here}.shared_experts", f"{there}.shared_experts", config.mlp_bias, "up_proj", "down_proj")
    sources[f"{here}.gate.weight"] = Source.of(f"{there}.gate.weight", layout=weights.linear)
    sources[f"{here}.gate.correction"] = Source.of(f"{there}.gate.e_score_correction_bias")
    if config.moe_latent_size is not None:
        sources |= _linears(here, there, config.mlp_bias, "fc1_latent_proj", "fc2_latent_proj")
    for name in ("up_proj", "down_proj"):
        experts = (f"{there}.experts.{e}.{name}.weight" for e in range(config.n_routed_experts))
        sources[f"{here}.experts.{name}"] = Source.of(*experts, layout=weights.stacked_linear)
    return sources
