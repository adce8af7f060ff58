"""Choosing by name and options, with refusals that say what there is."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from kvkeep.errors import ConfigError

T = TypeVar("T")


def named(kind: str, name: object, known: Mapping[str, T]) -> T:
    """The entry of that name.

    Args:
        kind: what is named, for the message.
        known: name -> entry.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    if isinstance(name, str) and name in known:
        return known[name]
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    raise ConfigError(
        f"unknown {kind} {name!r}",
        expected=f"one of {', '.join(sorted(known))}",
        received=repr(name),
        remedy=f"Did you mean {near[0]!r}?" if near else None,
    )


def with_options(kind: str, cls: type[T], name: str, options: Mapping[str, Any]) -> T:
    """An object of a dataclass; an option of None keeps its default.

    Raises:
        ConfigError: an option is unknown to it, or out of range.
    """
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"{kind} {name!r} has no option {unknown[0]!r}",
            expected=f"options {', '.join(sorted(known)) or '(none)'}",
            received=f"{unknown[0]}={given[unknown[0]]!r}",
            remedy=f"Leave it out, or choose one that has it ({kind}).",
        )
    return cls(**given)
