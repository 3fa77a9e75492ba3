"""What a mixer keeps per slot: its convolution's history, a checkpoint and a ring. The pointer belongs to the model."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from replayssm_jax.per_device import over_heads
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.prefill import prefill as prefill_state
from replayssm_jax.readout import Readout
from replayssm_jax.replay import verify
from replayssm_jax.sharding import Sharding
from replayssm_jax.slots import check_slots, scatter_index
from replayssm_jax.state import Recurrence, ReplayBuffer, ReplayPolicy, ReplayState, Tokens, init_state, zero_slots
from replayssm_jax.trees import register

Array = jax.Array


@register(("conv", "checkpoint", "buffer", "readout"), ("recurrence", "policy"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerCache:
    """One mixer's pool of slots. ``copy_slots`` works on it as on any pytree whose arrays have slots first.

    Attributes:
        conv: raw inputs of the short convolution; the token at position p lies in row p % R, R = max_draft + width - 1, so a
            rejected draft is overwritten by the next one and nothing is shifted. [N, R, C] activation dtype
        checkpoint: see ReplayState. [N, H, V, K]
        buffer, readout: see ReplayState.
        recurrence: static
        policy: static
    """

    conv: Array
    checkpoint: Array
    buffer: ReplayBuffer
    recurrence: Recurrence
    policy: ReplayPolicy
    readout: Readout | None = None

    @property
    def num_slots(self) -> int:
        return self.checkpoint.shape[0]

    def state(self, pointer: ReplayPointer) -> ReplayState:
        """The recurrent part under a pointer, for ``materialize``, ``flush`` and the like."""
        return ReplayState(
            checkpoint=self.checkpoint,
            buffer=self.buffer,
            pointer=pointer,
            recurrence=self.recurrence,
            policy=self.policy,
            readout=self.readout,
        )

    def reset(self, slots: Array) -> MixerCache:
        """Empties slots for new sequences; ``reset_pointer`` does the pointer's part. Padding in ``slots`` does nothing."""
        rows = scatter_index(check_slots(slots, self.num_slots), self.num_slots)
        checkpoint, readout = zero_slots((self.checkpoint, self.readout), rows)
        return dataclasses.replace(self, checkpoint=checkpoint, readout=readout)


def init_mixer_cache(
    recurrence: Recurrence, policy: ReplayPolicy | None, num_slots: int, conv_width: int, conv_channels: int, dtype: jnp.dtype
) -> MixerCache:
    """A cache of ``num_slots`` fresh slots; a policy of None is the default one with records in ``dtype``."""
    policy = ReplayPolicy(record_dtype=dtype) if policy is None else policy
    state = init_state(recurrence, policy, num_slots)
    return MixerCache(
        conv=jnp.zeros((num_slots, policy.max_draft + conv_width - 1, conv_channels), dtype),
        checkpoint=state.checkpoint,
        buffer=state.buffer,
        recurrence=recurrence,
        policy=policy,
        readout=state.readout,
    )


def check_cache(cache: MixerCache, recurrence: Recurrence, conv_width: int, conv_channels: int, dtype: jnp.dtype) -> None:
    """Raises unless ``cache`` is one that this mixer's ``init_cache`` makes."""
    if not isinstance(cache, MixerCache):
        raise TypeError(f"cache must be a MixerCache, got {type(cache).__name__}")
    if cache.recurrence != recurrence:
        raise ValueError(f"cache belongs to another mixer: its recurrence is {cache.recurrence}, this mixer's is {recurrence}")
    shape = (cache.num_slots, cache.policy.max_draft + conv_width - 1, conv_channels)
    if cache.conv.shape != shape or cache.conv.dtype != dtype:
        raise ValueError(
            f"cache belongs to another mixer: cache.conv must be {dtype.name} of shape {shape}, "
            f"got {cache.conv.dtype.name} of shape {cache.conv.shape}"
        )


def advance(
    cache: MixerCache,
    conv: Array,
    tokens: Tokens,
    pointer: ReplayPointer,
    slots: Array | None,
    lengths: Array | None,
    prefill: bool,
    implementation: str | None,
    sharding: Sharding | None,
) -> tuple[MixerCache, Array]:
    """Runs a mixer's tokens through ``prefill`` or ``verify`` and stores the new ``conv``. Returns outputs [B, T, H, V]."""
    run = functools.partial(prefill_state if prefill else verify, implementation=implementation)
    state, out = over_heads(sharding, run, cache.state(pointer), tokens, slots, lengths)
    cache = dataclasses.replace(cache, conv=conv, checkpoint=state.checkpoint, buffer=state.buffer, readout=state.readout)
    return cache, out
