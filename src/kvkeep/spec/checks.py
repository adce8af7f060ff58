"""Checks of values that users give, shared by the rooms."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from kvkeep.errors import ConfigError, KvkeepError


def checked_count(
    name: str,
    value: SupportsIndex,
    least: int,
    error: type[KvkeepError] = ConfigError,
) -> int:
    """`value` as a Python int; NumPy's whole numbers count, bool and float do not.

    Raises:
        KvkeepError: of class `error`, when it is no whole number or less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise error(
            f"bad value for {name}",
            expected=f"a whole number >= {least}",
            received=repr(value),
        )
    return number
