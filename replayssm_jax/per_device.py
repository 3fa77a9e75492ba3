"""Calls that every device of a mesh runs by itself: on its own slots and rows, and on its own heads. See ``sharding``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from replayssm_jax import pointer as pointer_lib
from replayssm_jax import replay
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.slots import check_slots
from replayssm_jax.state import Recurrence, ReplayState, Tokens

if TYPE_CHECKING:
    from replayssm_jax.sharding import Sharding

Array = jax.Array


def over_slots(
    sharding: Sharding, function: Callable, shared: Any, pool: Any, slots: Array | None, rows: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Runs ``function`` on every data shard: on its own slots of the pool and its own rows, slots counted from its first.

    Args:
        sharding: the mesh.
        function: (shared, pool, slots, rows, **options) -> (pool, out); a module's function, so that it compiles once.
        shared: arrays that all data shards see, split over the model axis at most.
        pool: pytree of arrays with slots first.
        slots: as in ``verify``. [B] int or None
        rows: pytree of arrays with rows first.
        options: static keyword arguments.

    Returns:
        The pool, lying as ``Sharding.pool_specs`` says, and the outputs with rows first.

    Raises:
        ValueError: the data axis does not divide slots or rows, or ``slots=None`` with fewer rows than slots.
    """
    num_slots, num_rows = jax.tree.leaves(pool)[0].shape[0], jax.tree.leaves(rows)[0].shape[0]
    checked = check_slots(slots, num_slots, num_rows)
    check_rows_divide(sharding, "num_slots", num_slots)
    check_rows_divide(sharding, "rows of the batch", num_rows)
    if slots is None and num_rows != num_slots and sharding.data_size > 1:
        raise ValueError(f"slots=None puts row b in slot b, which over a data axis takes {num_slots} rows, got {num_rows}")
    slots = None if slots is None else checked
    return _over_slots(sharding, function, tuple(options.items()), shared, pool, slots, rows)


def check_rows_divide(sharding: Sharding, name: str, value: int) -> None:
    """Raises ValueError naming both unless the data axis divides ``value``."""
    if value % sharding.data_size:
        raise ValueError(f"{name}={value} must be divisible by the mesh's axis {sharding.data!r} of size {sharding.data_size}")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _over_slots(
    sharding: Sharding, function: Callable, options: tuple, shared: Any, pool: Any, slots: Array | None, rows: Any
) -> tuple[Any, Any]:
    num_slots = jax.tree.leaves(pool)[0].shape[0]
    own = num_slots // sharding.data_size

    def local(shared: Any, pool: Any, slots: Array | None, rows: Any) -> tuple[Any, Any]:
        if slots is not None:
            slots = slots - own * jax.lax.axis_index(sharding.data)
        return function(shared, pool, slots, rows, **dict(options))

    split = P(sharding.data)
    specs: dict[str, Any] = {"in_specs": (P(), split, split, split), "out_specs": (split, split)}
    run = jax.shard_map(local, mesh=sharding.mesh, axis_names={sharding.data}, check_vma=False, **specs)
    pool, out = run(shared, pool, slots, rows)
    # where it lay before, so that a donated pool is updated in place
    return jax.lax.with_sharding_constraint(pool, jax.tree.map(sharding.named, sharding.pool_specs(pool))), out


