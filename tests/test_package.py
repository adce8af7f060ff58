"""What the installed package promises: a version, types, documented names."""

from __future__ import annotations

import inspect
from importlib import metadata, resources

import kvkeep


def has_own_docstring(value: object) -> bool:
    """Whether a class, function or module has a docstring, neither inherited nor generated."""
    doc = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    # A dataclass or named tuple without a docstring gets its own signature as one.
    generated = f"{getattr(value, '__name__', '')}("
    return bool(doc.strip()) and not doc.startswith(generated)


def test_version_is_the_one_installed() -> None:
    assert metadata.version("kvkeep") == kvkeep.__version__


def test_types_are_shipped() -> None:
    assert resources.files("kvkeep").joinpath("py.typed").is_file()


def test_command_is_declared() -> None:
    (command,) = metadata.entry_points(group="console_scripts", name="kvkeep")
    assert callable(command.load())


def test_public_names_exist_once() -> None:
    assert kvkeep.__all__, "the package exports nothing"
    assert len(set(kvkeep.__all__)) == len(kvkeep.__all__)
    missing = [name for name in kvkeep.__all__ if not hasattr(kvkeep, name)]
    assert not missing, f"in __all__, but not in the package: {missing}"


def test_public_names_are_documented() -> None:
    values = {name: getattr(kvkeep, name) for name in kvkeep.__all__}
    # A plain value (a version, a tuple of names) cannot carry a docstring.
    speaking = {
        name: value
        for name, value in values.items()
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    }
    assert speaking, "the package exports no class or function"
    silent = [name for name, value in speaking.items() if not has_own_docstring(value)]
    assert not silent, f"public, but without a docstring of their own: {silent}"
