"""Head profiles: their values, their file, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvkeep.errors import HeadProfileError
from kvkeep.spec import HeadProfile, load_head_profile

PLAIN = HeadProfile(
    model="llama:00ff",
    scores={1: (0.25, 1.0), 0: (0.5, 1e-7)},
    sinks=4,
    recent=64,
    method="recall",
    options={"length": 512, "lr": 0.02, "streaming_from": "start"},
    seed=3,
    steps=12,
    model_name="a model [with brackets]",
    versions={"mlx": "1.2"},
)


def test_saving_and_loading_gives_the_same_profile(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "heads.json"
    PLAIN.save(path)
    loaded = load_head_profile(path)
    assert loaded == PLAIN
    assert list(loaded.scores) == [0, 1]  # in the order of the layers
    assert loaded.kv_heads == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["heads.json"]


@given(
    st.dictionaries(
        st.integers(0, 99),
        st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3),
        min_size=1,
    )
)
def test_scores_survive_exactly(scores: dict[int, tuple[float, ...]]) -> None:
    import tempfile

    profile = dataclasses.replace(PLAIN, scores=scores)
    with tempfile.TemporaryDirectory() as folder:
        profile.save(Path(folder) / "x.json")
        assert load_head_profile(Path(folder) / "x.json").scores == scores


def test_the_heads_with_the_highest_scores_retrieve() -> None:
    assert PLAIN.retrieval_heads(0.5) == {(1, 1), (0, 0)}
    assert PLAIN.retrieval_heads(0.25) == {(1, 1)}
    assert PLAIN.retrieval_heads(0) == frozenset()
    assert len(PLAIN.retrieval_heads(1)) == 4
    ties = dataclasses.replace(PLAIN, scores={0: (1, 1), 1: (1, 1)})
    assert ties.retrieval_heads(0.75) == {(0, 0), (0, 1), (1, 0)}
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(HeadProfileError, match="share of heads"):
            PLAIN.retrieval_heads(share)


def test_a_profile_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.sinks = 5  # type: ignore[misc]
    scores: Any = PLAIN.scores
    with pytest.raises(TypeError):
        scores[0] = (1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": {}}, "no scores"),
        ({"scores": {0: ()}}, "no scores"),
        ({"scores": {0: (1.0,), 1: (1.0, 2.0)}}, "unequal numbers of KV heads"),
        ({"scores": {0: (float("nan"),)}}, "bad score in layer 0"),
        ({"scores": {0: (float("inf"),)}}, "bad score in layer 0"),
        ({"scores": {0: ("high",)}}, "bad score in layer 0"),
        ({"scores": {0: (True,)}}, "bad score in layer 0"),
        ({"scores": {-1: (1.0,)}}, "bad value for layer index"),
        ({"sinks": -1}, "bad value for sinks"),
        ({"recent": 0}, "bad value for recent"),
        ({"seed": 1.5}, "bad value for seed"),
        ({"steps": None}, "bad value for steps"),
        ({"model": ""}, "bad model"),
        ({"method": None}, "bad method"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadProfileError, match=message):
        dataclasses.replace(PLAIN, **change)


def damaged(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "heads.json"
    PLAIN.save(path)
    text = path.read_text(encoding="utf-8")
    if callable(change):
        content = json.loads(text)
        change(content)
        text = json.dumps(content)
    else:
        text = text[:change]
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (0, "no complete head profile"),
        (100, "no complete head profile"),
        (-3, "no complete head profile"),
        (lambda c: c.pop("format"), "no head profile"),
        (lambda c: c.update(format="something else"), "no head profile"),
        (lambda c: c.update(version=2), "another layout; expected version 1; got version 2"),
        (lambda c: c.pop("version"), "another layout"),
        (lambda c: c.pop("sinks"), "incomplete; expected an entry 'sinks'"),
        (lambda c: c.pop("scores"), "incomplete"),
        (lambda c: c.update(scores=[[1.0]]), "damaged"),
        (lambda c: c.update(scores={"0": 1.0}), "damaged"),
        (lambda c: c.update(scores={"first": [1.0]}), "bad layer index"),
        (lambda c: c.update(scores={"0": [float("nan")]}), "bad score in layer 0"),
        (lambda c: c.update(scores={"0": [None]}), "bad score in layer 0"),
        (lambda c: c.update(options=3), "damaged"),
        (lambda c: c.update(model=7), "bad model"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = damaged(tmp_path, change)
    with pytest.raises(HeadProfileError) as caught:
        load_head_profile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadProfileError, match="no readable head profile"):
        load_head_profile(tmp_path / "missing.json")
    with pytest.raises(HeadProfileError, match="no readable head profile"):
        load_head_profile(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HeadProfileError, match="no complete head profile"):
        load_head_profile(tmp_path / "bytes")
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(HeadProfileError, match="is no head profile"):
        load_head_profile(tmp_path / "list")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(HeadProfileError, match="cannot write"):
        PLAIN.save(tmp_path / "taken" / "heads.json")
    assert (tmp_path / "taken").read_text() == "a file, not a folder"
