"""The GPU backend: hands a call to the Pallas kernels, which update the state's arrays in place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.hopper.cut import block_scale_rows
from pallas_kernels.hopper.heads import answers_folded
from pallas_kernels.hopper.read import read
from pallas_kernels.hopper.refresh import refresh
from replayssm_jax.state import ReplayState, Tokens

Array = jax.Array
_Refs = tuple[Any, Any, Any]  # references to a state's checkpoint, buffer and readout


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
    if policy.rounding != "nearest" and state.recurrence.delta_rule and policy.records_updates(state.recurrence):
        return f"rounding={policy.rounding!r} with records of updates: the GPU kernels take it with records='raw' or a copy"
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
    rows, refs = _rows(state, slots, lengths), _refs(state)
    operands = _tokens(state, tokens)
    if answers_folded(geometry):
        answers = jax.new_ref(read(rows, operands, _pool(refs), geometry, interpret=interpret))
        _refresh(state, rows, refs, geometry, True, interpret, operands, answers)
        out = jax.freeze(answers)
    elif geometry.folds_apart:
        _refresh(state, rows, refs, geometry, True, interpret)
        refs = _with_block_scales(refs, block_scale_rows(geometry))
        out = read(rows, operands, _pool(refs), geometry, interpret=interpret)
    else:
        kernel = hopper.step if geometry.tokens == 1 else hopper.verify
        out = kernel(rows, operands, _pool(refs), geometry, interpret=interpret)
    return _frozen(state, refs), out


def flush(state: ReplayState, slots: Array | None, where: Array, interpret: hopper.Interpret = None) -> ReplayState:
    """Folds the committed records of rows in ``where`` [B] bool. The pointer is left to the caller."""
    geometry = dataclasses.replace(_geometry(state, None), rows=where.shape[0])
    rows, refs = _rows(state, slots, where.astype(jnp.int32)), _refs(state)
    if geometry.folds_apart:
        _refresh(state, rows, refs, geometry, False, interpret)
    else:
        hopper.flush(rows, _pool(refs), geometry, interpret=interpret)
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
        raw=not policy.records_updates(r),
        readout=policy.readout,
        rounding=policy.rounding,
        seed=policy.seed,
    )


def _rows(state: ReplayState, slots: Array | None, lengths: Array) -> hopper.Rows:
    slots = jnp.arange(lengths.shape[0], dtype=jnp.int32) if slots is None else slots
    return hopper.Rows(slots, lengths, state.pointer.length, state.pointer.origin)


def _tokens(state: ReplayState, tokens: Tokens) -> hopper.Tokens:
    """The kernels take queries, keys and recorded values in the ring's dtype; it holds them exactly, so this rounds nothing."""
    record = state.policy.record_dtype
    updates = state.recurrence.delta_rule and state.policy.records_updates(state.recurrence)
    one = jnp.ones(tokens.q.shape[:3], jnp.float32)
    return hopper.Tokens(
        q=tokens.q.astype(record),
        k=tokens.k.astype(record),
        v=tokens.v if updates else tokens.v.astype(record),
        log_decay=tokens.log_decay,
        beta=tokens.beta,
        q_scale=one if tokens.q_scale is None else tokens.q_scale,
        k_scale=one if tokens.k_scale is None else tokens.k_scale,
    )


def _refs(state: ReplayState) -> _Refs:
    return jax.tree.map(jax.new_ref, (state.checkpoint, state.buffer, state.readout))


def _pool(refs: _Refs) -> hopper.Pool:
    checkpoint, buffer, copy = refs
    own = () if copy is None else (copy.payload, copy.scale, copy.block_scale)
    return hopper.Pool(checkpoint, buffer.key, buffer.update, buffer.log_decay, buffer.weight, buffer.factor, *own)


def _refresh(
    state: ReplayState,
    rows: hopper.Rows,
    refs: _Refs,
    geometry: hopper.Geometry,
    due_only: bool,
    interpret: hopper.Interpret,
    tokens: hopper.Tokens | None = None,
    out: Any = None,
) -> None:
    first_head = jnp.zeros(1, jnp.int32) if state.first_head is None else jnp.reshape(state.first_head, 1).astype(jnp.int32)
    refresh(rows, _pool(refs), geometry, state.pointer.request, first_head, due_only, tokens, out, interpret)


def _with_block_scales(refs: _Refs, dims: tuple[int, ...]) -> _Refs:
    """The references, nvfp4's block scales as [N, H, *dims]. They are the same bytes in the same place."""
    checkpoint, buffer, copy = refs
    if copy is None or copy.block_scale is None:
        return refs
    scales = jax.freeze(copy.block_scale)
    scales = scales.reshape(*scales.shape[:2], *dims)
    return checkpoint, buffer, dataclasses.replace(copy, block_scale=jax.new_ref(scales))


def _frozen(state: ReplayState, refs: _Refs) -> ReplayState:
    checkpoint, buffer, copy = jax.tree.map(jax.freeze, refs)
    if copy is not None and copy.block_scale is not None:
        scales = copy.block_scale.reshape(*state.checkpoint.shape[:3], -1)
        copy = dataclasses.replace(copy, block_scale=scales)
    return dataclasses.replace(state, checkpoint=checkpoint, buffer=buffer, readout=copy)
