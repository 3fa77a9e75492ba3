"""Trace-time checks of public arguments. Every message names the argument, what was got and what was expected."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from replayssm_jax.slots import check_counts, check_slots, debug_distinct, in_range
from replayssm_jax.state import ReplayState, Tokens, init_buffer, init_readout

Array = jax.Array

IMPLEMENTATIONS = ("reference", "xla", "pallas")
_ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")


def check_state(state: ReplayState) -> None:
    """Raises unless ``state`` is a ReplayState whose arrays agree with its recurrence and policy."""
    if not isinstance(state, ReplayState):
        raise TypeError(f"state must be a ReplayState, got {type(state).__name__}")
    recurrence, policy = state.recurrence, state.policy
    if state.checkpoint.ndim != 4:
        raise ValueError(f"state.checkpoint must be [N, H, V, K], got shape {state.checkpoint.shape}")
    slots = state.checkpoint.shape[0]
    _check_array("state.checkpoint", state.checkpoint, (slots, *recurrence.state_dims), (policy.stored_dtype.name,))
    pointer = state.pointer
    for name in ("length", "origin", "request"):
        _check_array(f"state.pointer.{name}", getattr(pointer, name), (slots,), ("int32",))
    if (pointer.window, pointer.max_draft) != (policy.window, policy.max_draft):
        raise ValueError(
            f"state.pointer has window={pointer.window}, max_draft={pointer.max_draft}, but state.policy has "
            f"window={policy.window}, max_draft={policy.max_draft}: build both from one policy"
        )
    buffer, readout = jax.eval_shape(lambda: (init_buffer(recurrence, policy, slots), init_readout(recurrence, policy, slots)))
    _check_fields("state.buffer", state.buffer, buffer)
    if (state.readout is None) != (readout is None):
        expected = "None" if readout is None else "a Readout"
        raise ValueError(f"state.readout must be {expected} for readout={policy.readout!r}, got {type(state.readout).__name__}")
    _check_fields("state.readout", state.readout, readout)


def check_tokens(state: ReplayState, tokens: Tokens) -> tuple[int, int]:
    """Raises unless ``tokens`` fit the state; returns (B, T)."""
    if not isinstance(tokens, Tokens):
        raise TypeError(f"tokens must be Tokens, got {type(tokens).__name__}")
    r = state.recurrence
    if jnp.ndim(tokens.q) != 4:
        raise ValueError(f"tokens.q must be [B, T, G, K], got shape {jnp.shape(tokens.q)}")
    rows, count = tokens.q.shape[:2]
    if count < 1:
        raise ValueError(f"tokens.q must hold at least one token, got shape {tokens.q.shape}")
    keys, values = (r.num_key_heads, r.key_dim), (r.num_value_heads, r.value_dim)
    _check_array("tokens.q", tokens.q, (rows, count, *keys), _ACTIVATION_DTYPES)
    _check_array("tokens.k", tokens.k, (rows, count, *keys), _ACTIVATION_DTYPES)
    _check_array("tokens.v", tokens.v, (rows, count, *values), _ACTIVATION_DTYPES)
    # a gate or beta in bfloat16 drifts with the context, so it is refused rather than widened
    _check_array("tokens.log_decay", tokens.log_decay, (rows, count, *r.decay_dims), ("float32",))
    _check_array("tokens.beta", tokens.beta, (rows, count, r.num_value_heads), ("float32",))
    for name in ("q_scale", "k_scale"):
        if (scale := getattr(tokens, name)) is not None:
            _check_array(f"tokens.{name}", scale, (rows, count, r.num_key_heads), ("float32",))
    return rows, count


def debug_decay(tokens: Tokens, live: Array) -> None:
    """Run-time check, live only under ``checkify``: no real token has a positive log decay. ``live`` [B, T] bool"""
    masked = live.reshape(live.shape + (1,) * (tokens.log_decay.ndim - 2))
    positive = jnp.any(masked & (tokens.log_decay > 0))
    checkify.debug_check(~positive, "tokens.log_decay must be <= 0 (it is a logarithm), got a positive value")


def check_recordable(state: ReplayState, tokens: Tokens) -> None:
    """Raises unless the ring holds what is recorded raw without rounding it."""
    record = state.policy.record_dtype
    updates = state.recurrence.delta_rule and state.policy.records_updates(state.recurrence)
    for name in ("k",) if updates else ("k", "v"):
        dtype = getattr(tokens, name).dtype
        if jnp.promote_types(dtype, record) != record:
            fix = f"use record_dtype='{jnp.promote_types(dtype, record).name}' or cast the tokens"
            if name == "v" and state.recurrence.delta_rule and state.policy.readout == "checkpoint":
                fix += ", or records='update', which records no values"
            raise ValueError(
                f"tokens.{name} is {dtype.name}, which the policy's record_dtype={record.name} cannot hold exactly: {fix}"
            )


def check_rows(state: ReplayState, tokens: Tokens, slots: Array | None, lengths: Array | None) -> tuple[Array | None, Array]:
    """Raises unless ``slots`` and ``lengths`` fit the tokens' rows; returns slots [B] int32 or None, and lengths [B] int32."""
    rows, num_tokens = tokens.q.shape[:2]
    checked = check_slots(slots, state.num_slots, rows)
    lengths = check_counts(lengths, rows, num_tokens, "lengths")
    debug_distinct(checked, state.num_slots)
    checkify.debug_check(
        jnp.all((lengths >= 0) & (lengths <= num_tokens) | ~in_range(checked, state.num_slots)),
        "lengths must be between 0 and T={most}, got {lengths}",
        most=jnp.int32(num_tokens),
        lengths=lengths,
    )
    debug_decay(tokens, in_range(checked, state.num_slots)[:, None] & (jnp.arange(num_tokens) < lengths[:, None]))
    return None if slots is None else checked, lengths


def check_implementation(implementation: str | None, available: tuple[str, ...]) -> str:
    """The implementation to run; None is the last of ``available``.

    Raises:
        ValueError: no implementation has this name.
        NotImplementedError: it exists elsewhere, but cannot do this; the message says what works.
    """
    if implementation is None:
        return available[-1]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation not in available:
        raise NotImplementedError(f"implementation={implementation!r} is not available here; {' and '.join(available)} are")
    return implementation


def _check_fields(name: str, have: Any, want: Any) -> None:
    """Raises unless the arrays of a dataclass are those of ``want``, a dataclass of shapes; None has no fields."""
    for field in dataclasses.fields(want) if want is not None else ():
        value, expected = getattr(have, field.name), getattr(want, field.name)
        if (value is None) != (expected is None):
            something = "None" if expected is None else "an array"
            raise ValueError(f"{name}.{field.name} must be {something} for this recurrence and policy")
        if expected is not None:
            _check_array(f"{name}.{field.name}", value, expected.shape, (expected.dtype.name,))


def _check_array(name: str, value: Array, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.dtype.name not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(dtypes)}, got {value.dtype.name}")
