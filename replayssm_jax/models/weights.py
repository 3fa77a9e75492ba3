"""Weights from a folder in published layout: ``config.json`` and one or several safetensors files, read tensor by tensor."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
import safetensors
from flax import nnx

from replayssm_jax.models.parameter import PublishedParameter

Layout = Callable[..., np.ndarray]
Place = Callable[[Sequence[Any], tuple[int, ...]], jax.sharding.Sharding]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A folder is not a checkpoint of this model: a file, tensor or config value is missing, unknown or of the wrong shape."""


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint folder; {"__float__": "Infinity"} is read as that float.

    Raises:
        CheckpointError: no such folder or file, or no JSON object in it.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: a checkpoint folder holds config.json and safetensors files")
    try:
        config = json.loads(path.read_text(), object_hook=_decode_float)
    except ValueError as error:  # no JSON, or no UTF-8
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _decode_float(value: dict[str, Any]) -> Any:
    return float(value["__float__"]) if set(value) == {"__float__"} else value


class Checkpoint:
    """The tensors of a folder by published name, opened lazily; one tensor is in memory at a time.

    Raises:
        CheckpointError: no safetensors file, or an index that names a missing file or tensor.
    """

    def __init__(self, folder: str | pathlib.Path):
        self.folder = pathlib.Path(folder)
        self._files: dict[str, Any] = {}
        index, single = self.folder / _INDEX, self.folder / _SINGLE
        if index.is_file():
            self._file_of = _read_index(index)
            for file in sorted(set(self._file_of.values())):
                if not (self.folder / file).is_file():
                    raise CheckpointError(f"{index} names {file}, which does not exist")
        elif single.is_file():
            self._file_of = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            raise CheckpointError(f"{self.folder} holds neither {_SINGLE} nor {_INDEX}")

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own dtype.

        Raises:
            CheckpointError: there is none of that name.
        """
        return self._holder(name).get_tensor(name)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor of at least one axis, in its own dtype; the rest is not read."""
        return self._holder(name).get_slice(name)[index]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor, which must hold floating-point numbers of 16 bits or more.

        Raises:
            CheckpointError: there is none of that name, or it holds something else: quantised weights.
        """
        header = self._holder(name).get_slice(name)
        if header.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            dtype = header.get_dtype() if header.get_dtype().startswith("F") else self.read(name).dtype
            raise CheckpointError(f"{name} in {self.folder} is {dtype}; only unquantised weights can be loaded")
        return tuple(header.get_shape())

    def _holder(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        file = self._open(self._file_of[name])
        if name not in file.keys():  # noqa: SIM118  a safetensors file is no mapping
            raise CheckpointError(f"{self.folder / _INDEX} says {self._file_of[name]} holds {name}, but it does not")
        return file

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safetensors.safe_open(self.folder / file, framework="numpy")
            except safetensors.SafetensorError as error:
                raise CheckpointError(f"{self.folder / file} is not a readable safetensors file: {error}") from error
        return self._files[file]


def _read_index(path: pathlib.Path) -> dict[str, str]:
    try:
        return {str(name): str(file) for name, file in json.loads(path.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index: it must be JSON with a weight_map of tensors to files") from error


def as_is(*tensors: np.ndarray) -> np.ndarray:
    """One tensor, or several joined along their first axis."""
    return tensors[0] if len(tensors) == 1 else np.concatenate(tensors)


def linear(*tensors: np.ndarray) -> np.ndarray:
    """[out, in] -> [in, out]"""
    return as_is(*tensors).T


def depthwise(*tensors: np.ndarray) -> np.ndarray:
    """[C, 1, W] -> [W, C]"""
    joined = as_is(*tensors)
    if joined.ndim != 3 or joined.shape[1] != 1:
        raise ValueError("a depthwise convolution has the shape [C, 1, W]")
    return joined[:, 0].T


def stacked_linear(*tensors: np.ndarray) -> np.ndarray:
    """E tensors [out, in] -> [E, in, out]"""
    return np.stack([tensor.T for tensor in tensors])


def swapped(tensor: np.ndarray) -> np.ndarray:
    """[E, out, in] -> [E, in, out]"""
    return tensor.swapaxes(1, 2)


def first_half(tensor: np.ndarray) -> np.ndarray:
    """[E, 2 out, in] -> [E, in, out], of the first half of the outputs"""
    return tensor[:, : tensor.shape[1] // 2].swapaxes(1, 2)


def second_half(tensor: np.ndarray) -> np.ndarray:
    """[E, 2 out, in] -> [E, in, out], of the second half of the outputs"""
    return tensor[:, tensor.shape[1] // 2 :].swapaxes(1, 2)


def flat(*tensors: np.ndarray) -> np.ndarray:
    """[1, 1, H, 1] -> [H]"""
    return as_is(*tensors).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one parameter comes from: published tensors, and how they are laid out for this package."""

    names: tuple[str, ...]
    layout: Layout = as_is

    @classmethod
    def of(cls, *names: str, layout: Layout = as_is) -> "Source":
        return cls(names, layout)


