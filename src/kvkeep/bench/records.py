"""Frozen dataclasses to JSON and back, every value checked against its declared type."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar, Union

from kvkeep.errors import BenchFileError

D = TypeVar("D")


def as_json(value: Any) -> Any:
    """A dataclass of plain values, tuples and dataclasses as what `json` writes."""
    return dataclasses.asdict(value)


def from_json(kind: type[D], value: Any, where: str) -> D:
    """A dataclass from what `as_json` gave.

    Args:
        kind: whose fields are int, float, str, Literal, X | None, tuple[X, ...] or such
            dataclasses themselves.
        where: named in errors.

    Raises:
        BenchFileError: a field is missing, unknown, or of another type.
    """
    if not isinstance(value, dict):
        raise _fault(where, f"the fields of a {kind.__name__}", value)
    hints = typing.get_type_hints(kind)
    if value.keys() != hints.keys():
        odd = ", ".join(sorted(hints.keys() ^ value.keys()))
        raise _fault(where, f"{', '.join(hints)}", f"{odd} missing or too much")
    return kind(
        **{name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}
    )


def _read(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where)
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in choices:
            raise _fault(where, f"one of {', '.join(map(str, choices))}", value)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _fault(where, "a list", value)
        return tuple(_read(choices[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin in (Union, types.UnionType):
        (inner,) = (choice for choice in choices if choice is not type(None))
        return None if value is None else _read(inner, value, where)
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise _fault(where, {int: "a whole number", float: "a number", str: "text"}[hint], value)
    return hint(value)


def _fault(where: str, expected: str, received: Any) -> BenchFileError:
    shown = received if isinstance(received, str) else repr(received)
    return BenchFileError(f"bad value at {where}", expected=expected, received=shown[:120])
