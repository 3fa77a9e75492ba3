"""Small helpers for the frozen dataclasses that flow through jit."""

from collections.abc import Callable
from typing import Any

import jax


def register[T](data_fields: tuple[str, ...], meta_fields: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Class decorator: a pytree whose leaves are ``data_fields``, in that order, and whose static parts are ``meta_fields``."""

    def decorate(cls: type[T]) -> type[T]:
        return jax.tree_util.register_dataclass(cls, data_fields=list(data_fields), meta_fields=list(meta_fields))

    return decorate


def check_divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    """Raises ValueError naming both unless ``divisor`` divides ``value``."""
    if value % divisor:
        raise ValueError(f"{name}={value} must be divisible by {divisor_name}={divisor}")


def check_positive_int(name: str, value: Any) -> None:
    """Raises TypeError or ValueError naming ``name`` unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
