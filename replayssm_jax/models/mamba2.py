"""Mamba-2 language models: blocks of one Mamba-2 mixer each, nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers import Mamba2, Mamba2Config
from replayssm_jax.models import weights
from replayssm_jax.models.config import check_model_type, check_supported, from_fields
from replayssm_jax.models.decoder import Block, Decoder
from replayssm_jax.models.layers import RMSNorm
from replayssm_jax.models.weights import Checkpoint, CheckpointError, Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2LMConfig:
    """Sizes of a Mamba-2 language model; names as in its ``config.json``."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 1
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Mamba2LMConfig:
        """From a parsed ``config.json``.

        Raises:
            CheckpointError: another model type, a missing key, or a value that this model does not implement.
        """
        check_model_type(config, ("mamba2",))
        check_supported(config, hidden_act="silu", rms_norm=True)
        return from_fields(cls, config)

    def __post_init__(self) -> None:
        if self.num_heads % self.n_groups:
            raise CheckpointError(f"num_heads={self.num_heads} must be divisible by n_groups={self.n_groups}")

    @property
    def mixer(self) -> Mamba2Config:
        return Mamba2Config(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
            num_groups=self.n_groups,
            norm_groups=1,
            conv_width=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            proj_bias=self.use_bias,
            norm_eps=self.layer_norm_epsilon,
            time_step_limit=self.time_step_limit,
        )


class Mamba2LM(Decoder):
    """A Mamba-2 language model. Arguments as ``Qwen3_5``."""

    def __init__(self, config: Mamba2LMConfig, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.layer_norm_epsilon, dtype=dtype, param_dtype=param_dtype)

        blocks = [
            Block(norm(), Mamba2(config.mixer, **types), float32_residual=config.residual_in_fp32)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, blocks, norm(), **types)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Mamba2LMConfig:
        return Mamba2LMConfig.from_dict(config)

    @classmethod
    def published_name(cls, name: str, checkpoint: Checkpoint) -> str:
        """The first checkpoints called the embedding in the singular."""
        singular = "backbone.embedding.weight"
        return singular if name == "backbone.embeddings.weight" and singular in checkpoint.names else name

    @classmethod
    def published_sources(cls, config: Mamba2LMConfig, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
        del checkpoint
        sources = {
            "embed_tokens": Source.of("backbone.embeddings.weight"),
            "norm.weight": Source.of("backbone.norm_f.weight"),
        }
        if not config.tie_word_embeddings:
            sources["lm_head.kernel"] = Source.of("lm_head.weight", layout=weights.linear)
        for i in range(config.num_hidden_layers):
            sources[f"layers.{i}.norm.weight"] = Source.of(f"backbone.layers.{i}.norm.weight")
            sources |= mamba2_sources(f"layers.{i}.mixer", f"backbone.layers.{i}.mixer", config.mixer)
        return sources


def mamba2_sources(here: str, there: str, mixer: Mamba2Config) -> dict[str, Source]:
    """The parameters of a Mamba-2 mixer."""
    sources = {f"{here}.{name}": Source.of(f"{there}.{name}") for name in ("A_log", "D", "dt_bias")}
    sources[f"{here}.norm"] = Source.of(f"{there}.norm.weight")
    sources[f"{here}.conv1d.weight"] = Source.of(f"{there}.conv1d.weight", layout=weights.depthwise)
    if mixer.conv_bias:
        sources[f"{here}.conv1d.bias"] = Source.of(f"{there}.conv1d.bias")
    for name in ("in_proj", "out_proj"):
        sources[f"{here}.{name}.kernel"] = Source.of(f"{there}.{name}.weight", layout=weights.linear)
        if mixer.proj_bias:
            sources[f"{here}.{name}.bias"] = Source.of(f"{there}.{name}.bias")
    return sources