def over_heads(
    sharding: Sharding | None,
    function: Callable,
    state: ReplayState,
    tokens: Tokens | None,
    slots: Array | None,
    counts: Array | None,
) -> tuple[ReplayState, Any]:
    """Runs ``function`` on every device of the model axis: on its own heads of the state and of the tokens.

    Args:
        sharding: the mesh, None to call ``function`` as it is.
        function: (state, tokens, slots, counts) -> (state, out), with out [B, T, H, V] or None.
        state: of a recurrence from ``Sharding.split``.
        tokens: with the original key heads or the state's.
        slots, counts: passed on.

    Raises:
        ValueError: the model axis divides the state's value heads but not its key heads.
    """
    if sharding is None:
        return function(state, tokens, slots, counts)
    r, size = state.recurrence, sharding.model_size
    whole = bool(r.num_value_heads % size)
    if not whole and r.num_key_heads % size:
        raise ValueError(
            f"state.recurrence has num_key_heads={r.num_key_heads}, which the mesh's axis {sharding.model!r} of size {size} "
            f"does not divide: make the state of sharding.split(recurrence)"
        )
    parts = 1 if whole else size
    own = dataclasses.replace(r, num_value_heads=r.num_value_heads // parts, num_key_heads=r.num_key_heads // parts)

    def local(pools: dict[str, Any], pointer: ReplayPointer, tokens: Any, slots: Any, counts: Any) -> tuple:
        head = None if whole else jax.lax.axis_index(sharding.model) * own.num_value_heads
        mine = dataclasses.replace(state, **pools, pointer=pointer, recurrence=own, first_head=head)
        after, out = function(mine, tokens, slots, counts)
        return {name: getattr(after, name) for name in pools}, after.pointer, out

    pool, row = (P(), P()) if whole else (P(None, sharding.model), P(None, None, sharding.model))
    run = over_model(sharding, local, in_specs=(pool, P(), row, P(), P()), out_specs=(pool, P(), row))
    tokens = None if tokens is None else repeat_keys(tokens, r)
    pools = {name: getattr(state, name) for name in ("checkpoint", "buffer", "readout")}
    pools, pointer, out = run(pools, state.pointer, tokens, slots, counts)
    return dataclasses.replace(state, **pools, pointer=pointer), out


def over_model(sharding: Sharding, function: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
    """``function`` under ``jax.shard_map`` over the model axis, within ``over_slots`` or outside of it.

    Either way no axis is left to XLA inside, as a kernel needs it.
    """
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    if sharding.data in jax.sharding.get_abstract_mesh().manual_axes:
        return jax.shard_map(function, axis_names={sharding.model}, **specs)
    return jax.shard_map(function, mesh=sharding.mesh, **specs)


def gathered(sharding: Sharding | None, x: Array) -> Array:
    """Activations whole on every device of the model axis, by one all-gather where they were split."""
    if sharding is None or sharding.model_size == 1:
        return x
    inside = sharding.data in jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.with_sharding_constraint(x, P() if inside else sharding.named(P()))


def parts(sharding: Sharding | None, x: Array, ends: int | list[int]) -> list[Array]:
    """``jnp.split`` of activations [B, T, C] along C, into parts whose ends lie anywhere in the devices' own channels.

    They are gathered first and stay whole: left to itself, XLA moves every part in many small messages.
    """
    return [gathered(sharding, part) for part in jnp.split(gathered(sharding, x), ends, axis=-1)]


def repeat_keys(tokens: Tokens, recurrence: Recurrence) -> Tokens:
    """Tokens with every key head repeated until there are as many as the recurrence's; as they are where that cannot be."""
    if not isinstance(tokens, Tokens) or jnp.ndim(tokens.q) != 4 or recurrence.num_key_heads % tokens.q.shape[2]:
        return tokens
    times = recurrence.num_key_heads // tokens.q.shape[2]
    if times == 1:
        return tokens
    given = [name for name in ("q", "k", "q_scale", "k_scale") if getattr(tokens, name) is not None]
    return dataclasses.replace(tokens, **{name: jnp.repeat(getattr(tokens, name), times, axis=2) for name in given})


def run_shard(
    shared: None, state: ReplayState, slots: Array | None, rows: Any, function: Callable, sharding: Sharding, **options: Any
) -> tuple[ReplayState, Array | None]:
    """``step``, ``verify`` or ``prefill`` of one data shard."""
    del shared
    tokens, lengths = rows
    return over_heads(sharding, functools.partial(function, **options), state, tokens, slots, lengths)


def flush_shard(
    shared: None, state: ReplayState, slots: Array | None, where: Array, sharding: Sharding, implementation: str | None
) -> tuple[ReplayState, None]:
    """``flush`` of one data shard."""
    del shared

    def flush(state: ReplayState, tokens: None, slots: Array | None, where: Array) -> tuple[ReplayState, None]:
        del tokens
        return replay.flush(state, slots, where, implementation=implementation), None

    return over_heads(sharding, flush, state, None, slots, where)[0], None


def commit_shard(shared: None, pointer: ReplayPointer, slots: Array | None, accepted: Array) -> tuple[ReplayPointer, None]:
    """``commit`` of one data shard."""
    del shared
    return pointer_lib.commit(pointer, accepted, slots), None
