"""Qwen3-Next: Qwen3.5's layers, with projections interleaved per key head and a mixture of experts in most layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from replayssm_jax.mixers import GatedDeltaNetConfig
from replayssm_jax.models import weights
from replayssm_jax.models.config import check_mixture, check_model_type, from_fields
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.models.layers import CenteredRMSNorm, GatedMLP
from replayssm_jax.models.moe import SoftmaxMoE
from replayssm_jax.models.qwen3_5 import (
    attention_sources,
    block_sources,
    check_qwen_sizes,
    gated_delta_net_sources,
    linears,
    outer_sources,
    qwen_block,
    qwen_keys,
    qwen_mixer,
)
from replayssm_jax.models.weights import Checkpoint, CheckpointError, Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig:
    """Sizes of a Qwen3-Next model; names as in its ``config.json``.

    Raises:
        CheckpointError: sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
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
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3NextConfig:
        """From a parsed ``config.json``.

        Raises:
            CheckpointError: another model type, a missing key, or a value that this model does not implement.
        """
        check_model_type(config, ("qwen3_next",))
        return from_fields(cls, qwen_keys(config))

    def __post_init__(self) -> None:
        check_qwen_sizes(self)
        if unknown := sorted(set(self.mlp_only_layers) - set(range(len(self.layer_types)))):
            raise CheckpointError(f"mlp_only_layers holds {', '.join(map(str, unknown))}, which no layer is called")
        if any(map(self.is_sparse, range(len(self.layer_types)))):
            check_mixture(self, "num_experts", "num_experts_per_tok", "moe_intermediate_size")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def mixer(self) -> GatedDeltaNetConfig:
        return qwen_mixer(self)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        on_step = (layer + 1) % self.decoder_sparse_step == 0
        return layer not in self.mlp_only_layers and self.num_experts > 0 and on_step


class Qwen3Next(Decoder):
    """A Qwen3-Next model. Arguments as ``Qwen3_5``."""

    def __init__(self, config: Qwen3NextConfig, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def mlp(layer: int) -> Any:
            dense = not config.is_sparse(layer)
            return GatedMLP(config.hidden_size, config.intermediate_size, **types) if dense else qwen_moe(config, **types)

        blocks = [qwen_block(config, kind, mlp(i), **types) for i, kind in enumerate(config.layer_types)]
        norm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        super().__init__(config, blocks, norm, **types)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Qwen3NextConfig:
        return Qwen3NextConfig.from_dict(config)

    @classmethod
    def published_sources(cls, config: Qwen3NextConfig, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
        del checkpoint
        sources = outer_sources(config)
        for i, kind in enumerate(config.layer_types):
            here, there = f"layers.{i}", f"model.layers.{i}"
            sources |= block_sources(here, there)
            if config.is_sparse(i):
                sources |= qwen_moe_sources(f"{here}.mlp", f"{there}.mlp", config.num_experts)
            else:
                sources |= linears(f"{here}.mlp", f"{there}.mlp", "gate_proj", "up_proj", "down_proj")
            if kind == "full_attention":
                sources |= attention_sources(f"{here}.mixer", f"{there}.self_attn")
            else:
                sources |= _interleaved_sources(f"{here}.mixer", f"{there}.linear_attn", config.mixer)
                sources |= linears(f"{here}.mixer", f"{there}.linear_attn", "out_proj")
                sources |= gated_delta_net_sources(f"{here}.mixer", f"{there}.linear_attn")
        return sources


def qwen_moe(config: Any, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> SoftmaxMoE:
    """The mixture of experts of a Qwen config."""
    types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    return SoftmaxMoE(
        config.hidden_size,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        intermediate=config.moe_intermediate_size,
        renormalise=config.norm_topk_prob,
        shared_expert=GatedMLP(config.hidden_size, config.shared_expert_intermediate_size, **types),
        **types,
    )


def qwen_moe_sources(here: str, there: str, num_experts: int) -> dict[str, Source]:
    """A mixture's router, shared expert, and experts as tensors of their own."""
    sources = linears(f"{here}.shared_expert", f"{there}.shared_expert", "gate_proj", "up_proj", "down_proj")
    sources |= linears(here, there, "shared_expert_gate")
    sources[f"{here}.gate.weight"] = Source.of(f"{there}.gate.weight", layout=weights.linear)
    for name in ("gate_proj", "up_proj", "down_proj"):
        experts = (f"{there}.experts.{e}.{name}.weight" for e in range(num_experts))
        sources[f"{here}.experts.{name}"] = Source.of(*experts, layout=weights.stacked_linear)
    return sources


def _interleaved_sources(here: str, there: str, mixer: GatedDeltaNetConfig) -> dict[str, Source]:
    """Projections whose rows are published per key head: [q | k | v of its heads | z of its heads] and [b | a of its heads]."""
    values = mixer.value_width // mixer.num_key_heads
    qkvz = (mixer.key_head_dim, mixer.key_head_dim, values, values)
    ratio = mixer.num_value_heads // mixer.num_key_heads

    def part(name: str, widths: tuple[int, ...], *wanted: int) -> Source:
        layout = functools.partial(_rows_per_head, heads=mixer.num_key_heads, widths=widths, wanted=wanted)
        return Source.of(f"{there}.{name}.weight", layout=layout)

    return {
        f"{here}.in_proj_qkv.kernel": part("in_proj_qkvz", qkvz, 0, 1, 2),
        f"{here}.in_proj_z.kernel": part("in_proj_qkvz", qkvz, 3),
        f"{here}.in_proj_b.kernel": part("in_proj_ba", (ratio, ratio), 0),
        f"{here}.in_proj_a.kernel": part("in_proj_ba", (ratio, ratio), 1),
    }


def _rows_per_head(tensor: np.ndarray, *, heads: int, widths: tuple[int, ...], wanted: tuple[int, ...]) -> np.ndarray:
    """[heads * sum(widths), in] -> the wanted parts one after the other, each with its heads in order; [in, out]"""
    parts = np.split(tensor.reshape(heads, sum(widths), -1), np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([parts[i].reshape(heads * widths[i], -1) for i in wanted]).T
