"""The BLAS is found, loaded before mlx, said once, and never half: in fresh processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from kvkeep import blas

SOURCE = Path(blas.__file__)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux loads a BLAS")

# The module on its own, as the package imports nothing before it; the result goes out as JSON.
ALONE = f"""
import dataclasses, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("blas", {str(SOURCE)!r})
blas = importlib.util.module_from_spec(spec)
sys.modules["blas"] = blas
spec.loader.exec_module(blas)
def show(**more):
    print(json.dumps({{**dataclasses.asdict(blas.load()), **more}}))
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process whose environment holds nothing that steers a BLAS."""
    keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
    command = [sys.executable, "-c", ALONE + code]
    return subprocess.run(
        command, env={**keep, **environment}, capture_output=True, text=True, timeout=120
    )


def result(code: str = "show()", **environment: str) -> dict[str, Any]:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def reference_blas() -> str:
    """The slow BLAS inside mlx's CPU wheel: a real library with a CBLAS that is always there."""
    folder = Path(sysconfig.get_path("platlib"), "mlx_cpu.libs")
    found = sorted(folder.glob("libblas-*"))
    if not found:
        pytest.skip("this mlx is no CPU wheel with a BLAS of its own")
    return str(found[0])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """In this process: as if `load` had not been called, mlx not imported, no BLAS there yet."""
    monkeypatch.setattr(blas, "_state", None)
    monkeypatch.setattr(blas, "_present", lambda: None)
    monkeypatch.setattr(blas, "_is_gpu_build", lambda: False)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("KVKEEP_BLAS", raising=False)
    return monkeypatch


def test_off_keeps_mlx_own() -> None:
    assert result(KVKEEP_BLAS="OFF")["status"] == "off"


@linux
def test_a_given_path_is_loaded_into_the_global_scope(reference_blas: str) -> None:
    code = "import ctypes; blas.load(); show(where=blas._file_of(ctypes.CDLL(None).cblas_sgemm))"
    got = result(code, KVKEEP_BLAS=reference_blas)
    assert (got["status"], got["path"], got["where"]) == ("loaded", reference_blas, reference_blas)


@linux
def test_a_path_that_does_not_load_is_an_error_naming_it() -> None:
    done = run("blas.load()", KVKEEP_BLAS="/nowhere/libfast.so")
    assert done.returncode == 1
    assert "BlasError: KVKEEP_BLAS names '/nowhere/libfast.so'" in done.stderr
    assert "'off'" in done.stderr


@linux
def test_a_library_without_cblas_is_an_error_naming_what_it_lacks() -> None:
    done = run("blas.load()", KVKEEP_BLAS="libm.so.6")
    assert done.returncode == 1
    assert "'libm.so.6'" in done.stderr and "it has no cblas_sgemm" in done.stderr


@linux
def test_a_preloaded_blas_is_left_alone(reference_blas: str) -> None:
    got = result(LD_PRELOAD=reference_blas)
    assert (got["status"], got["path"]) == ("preloaded", reference_blas)


