"""Made-up benchmark reports, whose figures are easy to check by hand."""

from __future__ import annotations

from typing import Any, Literal

from kvkeep.bench import (
    BenchReport,
    Compaction,
    DecodeResult,
    DecodeRun,
    Device,
    ModelFacts,
    Prefill,
    PromptResult,
    Session,
    Setting,
)

SPAN = Setting("span", "25%", "uniform", "auto")
RAGGED = Setting("snapkv", "512", "adaptive", "ragged")


def a_device(**changes: Any) -> Device:
    known: dict[str, Any] = {
        "kind": "cpu",
        "name": "Some CPU",
        "system": "Linux x86_64",
        "cores": 2,
        "blas": "MKL (loaded)",
        "python": "3.12.1",
        "mlx": "0.32.4",
        "mlx_lm": "0.32.2",
        "kvkeep": "0.1.0",
    }
    return Device(**{**known, **changes})


def a_model(**changes: Any) -> ModelFacts:
    known: dict[str, Any] = {
        "name": "demo",
        "identity": "llama:00",
        "dtype": "float32",
        "weights_nbytes": 538_000_000,
    }
    return ModelFacts(**{**known, **changes})


def a_decode(session: int = 0, batch: int = 2) -> DecodeResult:
    def run(role: Any, setting: Setting | None, rows: int, *seconds: float) -> DecodeRun:
        return DecodeRun(role, setting, rows, seconds, rows * 1000, rows * 1000 + 500, 10_000_000)

    return DecodeResult(
        length=2048,
        batch=batch,
        tokens=8,
        seed=0,
        session=session,
        runs=(
            run("exact", None, 2048, 2.0, 4.0, 8.0),
            run("bound", None, 512, 1.0, 1.0, 1.0),
            run("evicted", SPAN, 512, 1.0, 2.0, 1.6),
            run("evicted", RAGGED, 512, 2.0, 1.0, 4.0),
        ),
    )


def a_prompt(session: int = 0, *, read: bool = True) -> PromptResult:
    prefill = Prefill(
        setting=SPAN,
        seconds=(11.0, 20.0, 33.0),
        score_seconds=(0.9, 1.8, 2.7),
        compact_seconds=(0.2, 0.2, 0.6),
        peak_nbytes=(900_000_000, 910_000_000, 920_000_000),
    )
    stored: tuple[tuple[Setting, Literal["per-head", "ragged"]], ...]
    stored = ((SPAN, "per-head"), (RAGGED, "ragged"))
    compactions = tuple(
        Compaction(
            setting=setting,
            stored=store,
            rows=512,
            score_seconds=(0.5, 0.25, 1.0),
            compact_seconds=(0.001, 0.002, 0.004),
            exact_nbytes=94_000_000,
            compact_nbytes=23_500_000,
            exact_allocated=106_000_000,
            compact_allocated=24_000_000,
        )
        for setting, store in stored
    )
    return PromptResult(
        length=2048,
        step=512,
        seed=0,
        session=session,
        stock_seconds=(10.0, 20.0, 30.0) if read else (),
        stock_peak_nbytes=(900_000_000,) * 3 if read else (),
        prefills=(prefill,) if read else (),
        compactions=compactions,
    )


def a_report(*results: Any, load: float = 0.5) -> BenchReport:
    session = Session("2026-11-30T12:00:00+00:00", load, 1.0, 2)
    return BenchReport(a_device(), a_model(), (session,), results or (a_prompt(), a_decode()))
