"""The multi-token-prediction head of Qwen3.5 and Qwen3-Next checkpoints: one attention layer that looks one token ahead.

    x_i = fc [norm(embed(t_{i+1})), norm(h_i)],   m_i = norm(block(x)_i),   logits of t_{i+2} = head(m_i)

with h_i the model's normed hidden state after token i, and the model's own embedding and head. Tensors are called ``mtp.*``.
"""

from __future__ import annotations

import pathlib
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.mixers.parts import linear
from replayssm_jax.models import weights
from replayssm_jax.models.attention_cache import AttentionCache
from replayssm_jax.models.config import check_supported, section
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.models.layers import CenteredRMSNorm, GatedMLP
from replayssm_jax.models.qwen3_5 import Qwen3_5Config, attention_sources, block_sources, linears, qwen_block
from replayssm_jax.models.qwen3_5_moe import Qwen3_5MoeConfig, stacked_sources
from replayssm_jax.models.qwen3_next import Qwen3NextConfig, qwen_moe, qwen_moe_sources
from replayssm_jax.models.weights import Checkpoint, CheckpointError, Source
from replayssm_jax.pointer import ReplayPointer

Array = jax.Array
Config = Qwen3_5Config | Qwen3_5MoeConfig | Qwen3NextConfig

_CONFIGS: dict[str, Any] = {
    "qwen3_5": Qwen3_5Config,
    "qwen3_5_text": Qwen3_5Config,
    "qwen3_5_moe": Qwen3_5MoeConfig,
    "qwen3_5_moe_text": Qwen3_5MoeConfig,
    "qwen3_next": Qwen3NextConfig,
}


class Qwen3_5MTP(nnx.Module):
    """The head beside a model.

    Args:
        config: of the model.
        dtype: of activations and its attention cache.
        param_dtype: of the weights, None for ``dtype``.
        rngs: for initialisation.
    """

    def __init__(self, config: Config, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config, self.dtype = config, jnp.dtype(dtype)

        def norm() -> CenteredRMSNorm:
            return CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)

        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
        self.fc = linear(2 * config.hidden_size, config.hidden_size, **types)
        if isinstance(config, Qwen3_5Config):
            mlp: Any = GatedMLP(config.hidden_size, config.intermediate_size, **types)
        else:
            mlp = qwen_moe(config, **types)
        self.block = qwen_block(config, "full_attention", mlp, **types)

    @classmethod
    def from_pretrained(cls, folder: str | pathlib.Path, dtype: Any = jnp.float32) -> Self:
        """The head in a folder in published layout.

        Raises:
            CheckpointError: the folder has none, or one that is not implemented; the message names what is wrong.
        """
        published = weights.read_config(folder)
        kind = published.get("model_type")
        if kind not in _CONFIGS:
            raise CheckpointError(f"model_type={kind!r} has no multi-token-prediction head here, only {', '.join(_CONFIGS)}")
        text = {**published, **section(published, "text_config")}
        check_supported(text, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
        checkpoint = Checkpoint(folder)
        if not any(name.startswith("mtp.") for name in checkpoint.names):
            raise CheckpointError(f"{folder} holds no multi-token-prediction head: none of its tensors is called mtp.*")
        config, make = _CONFIGS[kind].from_dict(published), cls
        head = nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))
        weights.load_into(head, published_sources(config, checkpoint), checkpoint, ignored=lambda x: not x.startswith("mtp."))
        return head

    def init_cache(self, num_slots: int, max_length: int) -> AttentionCache:
        return self.block.mixer.init_cache(num_slots, max_length)

    def __call__(
        self,
        model: Decoder,
        cache: AttentionCache,
        hidden: Array,
        following: Array,
        pointer: ReplayPointer,
        slots: Array | None,
        lengths: Array,
    ) -> tuple[AttentionCache, Array]:
        """Reads hidden states and the tokens behind them.

        Args:
            model: whose embedding serves.
            cache: of this head.
            hidden: of the model, or the head's own beyond the model's last. [B, T, hidden_size]
            following: the token behind each. [B, T] int32
            pointer: how many it has read of each slot.
            slots, lengths: as in ``Decoder.verify``.

        Returns:
            The cache, and hidden states for ``model.logits``, garbage past ``lengths``. [B, T, hidden_size] dtype
        """
        hidden = hidden.astype(self.dtype)
        inputs = [self.pre_fc_norm_embedding(model.embed(following).astype(self.dtype)), self.pre_fc_norm_hidden(hidden)]
        options: dict[str, Any] = {"slots": slots, "lengths": lengths, "prefill": False, "implementation": None}
        cache, x = self.block(cache, self.fc(jnp.concatenate(inputs, axis=-1)), pointer, **options)
        return cache, self.norm(x)


def published_sources(config: Config, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
    """For every parameter of the head, by its path, the published tensors it is made of."""
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    sources = {f"{name}.weight": Source.of(f"mtp.{name}.weight") for name in norms} | linears("", "mtp", "fc")
    sources = {name.removeprefix("."): source for name, source in sources.items()}
    there = "mtp.layers.0"
    sources |= block_sources("block", there) | attention_sources("block.mixer", f"{there}.self_attn")
    if isinstance(config, Qwen3_5Config):
        return sources | linears("block.mlp", f"{there}.mlp", "gate_proj", "up_proj", "down_proj")
    sources |= qwen_moe_sources("block.mlp", f"{there}.mlp", config.num_experts)
    if checkpoint is None or f"{there}.mlp.experts.down_proj" in checkpoint.names:
        sources |= stacked_sources("block.mlp.experts", f"{there}.mlp.experts")
    return sources
