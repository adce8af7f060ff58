"""How much of the cache may stay: rows per KV head, a share of the prompt, or bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from kvkeep.errors import BudgetError

BudgetUnit = Literal["rows", "share", "bytes"]

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_TEXT = re.compile(r"^\s*(?P<number>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>%|[A-Za-z]+)?\s*$")
_LIMIT = 2**63  # beyond any memory; larger integers do not even fit a float
_EXPECTED = 'rows (2048), a share of the prompt ("25%" or 0.25) or bytes ("512MB")'


@dataclass(frozen=True)
class Budget:
    """What may stay of a prompt's cache.

    Attributes:
        amount: rows per KV head (int >= 1), share of the prompt in (0, 1], or bytes
            of the whole cache (int >= 1).
        unit: which of the three `amount` is.

    Raises:
        BudgetError: the amount is out of range for its unit.
    """

    amount: float
    unit: BudgetUnit = "rows"

    def __post_init__(self) -> None:
        if self.unit not in get_args(BudgetUnit):
            raise BudgetError("unknown budget unit", expected=_EXPECTED, received=self.unit)
        if not abs(self.amount) < _LIMIT:  # NaN compares false
            shown = f"{self.amount:.6g}" if isinstance(self.amount, float) else "2**63 or more"
            raise BudgetError("budget is not finite", expected=_EXPECTED, received=shown)
        if self.unit == "share":
            if not 0 < self.amount <= 1:
                raise BudgetError(
                    "budget share out of range",
                    expected="more than 0% and at most 100%",
                    received=f"{self.amount:.6g} (= {100 * self.amount:.6g}%)",
                )
        elif self.amount < 1 or self.amount != int(self.amount):
            raise BudgetError(
                f"budget of {self.amount} {self.unit}",
                expected=f"a whole number of {self.unit}, at least 1",
                received=self.amount,
            )

    @classmethod
    def parse(cls, value: Budget | int | float | str) -> Budget:
        """Read a budget as Python keywords, flags and requests spell it.

        An int is rows; a float is a share; a string is `"2048"`, `"0.25"`, `"25%"` or
        `"512MB"` (KB, MB, GB decimal; KiB, MiB, GiB binary).

        Raises:
            BudgetError: the value is none of these or out of range.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or value is None:
            raise BudgetError("unreadable budget", expected=_EXPECTED, received=repr(value))
        if isinstance(value, Integral):  # NumPy's as well
            return cls(int(value), "rows")
        if isinstance(value, Real):
            return cls(float(value), "share")
        if isinstance(value, str):
            return cls._parse_text(value)
        raise BudgetError("unreadable budget", expected=_EXPECTED, received=repr(value))

    @classmethod
    def _parse_text(cls, text: str) -> Budget:
        match = _TEXT.match(text)
        if match is None:
            raise BudgetError("unreadable budget", expected=_EXPECTED, received=repr(text))
        number, unit = match["number"], match["unit"]
        if unit == "%":
            return cls(float(number) / 100, "share")
        if unit is None:
            return cls(float(number), "share") if "." in number else cls(int(number), "rows")
        factor = _BYTE_UNITS.get(unit.upper())
        if factor is None:
            raise BudgetError("unknown budget unit", expected=_EXPECTED, received=repr(text))
        return cls(int(float(number) * factor), "bytes")

    def rows(self, length: int, *, bytes_per_row: int = 0, fixed_bytes: int = 0) -> int:
        """Rows per KV head that this budget allows, between 1 and `length`.

        Args:
            length: T, the positions a share refers to.
            bytes_per_row: bytes of one row in every evictable layer and head together.
            fixed_bytes: bytes of the layers that are not evicted; a byte budget is for
                the whole cache, so they count against it.

        Raises:
            BudgetError: a byte budget does not hold one row.
        """
        if self.unit == "rows":
            return min(int(self.amount), length)
        if self.unit == "share":
            # The small term keeps 0.29 * 100 = 28.999... from losing a row.
            return min(max(1, math.floor(self.amount * length + 1e-9)), length)
        rows = (int(self.amount) - fixed_bytes) // max(bytes_per_row, 1)
        if rows < 1:
            raise BudgetError(
                "byte budget holds no row",
                expected=f"at least {fixed_bytes + bytes_per_row} bytes"
                f" ({fixed_bytes} of layers that are never evicted + {bytes_per_row} a row)",
                received=f"{int(self.amount)} bytes",
                remedy="Raise --kv-budget.",
            )
        return min(rows, length)

    def part_of_row(self, length: int) -> float:
        """What a share allows beyond whole `rows`, in [0, 1); 0 for other units."""
        if self.unit != "share":
            return 0.0
        return max(self.amount * length - self.rows(length), 0.0)

    def __str__(self) -> str:
        if self.unit == "share":
            return f"{100 * self.amount:g}%"
        return f"{int(self.amount)}" if self.unit == "rows" else f"{int(self.amount)}B"
