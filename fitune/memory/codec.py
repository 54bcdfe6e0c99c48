"""Frozen dataclasses as JSON values and back, read off their type hints. Plain Python."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A dataclass as the list of its fields' values, so that names are not repeated; tuples as lists."""
    if dataclasses.is_dataclass(value):
        return [encode(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {key: encode(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(entry) for entry in value]
    return value


def decode(kind: type[T], value: Any) -> T:
    """Inverse of `encode`.

    Raises:
        ValueError: the value is not one of this class, or of another version of it.
    """
    return typing.cast(T, _decode(kind, value))


def _decode(kind: Any, value: Any) -> Any:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        if not isinstance(value, list) or len(value) != len(fields):
            raise ValueError(f"not a {kind}")
        made = [_decode(hints[field.name], entry) for field, entry in zip(fields, value, strict=True)]
        return typing.cast(Any, kind)(*made)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decode(next(k for k in inside if k is not type(None)), value)
    if origin is tuple:
        kinds = [inside[0]] * len(value) if inside[-1] is Ellipsis else inside
        return tuple(_decode(k, entry) for k, entry in zip(kinds, value, strict=True))
    if origin is dict:
        return {key: _decode(inside[1], entry) for key, entry in value.items()}
    return value
