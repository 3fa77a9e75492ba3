"""Qwen3.5, dense text models: Gated DeltaNet layers with a gated full-attention layer every fourth, from published checkpoints.

One pointer serves every layer: ``commit`` accepts drafts in the recurrent states, the convolutions and the attention caches
at once, and moves nothing but two integers per slot.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax import pointer as pointer_lib
from replayssm_jax.mixers import GatedDeltaNet, GatedDeltaNetConfig
from replayssm_jax.mixers.parts import linear, live_mask
from replayssm_jax.models import weights
from replayssm_jax.models.attention import GatedAttention
from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.layers import CenteredRMSNorm, GatedMLP
from replayssm_jax.models.weights import Checkpoint, CheckpointError, Source
from replayssm_jax.pointer import init_pointer
from replayssm_jax.state import ReplayPolicy

Array = jax.Array

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config:
    """Sizes of a dense Qwen3.5 text model; names as in its ``config.json``."""

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
        text = {**config, **config.get("text_config", {})}
        if text.get("model_type") not in MODEL_TYPES:
            raise CheckpointError(f"model_type must be one of {', '.join(MODEL_TYPES)}, got {text.get('model_type')!r}")
        rope = {**text.get("rope_parameters", {})}
        for key, got, expected in (
            ("hidden_act", text.get("hidden_act", "silu"), "silu"),
            ("attention_bias", text.get("attention_bias", False), False),
            ("rope_type", rope.get("rope_type", "default"), "default"),
        ):
            if got != expected:
                raise CheckpointError(f"{key}={got!r} is not supported, only {expected!r}")
        text = {**text, "layer_types": _layer_types(text)}
        text["rope_theta"] = rope.get("rope_theta", text.get("rope_theta", cls.rope_theta))
        text["partial_rotary_factor"] = rope.get(
            "partial_rotary_factor", text.get("partial_rotary_factor", cls.partial_rotary_factor)
        )
        fields = {f.name: f.default for f in dataclasses.fields(cls)}
        if missing := [name for name, default in fields.items() if default is dataclasses.MISSING and name not in text]:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}")
        return cls(**{name: text[name] for name in fields if name in text})

    def __post_init__(self) -> None:
        if unknown := set(self.layer_types) - {"linear_attention", "full_attention"}:
            raise CheckpointError(
                f"layer_types holds {sorted(unknown)}, only linear_attention and full_attention are supported"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads={self.num_attention_heads} must be divisible by "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.rotary_dim % 2:
            raise CheckpointError(f"head_dim * partial_rotary_factor must be even, got {self.rotary_dim}")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def mixer(self) -> GatedDeltaNetConfig:
        return GatedDeltaNetConfig(
            hidden_size=self.hidden_size,
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_head_dim=self.linear_key_head_dim,
            value_head_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
            norm_eps=self.rms_norm_eps,
        )


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    if "layer_types" in config:
        return tuple(config["layer_types"])
    if "num_hidden_layers" not in config:
        raise CheckpointError("config.json lacks layer_types and num_hidden_layers")
    interval = config.get("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return tuple(kinds[(i + 1) % interval == 0] for i in range(config["num_hidden_layers"]))


class Block(nnx.Module):
    """One decoder layer: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Qwen3_5Config, kind: str, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.recurrent = kind == "linear_attention"
        self.input_layernorm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.post_attention_layernorm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, **types)
        self.mixer: Any
        if self.recurrent:
            self.mixer = GatedDeltaNet(config.mixer, **types)
        else:
            self.mixer = GatedAttention(
                config.hidden_size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rotary_dim=config.rotary_dim,
                rope_theta=config.rope_theta,
                eps=config.rms_norm_eps,
                **types,
            )

    def __call__(self, cache: Any, x: Array, pointer: pointer_lib.ReplayPointer, **options: Any) -> tuple[Any, Array]:
        if not self.recurrent:
            options = {name: options[name] for name in ("slots", "lengths")}
        cache, y = self.mixer(cache, self.input_layernorm(x), pointer, **options)
        x = x + y
        return cache, x + self.mlp(self.post_attention_layernorm(x))


