"""mlx-lm's cache base class, with the types that it leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import _BaseCache

if TYPE_CHECKING:

    class MlxCache:
        """What mlx-lm's `_BaseCache` promises, typed; at run time it is that class."""

        keys: Any  # None until the first row, as in mlx-lm
        values: Any

        @classmethod
        def from_state(cls, state: Any) -> Any:
            """A cache made of a `state`."""
            ...

else:
    MlxCache = _BaseCache
