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
        if field.name in values:
            _check_type(field, values[field.name])
    try:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json does not fit: {error}") from error


def _check_type(field: dataclasses.Field, value: Any) -> None:
    """Raises CheckpointError unless ``value`` is of the type that a config's field is declared with."""
    name, kind = field.name, str(field.type)
    if kind in ("int", "int | None"):
        check_int(name, value, least=0 if field.default == 0 else 1)
    elif kind == "bool" and not isinstance(value, bool):
        raise CheckpointError(f"{name} must be true or false, got {value!r}")
    elif kind == "float" and not _is_number(value):
        raise CheckpointError(f"{name} must be a number, got {value!r}")
    elif kind == "tuple[str, ...]":
        check_list(name, value, str)
    elif kind == "tuple[int, ...]":
        check_list(name, value, int)
    elif kind == "tuple[float, float]":
        limits = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
        if not limits or not 0 <= value[0] <= value[1]:
            raise CheckpointError(f"{name} must be (low, high) with 0 <= low <= high, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int = 1) -> None:
    """Raises CheckpointError unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_list(name: str, value: Any, kind: type) -> None:
    """Raises CheckpointError unless ``value`` is a list of integers or of strings."""
    entries = value if isinstance(value, list | tuple) else [None]
    if not all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in entries):
        what = "integers" if kind is int else "strings"
        raise CheckpointError(f"{name} must be a list of {what}, got {value!r}")


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


def check_mixture(config: Any, experts: str, per_token: str, intermediate: str, groups: str = "", top_groups: str = "") -> None:
    """Raises CheckpointError where the sizes of a mixture of experts, fields of ``config`` by these names, do not fit."""
    for name in (experts, per_token, intermediate):
        check_int(name, getattr(config, name))
    check_at_most(per_token, getattr(config, per_token), experts, getattr(config, experts))
    if groups:
        check_divisible(experts, getattr(config, experts), groups, getattr(config, groups))
        check_at_most(top_groups, getattr(config, top_groups), groups, getattr(config, groups))


def check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    """Raises CheckpointError where ``value`` exceeds ``limit``."""
    if value > limit:
        raise CheckpointError(f"{name}={value} must be at most {limit_name}={limit}")
