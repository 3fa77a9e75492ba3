"""What a model keeps for its sequences: one cache per layer under one pointer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from replayssm_jax.pointer import ReplayPointer, reset_pointer
from replayssm_jax.trees import register

Array = jax.Array


@register(("layers", "pointer"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCache:
    """All slots of a model. ``copy_slots`` forks or moves whole sequences, pointer included.

    Attributes:
        layers: one MixerCache, AttentionCache or None (a layer that keeps nothing) per layer.
        pointer: shared by all of them.
    """

    layers: tuple[Any, ...]
    pointer: ReplayPointer

    @property
    def num_slots(self) -> int:
        return self.pointer.num_slots

    def reset(self, slots: Array, request: Array | None = None) -> ModelCache:
        """Empties slots for new sequences.

        Args:
            slots: values outside [0, N) are padding. [B] int
            request: ids of the sequences, which key stochastic rounding; None for 0. [B] int
        """
        layers = tuple(None if layer is None else layer.reset(slots) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, pointer=reset_pointer(self.pointer, slots, request))
