"""A fast BLAS for mlx on Linux CPUs, loaded before mlx itself.

The CPU wheel of mlx is linked to the reference BLAS, tens of times slower than the machine. Symbols
in the process's global scope win over those a library brings along, so another `cblas_sgemm` put
there *before* mlx is imported is the one mlx calls. Nothing happens on macOS and on GPU builds.

`KVKEEP_BLAS` overrides the search: `off`, or the path (or soname) of a shared library.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import logging
import os
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger("kvkeep")

Status = Literal["loaded", "preloaded", "off", "unneeded", "late", "missing"]

_ENTRY = "cblas_sgemm"  # what mlx calls for float32 products; its sizes are 32-bit integers
_OPENBLAS_SONAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblaso.so.0")
_OPENBLAS_DIRS = (
    "/usr/lib/{arch}/openblas-pthread",
    "/usr/lib/{arch}/openblas-openmp",
    "/usr/lib/{arch}",
    "/usr/lib64",
    "/usr/local/lib",
    "/opt/OpenBLAS/lib",
)
_MKL_LP64, _MKL_SEQUENTIAL, _MKL_GNU = 0, 1, 3  # arguments of MKL_Set_{Interface,Threading}_Layer
_REMEDY = (
    "Install one with: pip install 'kvkeep[cpu]' (x86-64), or your system's OpenBLAS"
    " (Debian, Ubuntu: apt install libopenblas0). KVKEEP_BLAS=off silences this."
)


class BlasError(OSError):
    """The library that `KVKEEP_BLAS` names cannot be loaded or is no BLAS."""


@dataclass(frozen=True)
class Blas:
    """Which BLAS mlx's CPU backend will call, and why.

    Attributes:
        name: "MKL", "OpenBLAS", another library's file name, or "mlx's own".
        path: file of the library; None where none was loaded.
        status: "loaded" (by us), "preloaded" (was in the process already, e.g. by LD_PRELOAD),
            "off" (`KVKEEP_BLAS=off`), "unneeded" (macOS, GPU build), "late" (mlx was imported
            first: nothing can change any more) or "missing" (none found).
        reason: one sentence for a person.
    """

    name: str
    path: str | None
    status: Status
    reason: str


_state: Blas | None = None


def load() -> Blas:
    """Load the best BLAS found into the global scope; later calls return the first one's result.

    Says what it did once: at level info of the logger "kvkeep", as a warning of that logger where
    no fast BLAS was found, and as a `RuntimeWarning` at the caller's import where mlx came first,
    because that one is mended in the caller's code.

    Raises:
        BlasError: `KVKEEP_BLAS` names a file that does not load or has no `cblas_sgemm`.
    """
    global _state
    if _state is None:
        _state = _load()
        if _state.status == "late":
            # Frame 3 is whoever imports kvkeep, whose __init__ calls load().
            warnings.warn(_state.reason, RuntimeWarning, stacklevel=3)
        else:
            level = logging.WARNING if _state.status == "missing" else logging.INFO
            logger.log(level, "%s", _state.reason)
    return _state


def probe_gflops(size: int = 768, seconds: float = 0.25) -> float:
    """Speed of a float32 product [size, size] x [size, size] on mlx's CPU backend, in GFLOP/s.

    A library that got loaded need not be the one in use; this measures the one that is. Best of the
    runs that start within `seconds`, after one to warm up. Imports mlx.
    """
    import mlx.core as mx

    with mx.stream(mx.cpu):
        a, b = mx.random.normal((size, size)), mx.random.normal((size, size))
        mx.eval(a @ b)
        best = float("inf")
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            mx.eval(a @ b)
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def _load() -> Blas:
    asked = os.environ.get("KVKEEP_BLAS", "").strip()
    own = "mlx's own"
    if asked.lower() == "off":
        return Blas(own, None, "off", "KVKEEP_BLAS=off: mlx's CPU backend keeps its own BLAS.")
    if sys.platform != "linux":
        return Blas(own, None, "unneeded", f"mlx brings its own fast BLAS on {sys.platform}.")
    if not asked and (present := _present()) is not None:
        text = f"The process already has a BLAS, which mlx's CPU backend calls: {present}."
        return Blas(_title(present), present, "preloaded", text)
    if not asked and _is_gpu_build():
        return Blas(own, None, "unneeded", "mlx's GPU build is installed: it needs no CPU BLAS.")
    if "mlx.core" in sys.modules:
        return Blas(own, None, "late", _late_text(asked))
    if asked:
        path = _open(os.path.expanduser(asked), asked=True)
    else:
        path = next((p for c in _candidates() if (p := _open(c)) is not None), None)
    if path is None:
        text = "No fast BLAS found: products on the CPU will run tens of times slower. " + _REMEDY
        return Blas(own, None, "missing", text)
    return Blas(_title(path), path, "loaded", f"mlx's CPU backend uses {_title(path)} ({path}).")


def _late_text(asked: str) -> str:
    effect = f"KVKEEP_BLAS={asked} has no effect" if asked else "its CPU backend keeps a slow BLAS"
    return (
        f"mlx was imported before kvkeep, so {effect}."
        " Import kvkeep first, or set KVKEEP_BLAS=off to silence this."
    )


def _candidates() -> Iterator[str]:
    """Libraries to try, best first: MKL leads on Intel's own processors only."""
    if _is_intel():
        yield from _mkl_candidates()
        yield from _openblas_candidates()
    else:
        yield from _openblas_candidates()
        yield from _mkl_candidates()


