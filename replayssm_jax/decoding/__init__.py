"""From prompts to text: generation, speculative decoding by pointer, continuous batching."""

from replayssm_jax.decoding.drafters import Drafter, MultiTokenPrediction, PromptLookup, SmallModel
from replayssm_jax.decoding.engine import Engine
from replayssm_jax.decoding.engine_config import EngineConfig, TooLongError
from replayssm_jax.decoding.generating import generate, stream
from replayssm_jax.decoding.requests import Completion, Delta, Request, RequestError, State
from replayssm_jax.decoding.sampling import SamplingParams
from replayssm_jax.decoding.saving import restore, save

__all__ = [
    "Completion",
    "Delta",
    "Drafter",
    "Engine",
    "EngineConfig",
    "MultiTokenPrediction",
    "PromptLookup",
    "Request",
    "RequestError",
    "SamplingParams",
    "SmallModel",
    "State",
    "TooLongError",
    "generate",
    "restore",
    "save",
    "stream",
]
