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
    values = {f.name: config[f.name] for f in fields if config.get(f.name) is not None}
    for field in fields:
        if str(field.type) == "int" and field.name in values:
            _check_int(field.name, values[field.name], least=0 if field.default == 0 else 1)
    try:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json does not fit: {error}") from error


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"{name} must be an integer of at least {least}, got {value!r}")


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A nested object of a config, empty where the key is absent or null.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{key} must be an object, got {value!r}")
    return dict(value or {})


def require(config: Mapping[str, Any], where: str, *keys: str) -> None:
    """Raises CheckpointError unless ``config`` has all keys, none of them null."""
    if missing := [key for key in keys if config.get(key) is None]:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")


def check_layer_types(layer_types: Iterable[str], known: Iterable[str]) -> None:
    """Raises CheckpointError for a layer type that the model does not have."""
    known = tuple(known)
    if unknown := sorted(set(layer_types) - set(known)):
        raise CheckpointError(f"layer_types holds {', '.join(unknown)}; only {', '.join(known)} are supported")


def check_divisible(heads_name: str, heads: int, groups_name: str, groups: int) -> None:
    """Raises CheckpointError unless ``groups`` divides ``heads``."""
    if heads % groups:
        raise CheckpointError(f"{heads_name}={heads} must be divisible by {groups_name}={groups}")
