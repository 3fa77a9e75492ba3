"""Reading a ``config.json`` into a model's config: every value that would be misread is a named error."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from replayssm_jax.models.weights import CheckpointError


def check_model_type(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises CheckpointError unless ``model_type`` is one of ``known``."""
    if config.get("model_type") not in known:
        raise CheckpointError(f"model_type must be one of {', '.join(known)}, got {config.get('model_type')!r}")


def check_supported(config: Mapping[str, Any], **expected: Any) -> None:
    """Raises CheckpointError where a key that is present has another value than the only one implemented."""
    for key, value in expected.items():
        if key in config and config[key] != value:
            raise CheckpointError(f"{key}={config[key]!r} is not supported, only {value!r}")


def from_fields[Config](cls: type[Config], config: Mapping[str, Any]) -> Config:
    """An instance of a config dataclass from the keys of the same names; lists become tuples, other keys are left out.

    Raises:
        CheckpointError: a field without default has no key.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    if missing := [name for name in required if config.get(name) is None]:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    values = {f.name: config[f.name] for f in fields if f.name in config}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def check_layer_types(layer_types: Iterable[str], known: Iterable[str]) -> None:
    """Raises CheckpointError for a layer type that the model does not have."""
    known = tuple(known)
    if unknown := sorted(set(layer_types) - set(known)):
        raise CheckpointError(f"layer_types holds {', '.join(unknown)}; only {', '.join(known)} are supported")


def check_divisible(heads_name: str, heads: int, groups_name: str, groups: int) -> None:
    """Raises CheckpointError unless ``groups`` divides ``heads``."""
    if heads % groups:
        raise CheckpointError(f"{heads_name}={heads} must be divisible by {groups_name}={groups}")