def _mkl_candidates() -> Iterator[str]:
    """PyPI's `mkl` puts its libraries under <prefix>/lib, or below the user's base with --user."""
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libmkl_rt.so"):
            yield os.path.normpath(str(file.locate()))
    roots = (sysconfig.get_path("data"), sysconfig.get_path("platlib"), sys.prefix)
    for root in dict.fromkeys(roots):
        for folder in (Path(root, "lib"), Path(root)):
            yield from sorted((str(p) for p in folder.glob("libmkl_rt.so*")), reverse=True)


def _openblas_candidates() -> Iterator[str]:
    """Conda's, the loader's own (by soname), then known folders; variants with threads first."""
    yield from (str(Path(sys.prefix, "lib", name)) for name in _OPENBLAS_SONAMES)
    yield from _OPENBLAS_SONAMES
    arch = sysconfig.get_config_var("MULTIARCH") or "."
    for folder in _OPENBLAS_DIRS:
        yield from (str(Path(folder.format(arch=arch), name)) for name in _OPENBLAS_SONAMES)
    if (found := ctypes.util.find_library("openblas")) is not None:
        yield found


def _open(name: str, *, asked: bool = False) -> str | None:
    """Load `name` into the global scope; its file, or None (an error if the user asked for it)."""
    try:
        library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        entry = getattr(library, _ENTRY)
    except (OSError, AttributeError) as error:
        if asked:
            detail = error if isinstance(error, OSError) else f"it has no {_ENTRY} (LP64 CBLAS)"
            raise BlasError(
                f"KVKEEP_BLAS names {name!r}, which cannot serve as mlx's BLAS: {detail}."
                " Expected the path of a shared library with a CBLAS interface, or 'off'."
            ) from error
        logger.debug("BLAS candidate %s: %s", name, error)
        return None
    path = _file_of(entry) or name
    if hasattr(library, "MKL_Set_Interface_Layer"):
        _settle_mkl(library, Path(path).parent)
    return path


def _settle_mkl(library: ctypes.CDLL, folder: Path) -> None:
    """Make MKL's dispatcher safe: it ends the process if it cannot load a part of itself."""
    library.MKL_Set_Interface_Layer(_MKL_LP64)  # mlx passes 32-bit sizes, whatever the caller set
    layer = os.environ.get("MKL_THREADING_LAYER", "INTEL").upper()
    if layer == "TBB":
        _opens(str(folder / "libtbb.so.12"))  # MKL looks for it by soname only
    elif layer == "INTEL" and not (_opens(str(folder / "libiomp5.so")) or _opens("libiomp5.so")):
        fallback = _MKL_GNU if _opens("libgomp.so.1") else _MKL_SEQUENTIAL
        library.MKL_Set_Threading_Layer(fallback)


def _opens(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _present() -> str | None:
    """File of the `cblas_sgemm` that the global scope holds already, if any."""
    entry = getattr(ctypes.CDLL(None), _ENTRY, None)
    return None if entry is None else (_file_of(entry) or "an unnamed library")


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of <dlfcn.h>."""

    _fields_ = [
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    ]


def _file_of(function: Any) -> str | None:
    """File that a loaded C function comes from, by `dladdr`."""
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None)
    info = _SymbolInfo()
    if dladdr is None or not dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)):
        return None
    return os.fsdecode(info.fname) if info.fname else None


def _title(path: str) -> str:
    name = os.path.basename(path)
    known = {"mkl_rt": "MKL", "openblas": "OpenBLAS"}
    return next((title for part, title in known.items() if part in name), name)


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(errors="replace")[:4096]
    except OSError:
        return False


def _is_gpu_build() -> bool:
    """Whether a CUDA wheel of mlx is installed, without importing mlx."""
    spec = importlib.util.find_spec("mlx")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(any(Path(f).parent.glob("mlx_cuda*.dist-info")) for f in folders)
