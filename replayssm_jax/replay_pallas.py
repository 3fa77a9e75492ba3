"""The GPU backend: hands a call to the Pallas kernels, which update the state's arrays in place."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from replayssm_jax.state import ReplayBuffer, ReplayState, Tokens

Array = jax.Array


def supports(state: ReplayState, tokens: Tokens | None = None) -> str | None:
    """Why the kernels cannot serve a request, with what would work, or None."""
    return missing_gpu() or unsupported_shape(state, tokens)


def unsupported_shape(state: ReplayState, tokens: Tokens | None = None) -> str | None:
    """``supports`` but for the machine: whether any GPU could serve the request."""
    if reason := _unsupported_policy(state):
        return f"{reason}; implementation='xla' takes any"
    if reason := hopper.unsupported(_geometry(state, tokens)):
        return f"{reason}; implementation='xla' takes any"
    return None


def _unsupported_policy(state: ReplayState) -> str | None:
    policy = state.policy
    if policy.readout != "checkpoint":
        return f"readout={policy.readout!r}: the GPU kernels read the checkpoint"
    if not policy.records_updates and state.recurrence.delta_rule:
        return "records='raw' with the delta rule: the GPU kernels record updates"
    if policy.rounding != "nearest":
        return f"rounding={policy.rounding!r}: the GPU kernels round to nearest"
    return None


def verify(
    state: ReplayState,
    tokens: Tokens,
    slots: Array | None,
    lengths: Array,
    interpret: hopper.Interpret = None,
) -> tuple[ReplayState, Array]:
    """Folds due rows, answers T drafts, appends their records. The pointer is left to the caller. See ``replay.verify``."""
    geometry = _geometry(state, tokens)
    refs = jax.tree.map(jax.new_ref, (state.checkpoint, state.buffer))
    kernel = hopper.step if geometry.tokens == 1 else hopper.verify
    out = kernel(_rows(state, slots, lengths), _tokens(state, tokens), _pool(*refs), geometry, interpret=interpret)
    return _frozen(state, refs), out


def flush(state: ReplayState, slots: Array | None, where: Array, interpret: hopper.Interpret = None) -> ReplayState:
    """Folds the committed records of rows in ``where`` [B] bool. The pointer is left to the caller."""
    geometry = dataclasses.replace(_geometry(state, None), rows=where.shape[0])
    refs = jax.tree.map(jax.new_ref, (state.checkpoint, state.buffer))
    hopper.flush(_rows(state, slots, where.astype(jnp.int32)), _pool(*refs), geometry, interpret=interpret)
    return _frozen(state, refs)


def missing_gpu() -> str | None:
    """Why this process has no GPU for the kernels, or None."""
    platform = jax.default_backend()
    if platform != "gpu":
        return f"needs a Hopper GPU (H100, H200), this process runs on a {platform}; implementation='xla' runs anywhere"
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if capability != "9.0":
        return f"needs compute capability 9.0 (H100, H200), this GPU has {capability}; implementation='xla' runs anywhere"
    return None


def _geometry(state: ReplayState, tokens: Tokens | None) -> hopper.Geometry:
    r, policy = state.recurrence, state.policy
    rows, count = (1, 1) if tokens is None else tokens.q.shape[:2]
    record = policy.record_dtype
    return hopper.Geometry(
        rows=rows,
        slots=state.num_slots,
        tokens=count,
        value_heads=r.num_value_heads,
        key_heads=r.num_key_heads,
        value_dim=r.value_dim,
        key_dim=r.key_dim,
        window=policy.window,
        max_draft=policy.max_draft,
        delta_rule=r.delta_rule,
        channel_gate=r.gate == "channel",
        checkpoint_dtype=policy.checkpoint_dtype,
        record_dtype=record,
        value_dtype=jnp.dtype(record if tokens is None else tokens.v.dtype),
    )


def _rows(state: ReplayState, slots: Array | None, lengths: Array) -> hopper.Rows:
    slots = jnp.arange(lengths.shape[0], dtype=jnp.int32) if slots is None else slots
    return hopper.Rows(slots, lengths, state.pointer.length, state.pointer.origin)


def _tokens(state: ReplayState, tokens: Tokens) -> hopper.Tokens:
    """The kernels take queries, keys and recorded values in the ring's dtype; it holds them exactly, so this rounds nothing."""
    record = state.policy.record_dtype
    one = jnp.ones(tokens.q.shape[:3], jnp.float32)
    return hopper.Tokens(
        q=tokens.q.astype(record),
        k=tokens.k.astype(record),
        v=tokens.v if state.recurrence.delta_rule else tokens.v.astype(record),
        log_decay=tokens.log_decay,
        beta=tokens.beta,
        q_scale=one if tokens.q_scale is None else tokens.q_scale,
        k_scale=one if tokens.k_scale is None else tokens.k_scale,
    )


def _pool(checkpoint: jax.Ref, buffer: ReplayBuffer) -> hopper.Pool:
    return hopper.Pool(checkpoint, buffer.key, buffer.update, buffer.log_decay, buffer.weight)


def _frozen(state: ReplayState, refs: tuple[jax.Ref, ReplayBuffer]) -> ReplayState:
    checkpoint, buffer = jax.tree.map(jax.freeze, refs)
    return dataclasses.replace(state, checkpoint=checkpoint, buffer=buffer)
