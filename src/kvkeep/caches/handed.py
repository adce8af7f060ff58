"""What a cache hands a model when its rows are no plain array."""

from __future__ import annotations

from typing import Any, NoReturn

from kvkeep.errors import UnsupportedModelError


class RowsForAttentionOnly:
    """Stands for rows that only the cache they belong to can attend to.

    A model passes it on to mlx-lm's attention call, where its cache takes over. Anything
    else that is done with it raises `UnsupportedModelError` (MLX's own functions, which take
    nothing but arrays, raise TypeError).
    """

    __slots__ = ("__weakref__", "_owner")  # the seam tells weakly whose they are

    def __init__(self, owner: str) -> None:
        object.__setattr__(self, "_owner", owner)

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(repr(name))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._refuse(f"setting {name!r}")

    def _refuse(self, what: str) -> NoReturn:
        owner = object.__getattribute__(self, "_owner")
        raise UnsupportedModelError(
            f"the model reads the rows of a {owner} outside mlx-lm's attention call",
            expected="keys and values handed to scaled_dot_product_attention as they came",
            received=what,
            remedy="Keep equally many rows per head (store='per-head') for this model.",
        )

    def read_by_another_layer(self) -> NoReturn:
        """Refuse attention over these rows under another cache (or none)."""
        self._refuse("attention of another layer, or without a cache")

    def __deepcopy__(self, memo: object) -> RowsForAttentionOnly:
        return self


def _refusing(name: str) -> Any:
    def method(self: RowsForAttentionOnly, *_: Any, **__: Any) -> NoReturn:
        self._refuse(name)

    return method


# Python looks operators up on the class, so __getattr__ does not see them.
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or")
_OTHERS = ("getitem", "setitem", "iter", "len", "bool", "neg", "invert", "abs", "float", "int")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_OPERATORS, *(f"r{op}" for op in _OPERATORS), *_OTHERS, *_COMPARISONS):
    setattr(RowsForAttentionOnly, f"__{_name}__", _refusing(f"__{_name}__"))
RowsForAttentionOnly.__hash__ = object.__hash__


def require_handed(handed: object, keys: object, values: object, owner: str) -> None:
    """Refuse attention over anything but what the cache handed out last.

    Raises:
        UnsupportedModelError: keys or values are something else.
    """
    if handed is None or keys is not handed or values is not handed:
        received = "the rows of another call or cache"
        if type(keys) is not RowsForAttentionOnly:
            received = type(keys).__name__
        raise UnsupportedModelError(
            f"attention over a {owner} with rows that it did not hand out",
            expected="what update_and_fetch returned in this step",
            received=received,
            remedy="Keep equally many rows per head (store='per-head') for this model.",
        )
