"""What every model shares: one decode interface over layers that each keep their own cache, all under one pointer.

    cache         = model.init_cache(num_slots, max_length)
    cache, logits = model.prefill(cache, tokens, lengths, slots)     # prompts, logits [B, vocabulary]
    cache, logits = model.verify(cache, tokens, slots, lengths)      # T tokens per row; T = 1 is a decode step
    cache         = model.commit(cache, accepted, slots)             # keeps the first accepted of them

``commit`` accepts in the recurrent states, the convolutions and the attention caches at once: it moves two integers per slot.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import checkify
from jax.sharding import Mesh

from replayssm_jax import pointer as pointer_lib
from replayssm_jax.mixers import GatedDeltaNet, KimiDeltaAttention, Mamba2
from replayssm_jax.mixers.parts import linear, live_mask
from replayssm_jax.models import weights
from replayssm_jax.models.attention import ATTENTIONS
from replayssm_jax.models.attention_cache import AttentionCache
from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.placement import attach, check_tokens, decode_over_slots, parameter_sharding
from replayssm_jax.models.weights import Checkpoint, Source
from replayssm_jax.pointer import ReplayPointer, init_pointer
from replayssm_jax.sharding import Sharding
from replayssm_jax.slots import check_slots, gather_index
from replayssm_jax.state import ReplayPolicy

Array = jax.Array

_RECURRENT = (GatedDeltaNet, KimiDeltaAttention, Mamba2)


class Block(nnx.Module):
    """One decoder layer: x + mixer(norm(x)) and, where there is an MLP, then x + mlp(norm(x)).

    Args:
        norm: before the mixer.
        mixer: a recurrent mixer, an attention, or anything else that maps x to y token by token.
        mlp_norm, mlp: both or neither.
        float32_residual: whether the stream between the layers is float32 whatever the activations.
    """

    def __init__(self, norm: Any, mixer: Any, mlp_norm: Any = None, mlp: Any = None, *, float32_residual: bool = False):
        self.norm, self.mixer, self.mlp_norm, self.mlp = norm, mixer, mlp_norm, mlp
        self.float32_residual = float32_residual

    def init_cache(self, num_slots: int, max_length: int, policy: ReplayPolicy) -> Any:
        if isinstance(self.mixer, _RECURRENT):
            return self.mixer.init_cache(num_slots, policy)
        return self.mixer.init_cache(num_slots, max_length) if isinstance(self.mixer, ATTENTIONS) else None

    def __call__(
        self,
        cache: Any,
        x: Array,
        pointer: ReplayPointer,
        *,
        slots: Array | None,
        lengths: Array | None,
        prefill: bool,
        implementation: str | None,
    ) -> tuple[Any, Array]:
        if self.float32_residual:
            x = x.astype(jnp.float32)
        inputs = self.norm(x)
        if isinstance(self.mixer, _RECURRENT):
            options: dict[str, Any] = {"prefill": prefill, "implementation": implementation}
            cache, y = self.mixer(cache, inputs, pointer, slots=slots, lengths=lengths, **options)
        elif isinstance(self.mixer, ATTENTIONS):
            cache, y = self.mixer(cache, inputs, pointer, slots=slots, lengths=lengths)
        else:
            y = self.mixer(inputs)
        x = x + y
        return cache, x if self.mlp is None else x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """A decoder of some model type: embedding, blocks, norm, head. A model's file says how they are built and loaded.

    Args:
        config: of the model type; has vocab_size, hidden_size and tie_word_embeddings.
        blocks: the layers.
        norm: after the last of them.
        dtype: of activations, convolution histories, records and attention caches.
        param_dtype: of the weights.
        rngs: for initialisation.
    """

    def __init__(self, config: Any, blocks: list[Block], norm: Any, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.sharding: Sharding | None = None
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * 0.02)
        self.layers = nnx.List(blocks)
        self.norm = norm
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.lm_head = None if config.tie_word_embeddings else linear(config.hidden_size, config.vocab_size, **types)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Any:
        """This model's config from a parsed ``config.json``; CheckpointError where it does not fit."""
        raise NotImplementedError(f"{cls.__name__} must say how its config is read")

    @classmethod
    def published_sources(cls, config: Any, checkpoint: Checkpoint | None = None) -> dict[str, Source]:
        """For every parameter, by its dotted path, the published tensors it is made of; in this checkpoint, where they vary."""
        raise NotImplementedError(f"{cls.__name__} must say what its tensors are called")

    @classmethod
    def published_name(cls, name: str, checkpoint: Checkpoint) -> str:
        """What a checkpoint calls the tensor ``name`` of ``published_sources``, where publishers differ."""
        del checkpoint
        return name

    @classmethod
    def ignores(cls, name: str) -> bool:
        """Whether a published tensor belongs to something beside this model, by design."""
        return name.startswith("mtp.")

    @classmethod
    def from_pretrained(cls, folder: str | pathlib.Path, dtype: Any = jnp.float32, mesh: Mesh | Sharding | None = None) -> Self:
        """Loads a folder in published layout, tensor by tensor, with weights and activations in ``dtype``.

        Args:
            folder: with config.json and safetensors files.
            dtype: float32, bfloat16 or float16.
            mesh: devices to load onto, each its own shards: with axes "data" and "model", or a ``Sharding`` that names
                others. None is the default device alone.

        Raises:
            CheckpointError: the folder is no checkpoint of this model; the message names the file, tensor or config value.
            TypeError, ValueError: mesh is none, or has other axes.
        """
        sharding = None if mesh is None else Sharding.of(mesh)
        config = cls.read_config(weights.read_config(folder))
        checkpoint = Checkpoint(folder)
        make: Any = cls
        model = nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))
        sources = cls.published_sources(config, checkpoint)
        place = None if sharding is None else functools.partial(parameter_sharding, sharding)
        weights.load_into(model, sources, checkpoint, lambda name: cls.published_name(name, checkpoint), cls.ignores, place)
        if sharding is not None:
            attach(model, sharding)
        return model

    def init_cache(self, num_slots: int, max_length: int, policy: ReplayPolicy | None = None) -> ModelCache:
        """Fresh slots for ``num_slots`` sequences of up to ``max_length`` tokens, all layers under one pointer.

        Args:
            num_slots: N
            max_length: positions of the attention caches; the recurrent layers need none.
            policy: of the recurrent layers; None is the default one with records in the model's dtype.
        """
        policy = ReplayPolicy(record_dtype=self.dtype) if policy is None else policy

        def make() -> ModelCache:
            # layers draw from different seeds where they round stochastically
            seeds = ((policy.seed + i) % 2**32 for i in range(len(self.layers)))
            policies = (dataclasses.replace(policy, seed=seed) if policy.rounding == "stochastic" else policy for seed in seeds)
            layers = tuple(
                layer.init_cache(num_slots, max_length, own) for layer, own in zip(self.layers, policies, strict=True)
            )
            return ModelCache(layers=layers, pointer=init_pointer(num_slots, policy.window, policy.max_draft))

        return make() if self.sharding is None else self.sharding.make_pool(make)

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
            tokens: in [0, vocab_size); a sequence must end within the cache's max_length. Past either the result is
                undefined, and an error under ``checkify``. [B, T] int32, any T
            lengths: real tokens per row, None for all; a row of 0 is left alone. [B] int
            slots: slot of each row, None for row b in slot b; values outside [0, N) are padding. [B] int
            implementation: as in ``replayssm_jax.prefill``.

        Returns:
            The cache, and the logits after each row's last real token, zero for rows without. [B, vocab_size] float32
        """
        if self.sharding is not None:
            return decode_over_slots(
                self, "prefill", cache, check_tokens(tokens), slots, lengths, implementation=implementation
            )
        live = live_mask(check_tokens(tokens), cache.pointer, slots, lengths)
        cache, x = self.forward(cache, tokens, slots, lengths, prefill=True, implementation=implementation)
        counts = live.sum(axis=1, dtype=jnp.int32)
        x = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
        return cache, jnp.where(live[:, :1], self.logits(x)[:, 0], 0)

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
            tokens: the next token and drafts behind it, within the bounds that ``prefill`` names.
                [B, T] int32, T at most the policy's max_draft
            slots, lengths, implementation: as in ``replayssm_jax.verify``.

        Returns:
            The cache, to be ``commit``-ted, and the logits, zero past ``lengths``. [B, T, vocab_size] float32
        """
        if self.sharding is not None:
            return decode_over_slots(self, "verify", cache, check_tokens(tokens), slots, lengths, implementation=implementation)
        live = live_mask(check_tokens(tokens), cache.pointer, slots, lengths)
        cache, x = self.forward(cache, tokens, slots, lengths, implementation=implementation)
        return cache, jnp.where(live[..., None], self.logits(x), 0)

    def forward(
        self,
        cache: ModelCache,
        tokens: Array,
        slots: Array | None = None,
        lengths: Array | None = None,
        *,
        prefill: bool = False,
        implementation: str | None = None,
    ) -> tuple[ModelCache, Array]:
        """What ``prefill`` and ``verify`` do, but for the head: a drafting head wants the hidden states themselves.

        Args:
            cache, tokens, slots, lengths, implementation: as there.
            prefill: static; whether the tokens are a prompt, kept at once, or drafts.

        Returns:
            The cache, and the normed hidden state after each token, garbage past ``lengths``. [B, T, hidden_size] dtype
        """
        options: dict[str, Any] = {"prefill": prefill, "implementation": implementation}
        if self.sharding is not None:
            return decode_over_slots(self, "forward", cache, check_tokens(tokens), slots, lengths, **options)
        caches, x = self._run(cache, tokens, slots, lengths, **options)
        counts = live_mask(x, cache.pointer, slots, lengths).sum(axis=1, dtype=jnp.int32)
        move = pointer_lib.after_prefill if prefill else pointer_lib.after_verify
        return ModelCache(layers=caches, pointer=move(cache.pointer, slots, counts)), x

    def logits(self, x: Array) -> Array:
        """The head over hidden states [B, T, hidden_size]. [B, T, vocab_size] float32"""
        if self.lm_head is not None:
            return self.lm_head(x).astype(jnp.float32)
        embedding = self.embed_tokens[...].astype(self.dtype)
        return jnp.einsum("btd,vd->btv", x, embedding, precision=jax.lax.Precision.HIGHEST).astype(jnp.float32)

    def embed(self, tokens: Array) -> Array:
        """Embeddings of tokens [B, T]; ids outside the vocabulary give garbage. [B, T, hidden_size] dtype"""
        return self.embed_tokens[...].at[tokens].get(mode="clip").astype(self.dtype)

    def commit(self, cache: ModelCache, accepted: Array | int, slots: Array | None = None) -> ModelCache:
        """Keeps the first ``accepted`` tokens of each row's last ``verify``. See ``replayssm_jax.commit``."""
        commit = pointer_lib.commit if self.sharding is None else self.sharding.commit
        return dataclasses.replace(cache, pointer=commit(cache.pointer, accepted, slots))

    def __call__(self, tokens: Array) -> Array:
        """Logits of whole sequences, no cache kept: training and scoring. [B, T] int32 -> [B, T, vocab_size] float32"""
        num_rows, num_tokens = tokens.shape
        cache = self.init_cache(num_rows, num_tokens)
        _, x = self._run(cache, tokens, None, None, prefill=True, implementation=None)
        return self.logits(x)

    def _run(self, cache: ModelCache, tokens: Array, slots: Any, lengths: Any, **options: Any) -> tuple[tuple, Array]:
        tokens = check_tokens(tokens)
        self._debug_tokens(cache, tokens, slots, lengths)
        x = self.embed(tokens)
        caches = []
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            layer_cache, x = layer(layer_cache, x, cache.pointer, slots=slots, lengths=lengths, **options)
            caches.append(layer_cache)
        return tuple(caches), self.norm(x)

    def _debug_tokens(self, cache: ModelCache, tokens: Array, slots: Any, lengths: Any) -> None:
        """Run-time checks, live only under ``checkify``: real tokens are in the vocabulary and end within max_length."""
        live = live_mask(tokens, cache.pointer, slots, lengths)
        known = (tokens >= 0) & (tokens < self.config.vocab_size)
        checkify.debug_check(
            jnp.all(known | ~live),
            "tokens must be in [0, {size}), got {tokens}",
            size=jnp.int32(self.config.vocab_size),
            tokens=tokens,
        )
        longest = [layer.max_length for layer in cache.layers if isinstance(layer, AttentionCache)]
        if longest:
            rows = gather_index(check_slots(slots, cache.num_slots, tokens.shape[0]), cache.num_slots)
            end = cache.pointer.position[rows] + live.sum(axis=1)
            checkify.debug_check(
                jnp.all((end <= longest[0]) | ~live[:, 0]),
                "a sequence must end within max_length={most}, got {end}",
                most=jnp.int32(longest[0]),
                end=end,
            )
