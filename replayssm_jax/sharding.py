"""How state, weights and kernels split over a device mesh: heads and experts over one axis, slots over the other.

    sharding = Sharding(jax.make_mesh((2, 4), ("data", "model")))
    state = sharding.init_state(recurrence, policy, num_slots)
    state, out = sharding.verify(state, tokens, slots, lengths)            # step, prefill and flush likewise
    state = dataclasses.replace(state, pointer=sharding.commit(state.pointer, accepted, slots))

A model does this by itself once it is loaded with ``mesh=`` or passed through ``models.shard``.

**Model axis.** Every device of it holds its part of the value heads of every state and runs the backend on them by itself,
under ``jax.shard_map``: a recurrence needs nothing of another head. Key heads that do not divide the axis are repeated until
they do (``split``), so that each device keeps the keys that its own value heads read. Value heads that do not divide it leave
the layer's state whole on every device. Everything else (projections, attention, norms) is partitioned by XLA, from how the
weights lie.

**Data axis.** With D shards, N slots and B rows, shard d owns the slots d N/D .. (d+1) N/D - 1 and runs the rows
d B/D .. (d+1) B/D - 1; D divides both. ``slots``, ``lengths`` and ``accepted`` stay what they are on one device: an entry per
row of the whole batch, slots numbered over the whole pool. A row must name a slot of its own shard; another shard's slot is
padding (output zero, nothing written, pointer unmoved). A shard with fewer sequences than rows is padded: a row gets a slot
outside [0, N) or a length of 0. ``slots=None`` is row b in slot b and therefore needs B = N. No call communicates over this
axis. ``reset``, ``copy_slots`` and ``materialize`` take slots of any shard in any order.

Checked mode is for one device: ``checkify`` does not go through one ``shard_map`` within another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from replayssm_jax import per_device, replay
from replayssm_jax import state as state_lib
from replayssm_jax.checks import check_state, check_tokens
from replayssm_jax.pointer import ReplayPointer
from replayssm_jax.prefill import prefill
from replayssm_jax.slots import check_counts, check_slots
from replayssm_jax.state import Recurrence, ReplayPolicy, ReplayState, Tokens

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh and the names of its two axes.

    Args:
        mesh: of exactly the two axes; one of size 1 switches that kind of parallelism off. Axes are used as automatic ones,
            whatever type the mesh gives them.
        data: axis over slots and rows.
        model: axis over heads and experts.

    Raises:
        TypeError, ValueError: mesh is no Mesh or has other axes.
    """

    mesh: Mesh
    data: str = "data"
    model: str = "model"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        if self.data == self.model or set(self.mesh.axis_names) != {self.data, self.model}:
            raise ValueError(f"mesh must have the axes {self.data!r} and {self.model!r}, got {self.mesh.axis_names}")
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))

    @classmethod
    def of(cls, mesh: Mesh | Sharding) -> Sharding:
        """A mesh with axes "data" and "model", or a Sharding as it is."""
        return mesh if isinstance(mesh, Sharding) else cls(mesh)

    @property
    def data_size(self) -> int:
        return int(self.mesh.shape[self.data])

    @property
    def model_size(self) -> int:
        return int(self.mesh.shape[self.model])

    def named(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def split(self, recurrence: Recurrence) -> Recurrence:
        """The recurrence whose state is kept: the same, with key heads repeated until the model axis divides them.

        Where the axis does not divide the value heads it is returned unchanged, and every device keeps the whole state.
        """
        if recurrence.num_value_heads % self.model_size:
            return recurrence
        return dataclasses.replace(recurrence, num_key_heads=math.lcm(recurrence.num_key_heads, self.model_size))

    def init_state(self, recurrence: Recurrence, policy: ReplayPolicy, num_slots: int) -> ReplayState:
        """``replayssm_jax.init_state``, made in its shards; its recurrence is ``split(recurrence)``.

        Raises:
            TypeError, ValueError: as there, and for num_slots that the data axis does not divide.
        """
        if not isinstance(recurrence, Recurrence):
            raise TypeError(f"recurrence must be a Recurrence, got {type(recurrence).__name__}")
        return self.make_pool(lambda: state_lib.init_state(self.split(recurrence), policy, num_slots))

    def step(
        self, state: ReplayState, tokens: Tokens, slots: Array | None = None, lengths: Array | None = None, **options: Any
    ) -> tuple[ReplayState, Array]:
        """``replayssm_jax.step`` on a state from ``init_state``; tokens have the original key heads or the state's."""
        return self._run(replay.step, state, tokens, slots, lengths, options)

    def verify(
        self, state: ReplayState, tokens: Tokens, slots: Array | None = None, lengths: Array | None = None, **options: Any
    ) -> tuple[ReplayState, Array]:
        """``replayssm_jax.verify``, likewise."""
        return self._run(replay.verify, state, tokens, slots, lengths, options)

    def prefill(
        self, state: ReplayState, tokens: Tokens, slots: Array | None = None, lengths: Array | None = None, **options: Any
    ) -> tuple[ReplayState, Array]:
        """``replayssm_jax.prefill``, likewise."""
        return self._run(prefill, state, tokens, slots, lengths, options)

    def flush(
        self, state: ReplayState, slots: Array | None = None, where: Array | None = None, *, implementation: str | None = None
    ) -> ReplayState:
        """``replayssm_jax.flush``; rows lie as in ``verify``."""
        check_state(state)
        count = check_slots(slots, state.num_slots).shape
        where = jnp.ones(count, bool) if where is None else jnp.asarray(where)
        options = {"sharding": self, "implementation": implementation}
        return per_device.over_slots(self, per_device.flush_shard, None, state, slots, where, options)[0]

    def commit(self, pointer: ReplayPointer, accepted: Array | int, slots: Array | None = None) -> ReplayPointer:
        """``replayssm_jax.commit``; rows lie as in ``verify``."""
        count = check_slots(slots, pointer.num_slots, None if jnp.ndim(accepted) != 1 else jnp.shape(accepted)[0]).shape[0]
        accepted = check_counts(jnp.asarray(accepted), count, 0, "accepted")
        return per_device.over_slots(self, per_device.commit_shard, None, pointer, slots, accepted, {})[0]

    def _run(self, function: Callable, state: Any, tokens: Any, slots: Any, lengths: Any, options: dict[str, Any]) -> Any:
        check_state(state)
        tokens = per_device.repeat_keys(tokens, state.recurrence)
        rows, count = check_tokens(state, tokens)
        lengths = check_counts(lengths, rows, count, "lengths")
        options = {"function": function, "sharding": self, **options}
        return per_device.over_slots(self, per_device.run_shard, None, state, slots, (tokens, lengths), options)

    def make_pool[Pool](self, make: Callable[[], Pool]) -> Pool:
        """What ``make`` returns, a pytree of arrays with slots first, built in its shards and nowhere whole.

        Raises:
            ValueError: the data axis does not divide the slots.
        """
        shapes = jax.eval_shape(make)
        per_device.check_rows_divide(self, "num_slots", jax.tree.leaves(shapes)[0].shape[0])
        return jax.jit(make, out_shardings=jax.tree.map(self.named, self.pool_specs(shapes)))()

    def pool_specs(self, pool: Any) -> Any:
        """How a state or a cache of a mixer or model lies: slots over the data axis, heads or channels over the model axis."""

        def spec(path: Sequence[Any], leaf: Any) -> P:
            names = {getattr(key, "name", None) for key in path}
            axis = 1 if names & {"checkpoint", "buffer", "readout"} else 2  # [N, H, ...]; [N, R, C] and [N, S, heads, head_dim]
            if leaf.ndim <= axis or leaf.shape[axis] % self.model_size:
                return P(self.data)
            return P(self.data, *(None,) * (axis - 1), self.model)

        return jax.tree_util.tree_map_with_path(spec, pool)
