"""Hybrid decoders from published checkpoints."""

from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.qwen3_5 import Qwen3_5, Qwen3_5Config
from replayssm_jax.models.weights import CheckpointError

__all__ = ["CheckpointError", "ModelCache", "Qwen3_5", "Qwen3_5Config"]
