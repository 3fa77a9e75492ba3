"""How a layer's state is kept: ring sizes, precisions, what ordinary reads use."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from pallas_kernels.hopper import takes_raw_records
from replayssm_jax.readout import FORMATS, PLANE
from replayssm_jax.trees import check_positive_int

if TYPE_CHECKING:
    from replayssm_jax.state import Recurrence

_FLOAT_DTYPES = ("float32", "bfloat16", "float16")
_READOUTS = ("checkpoint", *FORMATS)
_RECORDS = (None, "update", "raw")
_ROUNDINGS = ("nearest", "stochastic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayPolicy:
    """Static choices of how a layer's state is kept.

    Args:
        window: L, ring rows per slot. A slot's records are folded into its checkpoint before they could overflow it,
            every ``window - 2 * max_draft + 1`` to ``window - max_draft`` accepted tokens.
        max_draft: most tokens one ``verify`` may take per row; 1 is plain decoding. ``window >= 2 * max_draft``.
        checkpoint_dtype: float32, bfloat16 or float16. Rounded once per flush; float16 and bfloat16 saturate at their
            largest finite value instead of overflowing.
        record_dtype: dtype of recorded raw inputs (keys; values unless updates are recorded). Must hold the activations
            exactly: bfloat16 for bfloat16 activations. What is not a raw input is recorded in float32 whatever this says.
        readout: what ordinary reads use: the "checkpoint", or a copy of it in "bf16", "fp8_e4m3" or "nvfp4" (see
            ``readout``) that every fold refreshes, or with "bf16_plane" the upper halves of a float32 checkpoint's numbers,
            which are kept apart from the lower ones and cost no memory. Its rounding touches outputs and nothing else: the
            checkpoint is the same, bit for bit, as with ``readout="checkpoint", records="raw"``.
        records: what a ring keeps of a value with the delta rule. "update" is u, in float32, computed once; "raw" is v and
            beta as they came, from which each read and each fold derives u for itself, so that no u of a rounded read is
            ever folded. None chooses by the layer: "raw" for a copy, which needs it, and for drafts (max_draft above 1) of a
            delta rule with a channel gate in 16 bits (record_dtype), in a window of 16 or 32 that holds three times max_draft,
            if the GPU kernels take raw records of the recurrence's dims (K of 64, 128 or 256, V a multiple of 64 up to 256).
            A GPU then verifies faster but for rows that fold (README has the times, of 256 rows), and ``xla`` on a CPU takes
            several times as long. Else None is "update". ``records_updates`` says which it is. Without the delta rule records
            are raw inputs either way.
        rounding: of float16 and bfloat16 checkpoints, "nearest" or "stochastic": up or down at random, unbiased, by
            ``seed`` and the pointer's ``request`` (see ``rounding``).
        seed: of stochastic rounding, 0 to 2**32 - 1; give every layer its own.

    Raises:
        TypeError, ValueError: a field has the wrong type or value; the message names it.
    """

    window: int = 16
    max_draft: int = 1
    checkpoint_dtype: Any = "float32"
    record_dtype: Any = "float32"
    readout: str = "checkpoint"
    records: str | None = None
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive_int("window", self.window)
        check_positive_int("max_draft", self.max_draft)
        if self.window < 2 * self.max_draft:
            raise ValueError(f"window={self.window} must be at least 2 * max_draft={2 * self.max_draft}")
        for name in ("checkpoint_dtype", "record_dtype"):
            object.__setattr__(self, name, _check_dtype(name, getattr(self, name)))
        choices = {"readout": _READOUTS, "records": _RECORDS, "rounding": _ROUNDINGS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(self, name)!r}")
        if self.readout != "checkpoint" and self.records == "update":
            raise ValueError(
                f"records='update' would fold what a rounded read made: readout={self.readout!r} takes records='raw' or None"
            )
        if self.rounding == "stochastic" and self.checkpoint_dtype == jnp.float32:
            raise ValueError(
                "rounding='stochastic' rounds checkpoints of float16 or bfloat16, checkpoint_dtype=float32 is never rounded"
            )
        if self.readout == PLANE and self.checkpoint_dtype != jnp.float32:
            raise ValueError(
                f"readout={PLANE!r} is half of a float32 checkpoint, got checkpoint_dtype={self.checkpoint_dtype.name}; "
                f"readout='bf16' copies any"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an int from 0 to 2**32 - 1, got {self.seed!r}")

    @property
    def stored_dtype(self) -> Any:
        """Of a state's checkpoint array: ``checkpoint_dtype``, or uint16 for what a "bf16_plane" leaves of it."""
        return jnp.dtype("uint16") if self.readout == PLANE else self.checkpoint_dtype

    def records_updates(self, recurrence: Recurrence) -> bool:
        """Whether a ring keeps u, where there is a delta rule, instead of raw inputs."""
        if self.readout != "checkpoint":
            return False
        if self.records is not None:
            return self.records == "update"
        return not _drafts_like_raw_records(recurrence, self)


def _drafts_like_raw_records(r: Recurrence, policy: ReplayPolicy) -> bool:
    """Whether a GPU's rounds of drafts take less time with raw records: as measured for KDA, the other recurrences do not gain.

    Rows that fold take longer, so most rows of a round must not: a window of three times the drafts sees to that. What the
    kernels serve with updates alone keeps updates, and with them the kernels.
    """
    drafts = policy.max_draft > 1 and policy.window in (16, 32) and policy.window >= 3 * policy.max_draft
    in_16_bits = policy.record_dtype.itemsize == 2
    return drafts and in_16_bits and r.delta_rule and r.gate == "channel" and takes_raw_records(r.key_dim, r.value_dim)


def _check_dtype(name: str, value: Any) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name} must be one of {', '.join(_FLOAT_DTYPES)}, got {value!r}") from None
    if dtype.name not in _FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(_FLOAT_DTYPES)}, got {dtype.name}")
    return dtype
