"""An unfinished profile's state, in a file beside the one it will become."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvkeep.errors import HeadProfileError

_SUFFIX = ".unfinished.safetensors"
_FORMAT = "kvkeep unfinished head profile 1"


def state_file_of(profile_file: str | os.PathLike[str]) -> Path:
    """Where the state of an unfinished profile lies."""
    path = Path(profile_file)
    return path.with_name(path.name + _SUFFIX)


def save_state(
    path: Path, done: int, state: Mapping[str, mx.array], run: Mapping[str, Any]
) -> None:
    """Write the state after `done` steps, under another name first and then moved.

    Args:
        run: what makes the run the one it is, as plain values.

    Raises:
        HeadProfileError: it cannot be written.
    """
    metadata = {"format": _FORMAT, "done": str(done), "run": json.dumps(run, sort_keys=True)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-") as folder:
            temporary = Path(folder) / "state.safetensors"
            mx.save_safetensors(str(temporary), dict(state), metadata)
            os.replace(temporary, path)
    except (OSError, RuntimeError, ValueError) as error:
        raise HeadProfileError(f"cannot write {path}", received=str(error)) from error


def load_state(
    path: Path, like: Mapping[str, mx.array], run: Mapping[str, Any]
) -> tuple[int, dict[str, mx.array]] | None:
    """(steps done, state) of an unfinished profile, or None where there is none.

    Args:
        like: a state of this run: names, shapes and dtypes must be the same.
        run: as in `save_state`; must be the same.

    Raises:
        HeadProfileError: the file is of another run, or damaged; names what differs.
    """
    if not path.exists():
        return None
    remedy = f"Delete {path} to begin anew, or give another output file."
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        state, metadata = loaded
        if metadata.get("format") != _FORMAT:
            raise ValueError("no state of an unfinished head profile")
        done, saved = int(metadata["done"]), json.loads(metadata["run"])
        if {k: (v.shape, v.dtype) for k, v in state.items()} != {
            k: (v.shape, v.dtype) for k, v in like.items()
        } or not all(bool(mx.isfinite(v).all().item()) for v in state.values()):
            raise ValueError("arrays of another kind")
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeadProfileError(
            f"{path} cannot be gone on with",
            expected="a complete file of an interrupted `kvkeep heads profile`",
            received=f"{error}",
            remedy=remedy,
        ) from error
    now = json.loads(json.dumps(run))
    for name in sorted({*now, *saved}):
        if now.get(name) != saved.get(name):
            raise HeadProfileError(
                f"{path} is of a run with another {name}",
                expected=f"{now.get(name)}",
                received=f"{saved.get(name)}",
                remedy=remedy,
            )
    return done, state
