"""Which layers to show."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.errors import ConfigError


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer indices from text such as "0-5,12".

    Raises:
        ConfigError: it is unreadable.
    """
    indices: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            start, stop = int(first), int(last or first)
            if not 0 <= start <= stop < 10_000:
                raise ValueError(part)
            indices.update(range(start, stop + 1))
    except ValueError:
        raise ConfigError(
            "unreadable layers", expected='indices and ranges such as "0-5,12"', received=text
        ) from None
    return tuple(sorted(indices))


def require_shown(indices: Sequence[int], evictable: Sequence[int]) -> None:
    """Refuse layers that are not among the evictable ones.

    Raises:
        ConfigError: names the first.
    """
    for index in indices:
        if index not in evictable:
            first, last = min(evictable), max(evictable)
            raise ConfigError(
                f"layer {index} cannot be shown",
                expected=f"evictable layers, {len(evictable)} from {first} to {last}",
                received=index,
            )


def thinned(layers: list[int], cells: list[int], most: int) -> list[int]:
    """Every layer, or every n-th of them where they have too many cells.

    Args:
        layers: what to choose from, in order.
        cells: what each of them costs.
        most: what all may cost; one layer is always left.
    """
    step = 1
    while step < len(layers) and sum(cells[::step]) > most:
        step += 1
    return layers[::step]
