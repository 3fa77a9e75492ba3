"""Where a model's parameters lie on a device mesh, and how its calls run on every data shard."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from replayssm_jax.per_device import over_slots
from replayssm_jax.sharding import Sharding
from replayssm_jax.slots import check_counts

Array = jax.Array

# Modules whose kernel [in, out] is split by output (into heads, features, the vocabulary) or by input (out of them).
_RECURRENT = ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "f_b_proj", "g_b_proj", "b_proj")
_BY_OUTPUT = {*_RECURRENT, "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "lm_head"}
_BY_INPUT = {"o_proj", "out_proj", "down_proj"}


def parameter_sharding(sharding: Sharding, path: Sequence[Any], shape: tuple[int, ...]) -> NamedSharding:
    """How a parameter lies: split over the model axis where that divides it, whole where not.

    Projections into heads or features are split by output, those out of them by input, experts by expert, embeddings by
    vocabulary, convolutions by channel. Vectors are small and stay whole, as do routers and latents.

    Args:
        sharding: the mesh.
        path: names from the model to the parameter.
        shape: of the parameter.
    """
    names = [str(part) for part in path]
    module = names[-2] if len(names) > 1 else ""
    if "experts" in names or names[-1] == "embed_tokens":
        axis = 0
    elif module in _BY_OUTPUT or module == "conv1d":
        axis = 1
    elif module in _BY_INPUT:
        axis = 0
    else:
        return sharding.named(P())
    if len(shape) < 2 or shape[axis] % sharding.model_size:
        return sharding.named(P())
    return sharding.named(P(*(sharding.model if i == axis else None for i in range(len(shape)))))


def attach(model: nnx.Module, sharding: Sharding) -> None:
    """Tells a model's modules which mesh they run on; the parameters stay where they are."""
    for _, module in nnx.iter_modules(model):
        if hasattr(module, "sharding"):
            module.sharding = sharding


def shard[Model: nnx.Module](model: Model, mesh: Mesh | Sharding) -> Model:
    """The model on a mesh: its parameters split over the model axis, its decode interface over both.

    Args:
        model: a ``Decoder`` or a mixer, on any device. It stays as it is.
        mesh: with axes "data" and "model", or a ``Sharding`` that names others.

    Returns:
        A model of the same class. Its slots and rows lie as ``replayssm_jax.sharding`` says.

    Raises:
        TypeError, ValueError: mesh is none, or has other axes.
    """
    sharding = Sharding.of(mesh)
    graph, state = nnx.split(model)
    placed = []
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        placed.append((path, variable.replace(jax.device_put(value, parameter_sharding(sharding, path, value.shape)))))
    sharded = nnx.merge(graph, nnx.from_flat_state(placed))
    attach(sharded, sharding)
    return sharded


def decode_over_slots(
    model: Any, method: str, cache: Any, tokens: Array, slots: Array | None, lengths: Array | None, **options: Any
) -> tuple[Any, Array]:
    """A decoder's ``prefill``, ``verify`` or ``forward`` on every data shard: its slots of the cache, its rows of the batch."""
    rows = tokens, check_counts(lengths, tokens.shape[0], tokens.shape[1], "lengths")
    graph, state = nnx.split(model)
    return over_slots(model.sharding, _decode_shard, state, cache, slots, rows, {"graph": graph, "method": method, **options})


def _decode_shard(
    state: Any, cache: Any, slots: Array | None, rows: Any, graph: Any, method: str, **options: Any
) -> tuple[Any, Array]:
    tokens, lengths = rows
    model = nnx.merge(graph, state)
    model.sharding = None  # in here the decoder is one data shard's own; its mixers and experts still have a model axis
    return getattr(model, method)(cache, tokens, slots=slots, lengths=lengths, **options)


def check_tokens(tokens: Array) -> Array:
    """Raises ValueError unless tokens are integers [B, T] with T of at least 1."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape[1] < 1:
        raise ValueError(f"tokens must be integers [B, T] with T of at least 1, got {tokens.dtype} of shape {tokens.shape}")
    return tokens