@linux
def test_mlx_first_warns_once_at_the_importing_line(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import mlx.core\n\nimport kvkeep\nkvkeep.blas.load()\n")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parents[1])}
    environment.pop("LD_PRELOAD", None)
    environment.pop("KVKEEP_BLAS", None)
    if blas.load().status == "unneeded":
        pytest.skip("mlx's GPU build is installed: the order does not matter")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert f"{script}:3: RuntimeWarning: mlx was imported before kvkeep" in done.stderr
    silenced = {**environment, "KVKEEP_BLAS": "off"}
    done = subprocess.run(command, env=silenced, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@linux
def test_importing_the_module_imports_no_mlx() -> None:
    assert result("show(mlx=[m for m in sys.modules if m.startswith('mlx')])")["mlx"] == []


@linux
def test_nothing_found_says_what_to_install_where_a_user_sees_it() -> None:
    code = "blas._present = lambda: None; blas._candidates = lambda: iter(()); blas.load(); show()"
    done = run("blas._is_gpu_build = lambda: False\n" + code)
    assert json.loads(done.stdout)["status"] == "missing"
    assert done.stderr.count("No fast BLAS found") == 1  # no logging set up: Python's last resort
    assert "pip install 'kvkeep[cpu]'" in done.stderr and "libopenblas0" in done.stderr


def test_what_was_loaded_is_said_once_at_info_level(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(sys, "platform", "linux")
    fresh.setattr(blas, "_candidates", lambda: iter(["a", "b"]))
    fresh.setattr(blas, "_open", lambda name, **_: "/x/libopenblas.so.0" if name == "b" else None)
    with caplog.at_level(logging.INFO, logger="kvkeep"):
        first, second = blas.load(), blas.load()
    assert first is second
    assert (first.name, first.status) == ("OpenBLAS", "loaded")
    assert [r.getMessage() for r in caplog.records] == [first.reason]
    assert "/x/libopenblas.so.0" in first.reason


def test_nothing_is_touched_on_macos(fresh: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a library was asked for")

    fresh.setattr(sys, "platform", "darwin")
    fresh.setattr(blas.ctypes, "CDLL", refuse)
    assert blas.load().status == "unneeded"


@linux
def test_a_gpu_build_needs_none(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    assert result("show(gpu=blas._is_gpu_build())", PYTHONPATH=str(tmp_path))["gpu"] is False
    (tmp_path / "mlx_cuda_12-0.32.4.dist-info").mkdir()
    assert result(PYTHONPATH=str(tmp_path))["status"] == "unneeded"


@pytest.mark.parametrize(("intel", "first"), [(True, "mkl"), (False, "openblas")])
def test_mkl_leads_on_intel_only(fresh: pytest.MonkeyPatch, intel: bool, first: str) -> None:
    fresh.setattr(blas, "_is_intel", lambda: intel)
    fresh.setattr(blas, "_mkl_candidates", lambda: iter(["mkl"]))
    fresh.setattr(blas, "_openblas_candidates", lambda: iter(["openblas"]))
    names = list(blas._candidates())
    assert names[0] == first and sorted(names) == ["mkl", "openblas"]


def test_mkl_is_found_where_its_package_says(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class File(type(Path())):
        def locate(self) -> Path:
            return tmp_path / "site-packages" / self

    files = [File("../lib/libmkl_core.so.3"), File("../lib/libmkl_rt.so.3")]
    fresh.setattr(blas.importlib.metadata, "files", lambda _: files)
    assert next(blas._mkl_candidates()) == str(tmp_path / "lib" / "libmkl_rt.so.3")


class FakeMkl:
    """Records what the dispatcher is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.calls.append((name, value))


@pytest.mark.parametrize(
    ("layer", "loadable", "told"),
    [
        (None, {"libiomp5.so"}, []),
        (None, {"libgomp.so.1"}, [("MKL_Set_Threading_Layer", 3)]),
        (None, set(), [("MKL_Set_Threading_Layer", 1)]),
        ("GNU", set(), []),
    ],
)
def test_mkl_never_gets_a_thread_library_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, layer: str | None, loadable: set[str], told: list[Any]
) -> None:
    monkeypatch.delenv("MKL_THREADING_LAYER", raising=False)
    if layer is not None:
        monkeypatch.setenv("MKL_THREADING_LAYER", layer)
    monkeypatch.setattr(blas, "_opens", lambda name: name in loadable)
    library: Any = FakeMkl()
    blas._settle_mkl(library, Path("/x"))
    assert library.calls == [("MKL_Set_Interface_Layer", 0), *told]


@linux
@pytest.mark.parametrize("layer", ["INTEL", "TBB"])
def test_real_mkl_survives_a_hostile_environment(layer: str) -> None:
    paths = [p for p in blas._mkl_candidates() if Path(p).exists()]
    if not paths:
        pytest.skip("PyPI's mkl is not installed")
    code = """
blas.load()
import mlx.core as mx, numpy as np
a = np.random.default_rng(0).standard_normal((300, 300)).astype("f4")
show(error=float(abs(np.array(mx.array(a) @ mx.array(a).T) - a @ a.T).max()),
     ilp64=any("ilp64" in line for line in open("/proc/self/maps")))
"""
    hostile = {"MKL_INTERFACE_LAYER": "ILP64", "MKL_THREADING_LAYER": layer}
    got = result(code, KVKEEP_BLAS=paths[0], **hostile)
    assert got["name"] == "MKL" and not got["ilp64"]
    assert got["error"] < 1e-3


@linux
def test_what_is_loaded_is_what_mlx_uses() -> None:
    """A library in the process proves nothing: its speed does."""
    if blas.load().status not in ("loaded", "preloaded"):
        pytest.skip(f"no BLAS to compare with: {blas.load().reason}")
    code = "blas.load(); show(gflops=blas.probe_gflops(512, 0.2))"
    own, found = (result(code, **extra)["gflops"] for extra in ({"KVKEEP_BLAS": "off"}, {}))
    assert 0 < own < found / 3
