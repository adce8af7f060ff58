"""Numbers as a person reads them."""

from __future__ import annotations


def nbytes(amount: float) -> str:
    """Bytes (decimal units)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount:.0f} B"


def count(number: int) -> str:
    """A whole number with its thousands apart."""
    return f"{number:,}"


def percent(part: float, whole: float) -> str:
    """A share with one decimal."""
    return f"{100 * part / whole:.1f}%" if whole else "–"
