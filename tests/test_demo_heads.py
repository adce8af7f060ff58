"""The profiles of the demo model that come with the sources are the demo model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvkeep.heads import passkey_samples, require_profile_of
from kvkeep.spec import load_head_profile

pytestmark = pytest.mark.demo_model

FILES = sorted((Path(__file__).parents[1] / "docs" / "results" / "heads").glob("demo-*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_profile_belongs_to_the_demo_model(file: Path, demo_model: Any) -> None:
    profile = load_head_profile(file)
    require_profile_of(profile, demo_model[0])
    assert len(profile.scores) == len(demo_model[0].layers)
    assert profile.kv_heads == demo_model[0].args.num_key_value_heads


def test_there_are_shipped_profiles() -> None:
    names = ("estimate", "optimise", "optimise-words", "recall")
    assert {file.stem for file in FILES} == {f"demo-{name}" for name in names}


def test_passkeys_are_the_same_tokens_in_the_text_and_its_recall(demo_model: Any) -> None:
    tokenizer = demo_model[1]
    sample = passkey_samples(tokenizer, 400, passkeys=3, words=4, seed=7)(2)
    assert len(sample.tokens) <= 400
    for recall in sample.recalls:
        spans = [sample.tokens[slice(*span)] for span in (recall.needle, recall.answer)]
        assert spans[0] == spans[1]
        assert len(tokenizer.decode(list(spans[0])).split()) == 4
