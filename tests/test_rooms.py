"""The layout holds: imports go down the list of rooms, files and functions stay readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

PACKAGE = "kvkeep"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# From the ground up. A room may import those of earlier lines, but none that shares its line.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("blas",),
    ("errors",),
    ("spec",),
    ("policies",),
    ("allocation",),
    ("selection",),
    ("caches",),
    ("attention",),
    ("views",),
    ("choosing",),
    ("evictable",),
    ("compaction",),
    ("by_head",),
    ("footprint",),
    ("suite",),
    ("reuse",),
    ("generation",),
    ("checking",),
    ("comparing",),
    ("conversation",),
    ("pages",),
    ("haystack",),
    ("heads",),
    ("demo_model",),
    ("server", "evaluation", "bench", "inspecting"),
    ("reports",),
    ("cli",),
)
RANK = {room: rank for rank, line in enumerate(ROOMS) for room in line}
# What `kvkeep/__init__.py` gathers stands above the rooms; only the command line may ask for it.
FACADE_RANK = RANK["cli"]
# The facade and `python -m kvkeep` belong to no room and may import every one.
FREE_FILES = ("__init__.py", "__main__.py")

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 90


def imported_names(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Each import anywhere in a file, as (line, absolute dotted name), one per imported name.

    Args:
        tree: the parsed file.
        package: dotted name of the package that the file lies in; relative imports start there.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def room_of(path: Path, root: Path) -> str:
    """The room a file belongs to: its first folder below the package, or its own name."""
    return path.relative_to(root).with_suffix("").parts[0]


def import_faults(root: Path) -> list[str]:
    """Each import in the tree at `root` that goes up the list, and each room not on it."""
    faults = []
    files = sorted(root.rglob("*.py"))
    there = {room_of(path, root) for path in files}
    for path in files:
        place = path.relative_to(root)
        if place.as_posix() in FREE_FILES:
            continue
        room = room_of(path, root)
        if room not in RANK:
            faults.append(f"{place}: room '{room}' has no place in ROOMS of tests/test_rooms.py")
            continue
        package = ".".join([PACKAGE, *place.parts[:-1]])
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for line, name in imported_names(tree, package):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top != PACKAGE or target == room:
                continue
            if target not in RANK and target in there:
                continue  # that room has no place yet, and its own files say so
            if target not in RANK:
                allowed, shown = RANK[room] >= FACADE_RANK, f"'{name}' of the package itself"
            else:
                allowed, shown = RANK[target] < RANK[room], f"room '{target}'"
            if not allowed:
                faults.append(f"{place}:{line}: room '{room}' may not import {shown}")
    return faults


def size_faults(root: Path) -> list[str]:
    """Each file and function in the tree at `root` that is too long, each drawer of oddments."""
    faults = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if {"util", "utils"} & {*place.parts[:-1], place.stem}:
            faults.append(f"{place}: name the module after what it does, not 'utils'")
        text = path.read_text(encoding="utf-8")
        length = len(text.splitlines())
        if length > MAX_FILE_LINES:
            faults.append(f"{place}: {length} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text, filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    faults.append(
                        f"{place}:{node.lineno}: {node.name} has {length} lines, "
                        f"at most {MAX_FUNCTION_LINES}"
                    )
    return faults


def complain(title: str, faults: list[str]) -> None:
    if faults:
        pytest.fail("\n  ".join([title, *faults]), pytrace=False)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    return root


def test_imports_go_down_the_list_of_rooms() -> None:
    assert list(SOURCE.rglob("*.py")), f"no sources at {SOURCE}"
    complain("Imports that go up the list of rooms:", import_faults(SOURCE))


def test_files_and_functions_stay_short() -> None:
    assert list(SOURCE.rglob("*.py")), f"no sources at {SOURCE}"
    complain("Too long, or badly named:", size_faults(SOURCE))


@pytest.mark.parametrize(
    ("place", "text", "fault"),
    [
        (
            "policies/a.py",
            "import kvkeep.caches.compact",
            "room 'policies' may not import room 'caches'",
        ),
        (
            "policies/a.py",
            "from kvkeep.caches import X",
            "room 'policies' may not import room 'caches'",
        ),
        (
            "policies/a.py",
            "from kvkeep import caches",
            "room 'policies' may not import room 'caches'",
        ),
        ("policies/a.py", "from ..caches import X", "room 'policies' may not import room 'caches'"),
        ("policies/a.py", "from .. import caches", "room 'policies' may not import room 'caches'"),
        ("policies/deep/a.py", "from ...cli import X", "room 'policies' may not import room 'cli'"),
        ("selection.py", "from .caches import X", "room 'selection' may not import room 'caches'"),
        ("blas.py", "from kvkeep.errors import X", "room 'blas' may not import room 'errors'"),
        ("bench/a.py", "import kvkeep.server", "room 'bench' may not import room 'server'"),
        ("spec/a.py", "import kvkeep", "room 'spec' may not import 'kvkeep' of the package itself"),
        (
            "reuse/__init__.py",
            "from kvkeep import generate",
            "room 'reuse' may not import 'kvkeep.generate' of the package itself",
        ),
        ("utilities.py", "", "room 'utilities' has no place in ROOMS"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, place: str, text: str, fault: str) -> None:
    root = write_tree(tmp_path, {place: text})
    (found,) = import_faults(root)
    assert found.startswith(place)
    assert fault in found


def test_imports_inside_functions_and_type_checking_blocks_count(tmp_path: Path) -> None:
    source = """
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from kvkeep.generation import generate

        class A:
            def f(self):
                from kvkeep.cli import main
    """
    root = write_tree(tmp_path, {"caches/a.py": source})
    assert import_faults(root) == [
        "caches/a.py:5: room 'caches' may not import room 'generation'",
        "caches/a.py:9: room 'caches' may not import room 'cli'",
    ]


def test_right_imports_pass(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from kvkeep.cli import main\nfrom .caches import X",
        "__main__.py": "from kvkeep.cli.main import main",
        "blas.py": "import ctypes",
        "caches/a.py": "import numpy\nfrom kvkeep.spec import X\nfrom . import b\nfrom .b import Y",
        "caches/b.py": "from kvkeep.caches import a\nfrom ..selection import Z\nimport kvkeep.spec",
        "server/a.py": "from kvkeep import blas\nfrom mlx_lm import server",
        "cli/main.py": "from kvkeep import __version__\nfrom kvkeep import bench, server",
    }
    assert import_faults(write_tree(tmp_path, files)) == []


def test_what_is_too_long_or_badly_named_is_found(tmp_path: Path) -> None:
    body = "    x = 1\n"
    files = {
        "caches/long.py": "x = 1\n" * (MAX_FILE_LINES + 1),
        "caches/full.py": "x = 1\n" * MAX_FILE_LINES,
        "caches/wide.py": "def f():\n" + body * MAX_FUNCTION_LINES,
        "caches/fits.py": "async def g():\n" + body * (MAX_FUNCTION_LINES - 1),
        "spec/utils.py": "",
        "utils/a.py": "",
    }
    assert size_faults(write_tree(tmp_path, files)) == [
        "caches/long.py: 451 lines, at most 450",
        "caches/wide.py:1: f has 91 lines, at most 90",
        "spec/utils.py: name the module after what it does, not 'utils'",
        "utils/a.py: name the module after what it does, not 'utils'",
    ]
