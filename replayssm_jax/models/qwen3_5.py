"""Qwen3.5, dense text models: Gated DeltaNet layers with a gated full-attention layer every fourth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers import GatedDeltaNet, GatedDeltaNetConfig
from replayssm_jax.models import weights
from replayssm_jax.models.attention import GatedAttention
from replayssm_jax.models.config import (
    check_divisible,
    check_layer_types,
    check_list,
    check_model_type,
    check_supported,
    from_fields,
    section,
)
from replayssm_jax.models.decoder import Block, Decoder
from replayssm_jax.models.layers import CenteredRMSNorm, GatedMLP
from replayssm_jax.models.weights import Checkpoint, CheckpointError, Source

_KINDS = ("linear_attention", "full_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config:
    """Sizes of a dense Qwen3.5 text model; names as in its ``config.json``.

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
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3_5Config:
        """From a parsed ``config.json``; a multimodal one gives its text model.

        Raises:
            CheckpointError: another model type, a missing key, or a value that this model does not implement.
        """
        text = {**config, **section(config, "text_config")}
        check_model_type(text, ("qwen3_5", "qwen3_5_text"))
        return from_fields(cls, qwen_keys(text))

    def __post_init__(self) -> None:
        check_qwen_sizes(self)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def mixer(self) -> GatedDeltaNetConfig:
        return qwen_mixer(self)


