"""Hybrid decoders from published checkpoints, all with the decode interface of ``Decoder``."""

import pathlib
from typing import Any

from jax.sharding import Mesh

from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.config import check_model_type
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.models.kimi_linear import KimiLinear, KimiLinearConfig
from replayssm_jax.models.mamba2 import Mamba2LM, Mamba2LMConfig
from replayssm_jax.models.nemotron_h import NemotronH, NemotronHConfig
from replayssm_jax.models.placement import shard
from replayssm_jax.models.qwen3_5 import Qwen3_5, Qwen3_5Config
from replayssm_jax.models.qwen3_5_moe import Qwen3_5Moe, Qwen3_5MoeConfig
from replayssm_jax.models.qwen3_next import Qwen3Next, Qwen3NextConfig
from replayssm_jax.models.weights import CheckpointError, read_config
from replayssm_jax.sharding import Sharding

MODELS: dict[str, type[Decoder]] = {
    "qwen3_5": Qwen3_5,
    "qwen3_5_text": Qwen3_5,
    "qwen3_5_moe": Qwen3_5Moe,
    "qwen3_5_moe_text": Qwen3_5Moe,
    "qwen3_next": Qwen3Next,
    "kimi_linear": KimiLinear,
    "mamba2": Mamba2LM,
    "nemotron_h": NemotronH,
}


def from_pretrained(folder: str | pathlib.Path, dtype: Any = "float32", mesh: Mesh | Sharding | None = None) -> Decoder:
    """The model of a checkpoint folder, by the ``model_type`` in its ``config.json``. Arguments as ``Decoder.from_pretrained``.

    Raises:
        CheckpointError: no model of that type, or the folder does not fit it; the message says what and where.
    """
    config = read_config(folder)
    check_model_type(config, MODELS)
    return MODELS[config["model_type"]].from_pretrained(folder, dtype, mesh)


__all__ = [
    "MODELS",
    "CheckpointError",
    "Decoder",
    "KimiLinear",
    "KimiLinearConfig",
    "Mamba2LM",
    "Mamba2LMConfig",
    "ModelCache",
    "NemotronH",
    "NemotronHConfig",
    "Qwen3Next",
    "Qwen3NextConfig",
    "Qwen3_5",
    "Qwen3_5Config",
    "Qwen3_5Moe",
    "Qwen3_5MoeConfig",
    "from_pretrained",
    "shard",
]
