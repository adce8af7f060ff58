"""docs/models.md says what eviction does on each model type of the mlx-lm that is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

import models_table as models
from zoo import NAMED, ZOO

REMEDY = (
    "Give new types a tiny configuration in tests/zoo_more.py (or a reason in NOT_BUILT of"
    " tests/models_table.py), run tests/test_zoo.py, and then `make models`."
)
#: Files of mlx-lm that hold parts of models and no type.
PARTS = {
    *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline"),
    *("rope_utils", "ssm", "switch_layers"),
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(models.JSON.read_text(encoding="utf-8"))


def test_every_file_of_mlx_lm_is_as_it_was_looked_at(recorded: dict[str, Any]) -> None:
    now = {name: models.digest(path) for name, path in models.source_files().items()}
    then = recorded["files"]
    changed = sorted(name for name in now if now[name] != then.get(name))
    gone = sorted(set(then) - set(now))
    assert not changed and not gone, (
        f"mlx-lm has other model files than the table was made of: new or changed {changed},"
        f" gone {gone}. {REMEDY}"
    )


def test_every_file_has_a_verdict(recorded: dict[str, Any]) -> None:
    files = set(models.source_files()) - PARTS
    known = {
        str(models.MODEL_REMAPPING.get(kind, kind)).replace("-", "_") for kind in recorded["types"]
    }
    known |= {kind for kind in recorded["types"]}
    missing = sorted(name for name in files if name not in known)
    assert not missing, f"no verdict for {missing}. {REMEDY}"


def test_the_table_is_what_the_models_show(recorded: dict[str, Any]) -> None:
    for kind in sorted(ZOO):
        then = recorded["types"].get(kind)
        now = models.entry(kind)
        if then is not None and then["verdict"] == "not here":
            continue  # on a machine with Metal there is more to say
        assert now == then, f"{kind} shows something else than docs/models.json says. {REMEDY}"


def test_the_page_is_made_of_the_table(recorded: dict[str, Any]) -> None:
    assert models.PAGE.read_text(encoding="utf-8") == models.page(recorded)


def test_ninety_of_the_types_are_exact_or_partly(recorded: dict[str, Any]) -> None:
    verdicts = [recorded["types"][kind]["verdict"] for kind in NAMED]
    assert len(verdicts) == 98
    assert sum(verdict in ("exact", "partly") for verdict in verdicts) >= 90


def test_a_reason_is_a_line_that_is_understood(recorded: dict[str, Any]) -> None:
    for kind, line in recorded["types"].items():
        if line["verdict"] not in ("exact", "partly"):
            assert line["note"] and "\n" not in line["note"] and len(line["note"]) < 120, kind
