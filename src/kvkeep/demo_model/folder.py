"""The converted model's place on disk: where it lies, whether it is whole, how it gets there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import platformdirs

from kvkeep.demo_model.pin import CONVERSION, ModelPin
from kvkeep.errors import DemoModelError

logger = logging.getLogger("kvkeep")

State = Literal["absent", "damaged", "ready"]

MANIFEST = "kvkeep_model.json"
_PARTIAL = ".partial-"


def cache_dir() -> Path:
    """`KVKEEP_CACHE_DIR`, else the platform's cache directory for kvkeep."""
    if chosen := os.environ.get("KVKEEP_CACHE_DIR", "").strip():
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("kvkeep", appauthor=False)


def model_folder(pin: ModelPin, dtype: str) -> Path:
    """Folder of a model converted to `dtype` ("float32", "float16") by this conversion."""
    return cache_dir() / "models" / f"{pin.slug}-{dtype}-v{CONVERSION}"


def folder_state(folder: Path, pin: ModelPin) -> State:
    """Whether the folder is there, and whole: each file it was made with has the size it had."""
    if not folder.exists():
        return "absent"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        same_source = manifest["sha256"] == pin.sha256
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        whole = bool(sizes) and sizes == manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "damaged"
    return "ready" if same_source and whole else "damaged"


def write_manifest(folder: Path, pin: ModelPin, dtype: str) -> None:
    """Seal a folder: say what it was made from and how large each of its files is."""
    manifest = {
        "model": pin.title,
        "package": pin.package,
        "version": pin.version,
        "sha256": pin.sha256,
        "dtype": dtype,
        "conversion": CONVERSION,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def lock(models: Path) -> Iterator[bool]:
    """Hold the folder's lock, waiting for whoever has it; False on a file system without locks.

    The lock goes with its process, so none is left behind by one that was killed.
    """
    with open(models / ".lock", "a", encoding="utf-8") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("Another process is fetching the demo model; waiting for it.")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False  # `install` still keeps two processes apart, each then works for itself
            return
        yield True


@contextlib.contextmanager
def workspace(models: Path) -> Iterator[Path]:
    """A temporary folder beside the final one, so that a rename suffices; deleted on any exit."""
    path = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=models))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(models: Path) -> None:
    """Delete what killed processes left. Only for the holder of the lock."""
    for path in models.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def install(made: Path, target: Path, pin: ModelPin, *, trash: Path) -> None:
    """Move a finished folder into place in one step; an older one there goes to `trash` first.

    If another process put a whole one there meanwhile, that one stays.
    """
    if target.exists():
        with contextlib.suppress(FileNotFoundError):  # another process may have moved it first
            os.replace(target, trash / target.name)
    try:
        os.replace(made, target)
    except OSError:
        if folder_state(target, pin) != "ready":
            raise


def prepare(models: Path, needed: int) -> None:
    """Make the folder and check that it can take `needed` bytes.

    Raises:
        DemoModelError: not writable, or too little space.
    """
    remedy = "Set KVKEEP_CACHE_DIR to a directory with space that you may write to."
    try:
        models.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(models).free
        writable = os.access(models, os.W_OK | os.X_OK)
    except OSError as error:
        raise DemoModelError(
            f"The cache directory {models} cannot be used: {error}", remedy=remedy
        ) from error
    if not writable:
        raise DemoModelError(f"The cache directory {models} is not writable", remedy=remedy)
    if free < needed:
        raise DemoModelError(
            f"Too little disk space in {models}",
            expected=f"{needed / 1e6:.0f} MB free",
            received=f"{free / 1e6:.0f} MB",
            remedy=remedy,
        )
