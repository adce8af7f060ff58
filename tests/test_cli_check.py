"""`kvkeep model check`: the layers, the bytes, the savings and the verdict."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import fault_of
from kvkeep.checking import check_model
from kvkeep.cli import model_check
from kvkeep.cli.main import main
from kvkeep.compaction import cache_nbytes
from tiny_folder import write_tiny_folder
from tiny_models import tiny_llama
from zoo import build
from zoo_oracle import prefilled


@pytest.fixture
def on_type(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on a model of the zoo, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "250")

    def use(kind: str) -> None:
        loaded = SimpleNamespace(model=build(kind))
        monkeypatch.setattr(model_check, "load_model", lambda *_, **__: loaded)

    return use


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> list[str]:
    assert main(["model", "check", "--model", "x", *argv]) == status
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_folder_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    assert main(["model", "check", "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    for part in ("0 – 1", "KVCache", "evicted", "8,192", "131,072", "75%", "exact", "'lookahead'"):
        assert part in out, out


def test_layers_that_stay_say_why(on_type: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_type("gemma3_text")
    lines = lines_of(capsys)
    assert "1 KVCache evicted 256 B" in " ".join(lines)
    assert "RotatingKVCache stay" in " ".join(lines) and "12 rows at most" in " ".join(lines)
    assert any(line.startswith("verdict partly") for line in lines)


def test_bytes_and_savings_are_those_of_filled_caches() -> None:
    for kind in ("gemma3_text", "falcon_h1", "deepseek_v3", "deepseek_v32", "gemma4"):
        model = build(kind)
        report = check_model(model)
        assert report.footprint is not None
        held = [cache_nbytes(prefilled(model, [1] * count, 1)) for count in (30, 40)]
        assert [report.footprint.nbytes(count) for count in (30, 40)] == held, kind
        rows = report.footprint.evictable_row_bytes
        assert held[1] - held[0] == 10 * rows, kind
        assert report.footprint.nbytes(40, kept=10) == held[1] - 30 * rows


def test_a_budget_in_bytes(on_type: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_type("llama")
    lines = lines_of(capsys, "--kv-budget", "1MB")
    assert any(line.endswith("whole cache at 1.00 MB saved") for line in lines)
    sizes = [line for line in lines if line.startswith("8,192 tokens")]
    assert sizes == ["8,192 tokens 8.39 MB 999.42 kB 88%"]  # whole rows
    on_type("gemma3_text")
    lines = lines_of(capsys, "--kv-budget", "1kB")
    assert any("holds no row" in line for line in lines)


def test_what_is_asked_for_is_refused_as_elsewhere(
    on_type: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on_type("gemma2")
    lines = lines_of(capsys, status=1)
    asked = " ".join(lines).partition("as asked")[2]
    assert "'lookahead' cannot see its queries" in asked and "keydiff" in asked
    assert any(line.startswith("verdict exact") for line in lines)
    assert lines_of(capsys, "--kv-eviction", "keydiff")[-1].endswith("works")


@pytest.mark.parametrize("kind", ["mamba", "bitnet"])
def test_a_model_that_is_refused(
    kind: str, on_type: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on_type(kind)
    lines = lines_of(capsys, status=1)
    assert lines[-1].startswith("verdict refused: it ")
    assert "%" not in " ".join(lines)


def test_eviction_off_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    line = fault_of(capsys, "model", "check", "--model", "x", "--kv-eviction", "none")
    assert line.startswith("there is nothing to check with eviction off")


def test_a_model_is_looked_at_once_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    from kvkeep.attention import facts_of

    model, evaluations = tiny_llama(), []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluations.append(arrays))
    facts = facts_of(model)
    assert facts_of(model) is facts and evaluations == []
