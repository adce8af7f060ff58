"""Save and load prompt caches: atomic writes, and typed errors for bad files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx_lm.models.cache as mlx_cache

from kvkeep.errors import CacheFileError, KvkeepError
from kvkeep.reuse.register import register_caches

_SUFFIX = ".safetensors"


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: list[Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save a cache list (exact, compact or mixed) in mlx-lm's format.

    The file is written beside its place and moved there, so a reader never meets half of it.

    Args:
        file_name: ends in ".safetensors" (added where it is missing).
        metadata: text to keep with it.

    Raises:
        CacheFileError: the cache holds nothing, it or the metadata cannot be put into a
            file, or the file cannot be written. An older file stays as it was.
    """
    path = _with_suffix(file_name)
    if not cache or any(layer.empty() for layer in cache):
        raise CacheFileError(
            "nothing to save", expected="a cache list with rows in every layer", received="none"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-") as folder:
            temporary = Path(folder) / f"cache{_SUFFIX}"
            mlx_cache.save_prompt_cache(str(temporary), cache, dict(metadata or {}))
            os.replace(temporary, path)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise CacheFileError(f"cannot write {path}", received=str(error)) from error


def load_prompt_cache(file_name: str | os.PathLike[str], return_metadata: bool = False) -> Any:
    """Load a cache list that `save_prompt_cache` (kvkeep's or mlx-lm's) wrote.

    Args:
        file_name: ".safetensors" may be left out.
        return_metadata: give the saved text back as well.

    Returns:
        The cache list, or (cache list, metadata).

    Raises:
        CacheFileError: the file is missing, truncated, or no prompt cache.
    """
    register_caches()
    path = Path(file_name)
    if not path.is_file():
        path = _with_suffix(file_name)
    if not path.is_file():
        raise CacheFileError(
            "no such prompt cache", expected="a saved .safetensors file", received=str(file_name)
        )
    try:
        cache, metadata = mlx_cache.load_prompt_cache(str(path), return_metadata=True)
        for layer in cache:
            layer.empty()
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        detail = error.problem if isinstance(error, KvkeepError) else str(error)
        raise CacheFileError(
            f"{path} is not a readable prompt cache",
            expected="a complete file written by save_prompt_cache",
            received=f"{type(error).__name__}: {detail}",
            remedy="Save the cache again.",
        ) from error
    return (cache, metadata) if return_metadata else cache


def _with_suffix(file_name: str | os.PathLike[str]) -> Path:
    path = Path(file_name)
    return path if path.suffix == _SUFFIX else path.with_name(path.name + _SUFFIX)