class Qwen3_5(nnx.Module):
    """A dense Qwen3.5 text model.

    Args:
        config: sizes.
        dtype: of activations, convolution histories, records and attention caches.
        param_dtype: of the weights.
        rngs: for initialisation.
    """

    def __init__(self, config: Qwen3_5Config, *, dtype: Any = jnp.float32, param_dtype: Any = None, rngs: nnx.Rngs):
        self.config, self.dtype = config, jnp.dtype(dtype)
        param_dtype = dtype if param_dtype is None else param_dtype
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.embed_tokens = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype) * 0.02
        )
        self.layers = nnx.List(Block(config, kind, **types) for kind in config.layer_types)
        self.norm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.lm_head = None if config.tie_word_embeddings else linear(config.hidden_size, config.vocab_size, **types)

    @classmethod
    def from_pretrained(cls, folder: str | pathlib.Path, dtype: Any = jnp.float32) -> Qwen3_5:
        """Loads a folder in published layout, tensor by tensor, with weights and activations in ``dtype``.

        Raises:
            CheckpointError: the folder is no checkpoint of this model; the message names the file, tensor or config value.
        """
        config = Qwen3_5Config.from_dict(weights.read_config(folder))
        checkpoint = Checkpoint(folder)
        model = nnx.eval_shape(lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0)))
        multimodal = any(name.startswith("model.language_model.") for name in checkpoint.names)

        def rename(name: str) -> str:
            return name.replace("model.", "model.language_model.", 1) if multimodal and name.startswith("model.") else name

        weights.load_into(model, published_sources(config), checkpoint, rename, _not_text)
        return model

    def init_cache(self, num_slots: int, max_length: int, policy: ReplayPolicy | None = None) -> ModelCache:
        """Fresh slots for ``num_slots`` sequences of up to ``max_length`` tokens, all layers under one pointer.

        Args:
            num_slots: N
            max_length: positions of the attention caches; the recurrent layers need none.
            policy: of the recurrent layers; None is the default one with records in the model's dtype.
        """
        policy = ReplayPolicy(record_dtype=self.dtype) if policy is None else policy
        layers = tuple(
            layer.mixer.init_cache(num_slots, policy) if layer.recurrent else layer.mixer.init_cache(num_slots, max_length)
            for layer in self.layers
        )
        return ModelCache(layers=layers, pointer=init_pointer(num_slots, policy.window, policy.max_draft))

    def prefill(
        self,
        cache: ModelCache,
        tokens: Array,
        lengths: Array | None = None,
        slots: Array | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[ModelCache, Array]:
        """Consumes prompts, or their next pieces, from the slots' present states. ``reset`` a reused slot first.

        Args:
            cache: all slots.
            tokens: [B, T] int32, any T
            lengths: real tokens per row, None for all; a row of 0 is left alone. [B] int
            slots: slot of each row, None for row b in slot b; values outside [0, N) are padding. [B] int
            implementation: as in ``replayssm_jax.prefill``.

        Returns:
            The cache, and the logits after each row's last real token, zero for rows without. [B, vocab_size] float32
        """
        caches, x = self._layers(cache, tokens, slots, lengths, prefill=True, implementation=implementation)
        live = live_mask(x, cache.pointer, slots, lengths)
        last = jnp.maximum(live.sum(axis=1) - 1, 0)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        logits = jnp.where(live[:, :1], self._logits(x)[:, 0], 0)
        counts = live.sum(axis=1, dtype=jnp.int32)
        return ModelCache(layers=caches, pointer=pointer_lib.after_prefill(cache.pointer, slots, counts)), logits

    def verify(
        self,
        cache: ModelCache,
        tokens: Array,
        slots: Array | None = None,
        lengths: Array | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[ModelCache, Array]:
        """Logits after each of T tokens per row, none of them committed yet; T = 1 is a plain decode step.

        Args:
            cache: all slots.
            tokens: the next token and drafts behind it. [B, T] int32, T at most the policy's max_draft
            slots, lengths, implementation: as in ``replayssm_jax.verify``.

        Returns:
            The cache, to be ``commit``-ted, and the logits, zero past ``lengths``. [B, T, vocab_size] float32
        """
        caches, x = self._layers(cache, tokens, slots, lengths, prefill=False, implementation=implementation)
        live = live_mask(x, cache.pointer, slots, lengths)
        logits = jnp.where(live[..., None], self._logits(x), 0)
        pointer = pointer_lib.after_verify(cache.pointer, slots, live.sum(axis=1, dtype=jnp.int32))
        return ModelCache(layers=caches, pointer=pointer), logits

    def commit(self, cache: ModelCache, accepted: Array | int, slots: Array | None = None) -> ModelCache:
        """Keeps the first ``accepted`` tokens of each row's last ``verify``. See ``replayssm_jax.commit``."""
        return dataclasses.replace(cache, pointer=pointer_lib.commit(cache.pointer, accepted, slots))

    def __call__(self, tokens: Array) -> Array:
        """Logits of whole sequences, no cache kept: training and scoring. [B, T] int32 -> [B, T, vocab_size] float32"""
        num_rows, num_tokens = tokens.shape
        cache = self.init_cache(num_rows, num_tokens)
        _, x = self._layers(cache, tokens, None, None, prefill=True, implementation=None)
        return self._logits(x)

    def _layers(self, cache: ModelCache, tokens: Array, slots: Any, lengths: Any, **options: Any) -> tuple[tuple, Array]:
        if jnp.ndim(tokens) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} of shape {tokens.shape}")
        x = self.embed_tokens[...].at[tokens].get(mode="clip").astype(self.dtype)
        caches = []
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            layer_cache, x = layer(layer_cache, x, cache.pointer, slots=slots, lengths=lengths, **options)
            caches.append(layer_cache)
        return tuple(caches), self.norm(x)

    def _logits(self, x: Array) -> Array:
        if self.lm_head is not None:
            return self.lm_head(x).astype(jnp.float32)
        embedding = self.embed_tokens[...].astype(self.dtype)
        return jnp.einsum("btd,vd->btv", x, embedding, precision=jax.lax.Precision.HIGHEST).astype(jnp.float32)


def _not_text(name: str) -> bool:
    """Published tensors beside the text model: the vision tower and the multi-token-prediction head."""
    return name.startswith(("model.visual.", "visual.", "mtp."))


def published_sources(config: Qwen3_5Config) -> dict[str, Source]:
    """For every parameter of ``Qwen3_5``, by its path, the published tensors it is made of."""
    of, rows = Source.of, weights.linear
    sources = {"embed_tokens": of("model.embed_tokens.weight"), "norm.weight": of("model.norm.weight")}
    if not config.tie_word_embeddings:
        sources["lm_head.kernel"] = of("lm_head.weight", layout=rows)
    for i, kind in enumerate(config.layer_types):
        here, there = f"layers.{i}", f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            sources[f"{here}.{norm}.weight"] = of(f"{there}.{norm}.weight")
        for name in ("gate_proj", "up_proj", "down_proj"):
            sources[f"{here}.mlp.{name}.kernel"] = of(f"{there}.mlp.{name}.weight", layout=rows)
        if kind == "linear_attention":
            sources |= _mixer_sources(f"{here}.mixer", f"{there}.linear_attn")
            continue
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            sources[f"{here}.mixer.{name}.kernel"] = of(f"{there}.self_attn.{name}.weight", layout=rows)
        for name in ("q_norm", "k_norm"):
            sources[f"{here}.mixer.{name}.weight"] = of(f"{there}.self_attn.{name}.weight")
    return sources


def _mixer_sources(here: str, there: str) -> dict[str, Source]:
    of = Source.of
    sources = {f"{here}.{name}": of(f"{there}.{name}") for name in ("A_log", "dt_bias")}
    sources[f"{here}.norm"] = of(f"{there}.norm.weight")
    sources[f"{here}.conv1d.weight"] = of(f"{there}.conv1d.weight", layout=weights.depthwise)
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
        sources[f"{here}.{name}.kernel"] = of(f"{there}.{name}.weight", layout=weights.linear)
    return sources