def load_into(
    model: nnx.Module,
    sources: Mapping[str, Source],
    checkpoint: Checkpoint,
    rename: Callable[[str], str] = lambda name: name,
    ignored: Callable[[str], bool] = lambda name: False,
    place: Place | None = None,
) -> None:
    """Fills an abstract module's parameters, one at a time, cast to each parameter's own dtype.

    Neither the host nor a device holds a parameter twice: on a mesh every shard is read by itself, where it goes.

    Args:
        model: as ``nnx.eval_shape`` returns it.
        sources: for every parameter, by its dotted path in the module, the published tensors it is made of.
        checkpoint: where they are.
        rename: from the names in ``sources`` to those in the checkpoint.
        ignored: published tensors that this model has no use for by design.
        place: where a parameter of that path and shape shall lie; None is whole on the default device.

    Raises:
        CheckpointError: tensors are missing, unknown or of the wrong shape; nothing has been loaded in the first two cases.
    """
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    if parameters.keys() != sources.keys():
        raise ValueError(f"sources and parameters differ: {sorted(parameters.keys() ^ sources.keys())}")
    wanted = {rename(name) for source in sources.values() for name in source.names}
    _raise_if_any("lacks tensors", checkpoint, wanted - checkpoint.names)
    _raise_if_any("holds unknown tensors", checkpoint, {n for n in checkpoint.names - wanted if not ignored(n)})
    loaded = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(loaded):
        source = sources[".".join(map(str, path))]
        names = [rename(name) for name in source.names]
        value = _published(source, names, checkpoint)
        shape, dtype = variable.get_value().shape, variable.get_value().dtype
        if value.shape != shape:
            raise CheckpointError(
                f"{' + '.join(names)} in {checkpoint.folder} gives shape {value.shape}, the config asks for {shape}"
            )
        variable.set_value(_load(value, dtype, None if place is None else place(path, shape)))
    nnx.update(model, loaded)


def _load(value: PublishedParameter, dtype: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(value.part((slice(None),) * len(value.shape)), dtype=dtype)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value.part(index or ()).astype(dtype))


def _published(source: Source, names: list[str], checkpoint: Checkpoint) -> PublishedParameter:
    try:
        return PublishedParameter(source, names, checkpoint)
    except CheckpointError:
        raise
    except (IndexError, ValueError) as error:
        shapes = ", ".join(str(checkpoint.shape(name)) for name in names)
        raise CheckpointError(f"{' + '.join(names)} in {checkpoint.folder} has an unexpected shape: {shapes}") from error


def _raise_if_any(what: str, checkpoint: Checkpoint, names: Iterable[str]) -> None:
    names = sorted(names)
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise CheckpointError(f"{checkpoint.folder} {what}: {', '.join(names[:5])}{more}")


def published_tensors(model: nnx.Module, sources: Mapping[str, Source]) -> Iterator[tuple[str, np.ndarray]]:
    """The inverse for single-tensor sources: a module's parameters under their published names, in published layout.

    Raises:
        NotImplementedError: a parameter is joined from several published tensors.
    """
    inverse: dict[Layout, Layout] = {as_is: as_is, linear: linear, depthwise: lambda x: x.T[:, None]}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        source = sources[".".join(map(str, path))]
        if len(source.names) != 1 or source.layout not in inverse:
            raise NotImplementedError(f"{'.'.join(map(str, path))} is made of {source.names}; saving it is not implemented")
        yield source.names[0], np.ascontiguousarray(inverse[source.layout](np.asarray(variable.get_value())))