def qwen_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that Qwen3-Next and Qwen3.5 write in several ways, in one: rotary parameters and layer types.

    Raises:
        CheckpointError: a value that is not implemented, or no way to tell the layers.
    """
    rope = section(text, "rope_parameters")
    check_supported(text, hidden_act="silu", attention_bias=False, rope_scaling=None)
    check_supported(rope, rope_type="default")
    merged = {**text}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            merged[key] = rope[key]
    count = merged.get("num_hidden_layers")
    if merged.get("layer_types") is None:
        interval = merged.get("full_attention_interval", 4)
        if count is None:
            raise CheckpointError("config.json lacks layer_types and num_hidden_layers")
        if not all(isinstance(value, int) and value > 0 for value in (count, interval)):
            raise CheckpointError(f"num_hidden_layers={count!r} and full_attention_interval={interval!r} must be positive")
        merged["layer_types"] = [_KINDS[(i + 1) % interval == 0] for i in range(count)]
    check_list("layer_types", merged["layer_types"], str)
    check_layer_types(merged["layer_types"], _KINDS)
    if count is not None and count != len(merged["layer_types"]):
        raise CheckpointError(f"num_hidden_layers={count!r}, but layer_types names {len(merged['layer_types'])} layers")
    return merged


def check_qwen_sizes(config: Any) -> None:
    """Raises CheckpointError where the sizes of a Qwen config do not fit together."""
    check_layer_types(config.layer_types, _KINDS)
    check_divisible("num_attention_heads", config.num_attention_heads, "num_key_value_heads", config.num_key_value_heads)
    check_divisible(
        "linear_num_value_heads", config.linear_num_value_heads, "linear_num_key_heads", config.linear_num_key_heads
    )
    if config.rotary_dim % 2:
        raise CheckpointError(f"head_dim * partial_rotary_factor must be even, got {config.rotary_dim}")


def qwen_mixer(config: Any) -> GatedDeltaNetConfig:
    """The recurrent mixer of a Qwen config."""
    return GatedDeltaNetConfig(
        hidden_size=config.hidden_size,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
    )


def qwen_block(config: Any, kind: str, mlp: Any, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> Block:
    """A Qwen layer of ``kind`` around an MLP."""
    types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    mixer: Any
    if kind == "linear_attention":
        mixer = GatedDeltaNet(config.mixer, **types)
    else:
        mixer = GatedAttention(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            rope_theta=config.rope_theta,
            eps=config.rms_norm_eps,
            **types,
        )
    norm, mlp_norm = (CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype) for _ in range(2))
    return Block(norm, mixer, mlp_norm, mlp)


class Qwen3_5(Decoder):
    """A dense Qwen3.5 text model.

    Args:
        config: sizes.
        dtype: of activations, convolution histories, records and attention caches.
        param_dtype: of the weights, None for ``dtype``.
        rngs: for initialisation.
    """

    def __init__(self, config: Qwen3_5Config, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        blocks = [
            qwen_block(config, kind, GatedMLP(config.hidden_size, config.intermediate_size, **types), **types)
            for kind in config.layer_types
        ]
        norm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        super().__init__(config, blocks, norm, **types)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Qwen3_5Config:
        return Qwen3_5Config.from_dict(config)

    @classmethod
    def published_name(cls, name: str, checkpoint: Checkpoint) -> str:
        """Multimodal checkpoints keep the text model under ``model.language_model``."""
        multimodal = any(published.startswith("model.language_model.") for published in checkpoint.names)
        return name.replace("model.", "model.language_model.", 1) if multimodal and name.startswith("model.") else name

    @classmethod
    def ignores(cls, name: str) -> bool:
        """The vision tower and the multi-token-prediction head stand beside the text model."""
        return name.startswith(("model.visual.", "visual.", "mtp."))

    @classmethod
    def published_sources(cls, config: Qwen3_5Config, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
        del checkpoint
        return published_sources(config)


def published_sources(config: Qwen3_5Config) -> dict[str, Source]:
    """For every parameter of ``Qwen3_5``, by its path, the published tensors it is made of."""
    sources = outer_sources(config)
    for i, kind in enumerate(config.layer_types):
        here, there = f"layers.{i}", f"model.layers.{i}"
        sources |= block_sources(here, there) | mixer_sources(here, there, kind)
        sources |= linears(f"{here}.mlp", f"{there}.mlp", "gate_proj", "up_proj", "down_proj")
    return sources


def mixer_sources(here: str, there: str, kind: str) -> dict[str, Source]:
    """The mixer of a Qwen3.5 block."""
    if kind == "full_attention":
        return attention_sources(f"{here}.mixer", f"{there}.self_attn")
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    sources = linears(f"{here}.mixer", f"{there}.linear_attn", *names)
    return sources | gated_delta_net_sources(f"{here}.mixer", f"{there}.linear_attn")


def outer_sources(config: Any) -> dict[str, Source]:
    """Embedding, last norm and head, as most publishers call them."""
    sources = {"embed_tokens": Source.of("model.embed_tokens.weight"), "norm.weight": Source.of("model.norm.weight")}
    if not config.tie_word_embeddings:
        sources["lm_head.kernel"] = Source.of("lm_head.weight", layout=weights.linear)
    return sources


def block_sources(here: str, there: str) -> dict[str, Source]:
    """The two norms of a block."""
    return {
        f"{here}.norm.weight": Source.of(f"{there}.input_layernorm.weight"),
        f"{here}.mlp_norm.weight": Source.of(f"{there}.post_attention_layernorm.weight"),
    }


def linears(here: str, there: str, *names: str) -> dict[str, Source]:
    """Bias-free projections that are called the same on both sides."""
    return {f"{here}.{name}.kernel": Source.of(f"{there}.{name}.weight", layout=weights.linear) for name in names}


def attention_sources(here: str, there: str) -> dict[str, Source]:
    norms = {f"{here}.{name}.weight": Source.of(f"{there}.{name}.weight") for name in ("q_norm", "k_norm")}
    return linears(here, there, "q_proj", "k_proj", "v_proj", "o_proj") | norms


def gated_delta_net_sources(here: str, there: str) -> dict[str, Source]:
    """A mixer's parameters beside its projections."""
    sources = {f"{here}.{name}": Source.of(f"{there}.{name}") for name in ("A_log", "dt_bias")}
    sources[f"{here}.norm"] = Source.of(f"{there}.norm.weight")
    sources[f"{here}.conv1d.weight"] = Source.of(f"{there}.conv1d.weight", layout=weights.depthwise)
    return sources
