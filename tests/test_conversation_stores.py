"""Many turns over unequal layers and heads."""

from __future__ import annotations

from pathlib import Path

import mlx_lm
import pytest

import kvkeep
from kvkeep.conversation import Conversation
from tiny_folder import CHAT_TEMPLATE, write_tiny_folder

TURNS = (
    "The ferry came in forty minutes late, with nine passengers and hens.",
    "How many passengers were there?",
    "And what else was on board that morning?",
)


@pytest.mark.parametrize(
    "choice",
    [
        {"allocation": "adaptive"},
        {"allocation": "global", "store": "union"},
        {"allocation": "pyramid"},
        {"allocation": "cake", "store": "ragged"},
    ],
    ids=lambda choice: "-".join(choice.values()),
)
def test_every_allocation_and_store_lasts_many_turns(
    tmp_path: Path, choice: dict[str, str]
) -> None:
    tiny = mlx_lm.load(str(write_tiny_folder(tmp_path, template=CHAT_TEMPLATE)))[:2]
    config = kvkeep.EvictionConfig.parse(
        {"policy": "snapkv", "budget": 30, "min_tokens": 0, **choice}
    )
    conversation = Conversation(*tiny, config=config, max_tokens=6)
    for turn, text in enumerate(TURNS):
        answer = list(conversation.add_user(text))
        assert conversation.kv is not None
        assert {layer.offset for layer in conversation.cache} == {len(conversation.tokens)}
        assert conversation.kv.retained_tokens == 30
        assert answer
        assert len(conversation.messages) == 2 * (turn + 1)
    held = [len(head) for layer in conversation.cache for head in layer.head_positions]
    assert conversation.kv is not None
    appended = len(conversation.tokens) - conversation.kv.true_offset
    assert sum(held) / len(held) == 30 + appended
