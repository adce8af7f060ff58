"""Dataclasses as JSON objects, and back with every field's type looked at."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def as_plain(value: Any) -> dict[str, Any]:
    """A dataclass's fields, ready for `json.dumps`."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def from_plain(cls: type[T], values: object) -> T:
    """The dataclass that a JSON object spells.

    Raises:
        ValueError: it is no object, a field is missing, unknown or of another type, or a number
            is not finite; says which.
    """
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if missing := sorted(fields.keys() - values.keys()):
        raise ValueError(f"without the field {missing[0]!r}")
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"with an unknown field {unknown[0]!r}")
    return cls(**{name: _typed(values[name], kind, name) for name, kind in fields.items()})


def _typed(value: Any, kind: Any, name: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            try:
                return _typed(value, one, name)
            except ValueError:
                continue
        raise _wrong(name, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(name, value)
        return tuple(_typed(part, inner[0], name) for part in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _wrong(name, value)
        return {key: _typed(part, inner[1], name) for key, part in value.items()}
    if kind is type(None) and value is None:
        return None
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is not kind or kind is float:
        raise _wrong(name, value)
    return value


def _wrong(name: str, value: object) -> ValueError:
    return ValueError(f"with {name}={value!r}, which is of the wrong type")
