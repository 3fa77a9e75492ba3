"""What is compared: policies of the library, and two ways to keep a state that the library does not offer, for contrast.

**Shared copies** have one checkpoint, quantised, from which the recurrence goes on as well: what a fold rounds off is gone
for good. **bf16 updates** are records of u in bfloat16, folded as they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax import ReplayPolicy, flush
from replayssm_jax.mixers import MixerCache
from replayssm_jax.models.cache import ModelCache
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.pointer import after_flush
from replayssm_jax.readout import decode, encode

Change = Callable[[ModelCache], ModelCache]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to keep the states of a model.

    Args:
        name: in results and plots.
        policy: fields of ``ReplayPolicy`` beside window, drafts and the records' dtype. Without a read-out copy records are
            updates unless they say otherwise.
        change: what is done to the cache after every verify and its commit, None for nothing.
        delta_rule: whether it differs from the base only where there is a delta rule: other records are raw anyhow.
    """

    name: str
    policy: tuple[tuple[str, str], ...] = ()
    change: Change | None = None
    delta_rule: bool = False


def _change_mixers(cache: ModelCache, change: Callable[[MixerCache], MixerCache]) -> ModelCache:
    layers = tuple(change(layer) if isinstance(layer, MixerCache) else layer for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)


def shared(form: str) -> Change:
    """Folds all records, and puts the checkpoint through a read-out format: the recurrence goes on from what is left."""

    def change(cache: ModelCache) -> ModelCache:
        def fold(mixer: MixerCache) -> MixerCache:
            checkpoint = flush(mixer.state(cache.pointer)).checkpoint
            return dataclasses.replace(mixer, checkpoint=decode(form, encode(form, checkpoint), mixer.recurrence.key_dim))

        after = _change_mixers(cache, fold)
        folded = jnp.ones(cache.num_slots, bool)
        return dataclasses.replace(after, pointer=after_flush(cache.pointer, folded))

    return change


def round_updates(cache: ModelCache) -> ModelCache:
    """Rounds recorded updates to bfloat16."""

    def change(mixer: MixerCache) -> MixerCache:
        rounded = jax.lax.reduce_precision(mixer.buffer.update, exponent_bits=8, mantissa_bits=7)
        return dataclasses.replace(mixer, buffer=dataclasses.replace(mixer.buffer, update=rounded))

    return _change_mixers(cache, change)


_FP16 = ("checkpoint_dtype", "float16")
_STOCHASTIC = ("rounding", "stochastic")

BASE = Variant("fp32")
VARIANTS = (
    # the headline's come first: a run that is stopped has them
    Variant("shared nvfp4", change=shared("nvfp4")),
    Variant("nvfp4 read-out", (("readout", "nvfp4"),)),
    Variant("fp16 stochastic", (_FP16, _STOCHASTIC)),
    Variant("shared fp8", change=shared("fp8_e4m3")),
    Variant("fp8 read-out", (("readout", "fp8_e4m3"),)),
    Variant("nvfp4 read-out, fp16 stochastic", (("readout", "nvfp4"), _FP16, _STOCHASTIC)),
    Variant("bf16 read-out", (("readout", "bf16"),)),
    Variant("bf16 nearest", (("checkpoint_dtype", "bfloat16"),)),
    Variant("fp16 nearest", (_FP16,)),
    Variant("bf16 updates", change=round_updates, delta_rule=True),
    # how far arithmetic alone goes: the floor of the others
    Variant("fp32, raw records", (("records", "raw"),), delta_rule=True),
)


def init_cache(model: Decoder, variant: Variant, sequences: int, drafts: int) -> ModelCache:
    """Fresh slots; every sequence rounds by its number, so of texts that are read in one batch each by other numbers."""
    fields: dict[str, Any] = dict(variant.policy)
    if "readout" not in fields:
        fields.setdefault("records", "update")
    policy = ReplayPolicy(window=2 * drafts, max_draft=drafts, record_dtype=model.dtype, **fields)
    cache = model.init_cache(sequences, 1, policy)
    pointer = dataclasses.replace(cache.pointer, request=jnp.arange(sequences, dtype=jnp.int32))
    return dataclasses.replace(cache, pointer=pointer)
