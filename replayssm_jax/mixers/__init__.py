"""Flax mixers over the replay core: one file per family, with its equation, its config and its module."""

from replayssm_jax.mixers.cache import MixerCache
from replayssm_jax.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from replayssm_jax.mixers.kimi_delta import KimiDeltaAttention, KimiDeltaAttentionConfig
from replayssm_jax.mixers.mamba2 import Mamba2, Mamba2Config

__all__ = [
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "KimiDeltaAttention",
    "KimiDeltaAttentionConfig",
    "Mamba2",
    "Mamba2Config",
    "MixerCache",
]
