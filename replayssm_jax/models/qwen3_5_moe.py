"""Qwen3.5 mixture-of-experts text models: Qwen3.5's layers with a mixture of experts in every one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers import GatedDeltaNetConfig
from replayssm_jax.models import weights
from replayssm_jax.models.config import check_mixture, check_model_type, from_fields, section
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.models.layers import CenteredRMSNorm
from replayssm_jax.models.qwen3_5 import (
    Qwen3_5,
    block_sources,
    check_qwen_sizes,
    mixer_sources,
    outer_sources,
    qwen_block,
    qwen_keys,
    qwen_mixer,
)
from replayssm_jax.models.qwen3_next import qwen_moe, qwen_moe_sources
from replayssm_jax.models.weights import Checkpoint, Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig:
    """Sizes of a Qwen3.5 mixture-of-experts text model; names as in its ``config.json``.

    Raises:
        CheckpointError: sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3_5MoeConfig:
        """From a parsed ``config.json``; a multimodal one gives its text model.

        Raises:
            CheckpointError: another model type, a missing key, or a value that this model does not implement.
        """
        text = {**config, **section(config, "text_config")}
        check_model_type(text, ("qwen3_5_moe", "qwen3_5_moe_text"))
        return from_fields(cls, qwen_keys(text))

    def __post_init__(self) -> None:
        check_qwen_sizes(self)
        check_mixture(self, "num_experts", "num_experts_per_tok", "moe_intermediate_size")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def mixer(self) -> GatedDeltaNetConfig:
        return qwen_mixer(self)

    @property
    def norm_topk_prob(self) -> bool:
        """The weights of a token's experts always sum to 1 here."""
        return True


class Qwen3_5Moe(Decoder):
    """A Qwen3.5 mixture-of-experts text model. Arguments as ``Qwen3_5``."""

    def __init__(self, config: Qwen3_5MoeConfig, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        blocks = [qwen_block(config, kind, qwen_moe(config, **types), **types) for kind in config.layer_types]
        norm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        super().__init__(config, blocks, norm, **types)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Qwen3_5MoeConfig:
        return Qwen3_5MoeConfig.from_dict(config)

    @classmethod
    def published_name(cls, name: str, checkpoint: Checkpoint) -> str:
        return Qwen3_5.published_name(name, checkpoint)

    @classmethod
    def ignores(cls, name: str) -> bool:
        return Qwen3_5.ignores(name)

    @classmethod
    def published_sources(cls, config: Qwen3_5MoeConfig, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
        """Experts lie in two tensors a layer, or apart in checkpoints that were saved again; ``checkpoint`` tells."""
        apart = checkpoint is not None and not any(name.endswith(".mlp.experts.down_proj") for name in checkpoint.names)
        sources = outer_sources(config)
        for i, kind in enumerate(config.layer_types):
            here, there = f"layers.{i}", f"model.layers.{i}"
            sources |= block_sources(here, there) | mixer_sources(here, there, kind)
            sources |= qwen_moe_sources(f"{here}.mlp", f"{there}.mlp", config.num_experts)
            if not apart:
                sources |= stacked_sources(f"{here}.mlp.experts", f"{there}.mlp.experts")
        return sources


def stacked_sources(here: str, there: str) -> dict[str, Source]:
    """Experts in one tensor [E, out, in] each, the outputs of gate and up one after the other."""
    return {
        f"{here}.gate_proj": Source.of(f"{there}.gate_up_proj", layout=weights.first_half),
        f"{here}.up_proj": Source.of(f"{there}.gate_up_proj", layout=weights.second_half),
        f"{here}.down_proj": Source.of(f"{there}.down_proj", layout=weights.swapped),
    }
