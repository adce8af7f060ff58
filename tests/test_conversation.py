"""Many turns over one cache: what is read once, trimmed, compacted, interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.conversation import Conversation
from kvkeep.errors import BudgetError, ConfigError
from oracles import prefilled
from tiny_folder import CHAT_TEMPLATE, END, write_tiny_folder
from tiny_models import tiny_llama

EXACT = kvkeep.EvictionConfig(policy="snapkv", budget=kvkeep.Budget(1.0, "share"), min_tokens=0)
SMALL = kvkeep.EvictionConfig(policy="snapkv", budget=kvkeep.Budget(30), min_tokens=0)
TURNS = (
    "The ferry came in forty minutes late, with nine passengers and hens.",
    "How many passengers were there?",
    "And what else was on board that morning?",
)
# A template that drops what the model said in earlier turns.
FORGETFUL = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message['content'] if message['role'] != 'assistant' else '-' }}",
)
# A template that puts a thought in front of the answer it asks for, and not in the history.
THINKING = CHAT_TEMPLATE.replace("{{ opening }}", "<think>")
# A template that counts the messages in front of them all.
COUNTING = "{{ messages | length }}" + CHAT_TEMPLATE


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Model and tokenizer with a chat template."""
    loaded: dict[str, tuple[Any, Any]] = {}

    def load(template: str = CHAT_TEMPLATE) -> tuple[Any, Any]:
        if template not in loaded:
            folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), template=template)
            loaded[template] = mlx_lm.load(str(folder))[:2]
        return loaded[template]

    return load


@pytest.fixture
def tiny(folders: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    return folders()


def say(conversation: Conversation, text: str) -> list[int]:
    """One whole turn; the answer's tokens."""
    return [response.token for response in conversation.add_user(text)]


def consistent(conversation: Conversation) -> None:
    """Every layer has read exactly the conversation's tokens."""
    assert [layer.offset for layer in conversation.cache] == [
        len(conversation.tokens) for _ in conversation.cache
    ]


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens after a prompt, from logits over a stock cache; ends after the end token."""
    cache = prefilled(model, tokens[:-1])
    answer: list[int] = []
    last = tokens[-1]
    while len(answer) < count and last != END:
        logits = model(mx.array([[last]]), cache=cache)
        last = int(np.argmax(np.asarray(logits[0, -1])))
        answer.append(last)
    return answer


# -- what is read ----------------------------------------------------------------------


@pytest.mark.parametrize("config", [EXACT, None])
def test_three_turns_answer_as_exact_caches_do(tiny: tuple[Any, Any], config: Any) -> None:
    model, tokenizer = tiny
    conversation = Conversation(
        model, tokenizer, config=config, system_prompt="Be brief.", max_tokens=20
    )
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate(TURNS):
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = say(conversation, text)
        assert answer == greedy(model, prompt, 20)
        assert conversation.tokens == prompt + answer
        consistent(conversation)
        spoken = answer[:-1] if answer[-1] == END else answer
        messages.append({"role": "assistant", "content": tokenizer.decode(spoken)})
        assert conversation.messages == messages
        assert conversation.stats.turns == turn + 1


def test_each_turn_reads_only_what_is_new(tiny: tuple[Any, Any]) -> None:
    conversation = Conversation(*tiny, config=EXACT, max_tokens=10)
    read = []
    for text in TURNS:
        before = len(conversation.tokens)
        for _ in conversation.add_user(
            text, prompt_progress_callback=lambda done, total: read.append(total)
        ):
            pass
        # <|end|> (unless it was generated), <|user|>, text, <|end|>, <|assistant|>
        assert len(conversation.tokens) - before <= len(text) + 4 + 10
    assert max(read[2:]) <= max(map(len, TURNS[1:])) + 4


def test_the_rows_that_decide_are_those_of_a_masked_full_cache(tiny: tuple[Any, Any]) -> None:
    """The second turn reads its question over the kept rows of the first."""
    model, tokenizer = tiny
    conversation = Conversation(model, tokenizer, config=SMALL, max_tokens=6)
    say(conversation, TURNS[0])
    kept = conversation.cache[0].head_positions
    assert all(len(head) <= 30 + 6 + 1 for head in kept)
    full = prefilled(model, conversation.tokens)
    for layer, exact in zip(conversation.cache, full, strict=True):
        keys = layer.keys_and_values()[0]
        if layer is conversation.cache[0]:  # deeper layers saw other attention outputs
            for head, positions in enumerate(layer.head_positions):
                want = exact.keys[0, head, list(positions)]
                assert mx.allclose(keys[0, head], want, atol=1e-5)


def test_rows_bound_the_conversation(tiny: tuple[Any, Any]) -> None:
    conversation = Conversation(*tiny, config=SMALL, max_tokens=8)
    for turn in range(4):
        say(conversation, TURNS[turn % 3])
        consistent(conversation)
        assert conversation.stats.rows <= 30 + 8 + 1  # the budget, the answer, the last token
        assert conversation.kv is not None
        assert conversation.kv.retained_tokens == 30
    assert conversation.stats.compactions == 4
    assert conversation.stats.positions > 150


def test_a_share_counts_all_positions_so_far(tiny: tuple[Any, Any]) -> None:
    config = kvkeep.EvictionConfig(
        policy="snapkv", budget=kvkeep.Budget(0.5, "share"), min_tokens=0
    )
    conversation = Conversation(*tiny, config=config, max_tokens=8)
    for text in TURNS:
        answer = say(conversation, text)
        assert conversation.kv is not None
        read = len(conversation.tokens) - len(answer) - 1
        assert conversation.kv.original_tokens == read
        assert conversation.kv.retained_tokens == read // 2
        consistent(conversation)


def test_bytes_are_measured_on_the_arrays(tiny: tuple[Any, Any]) -> None:
    conversation = Conversation(*tiny, config=SMALL, max_tokens=4)
    assert conversation.stats.live_nbytes == conversation.stats.allocated_nbytes == 0
    say(conversation, TURNS[0])
    stats, row = conversation.stats, 2 * 2 * 2 * 32 * 4
    assert stats.live_nbytes == stats.rows * row
    assert stats.allocated_nbytes == (30 + 256) * row


def test_reset_forgets_all_but_the_system_prompt(tiny: tuple[Any, Any]) -> None:
    conversation = Conversation(*tiny, config=SMALL, system_prompt="Be brief.", max_tokens=4)
    first = say(conversation, TURNS[0])
    say(conversation, TURNS[1])
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert (conversation.tokens, conversation.kv, conversation.last) == ([], None, None)
    assert say(conversation, TURNS[0]) == first


# -- templates that change what was read -----------------------------------------------


@pytest.mark.parametrize("template", [FORGETFUL, THINKING], ids=["forgetful", "thinking"])
@pytest.mark.parametrize("config", [EXACT, SMALL], ids=["exact", "evicted"])
def test_what_no_longer_holds_is_trimmed(
    template: str, config: Any, folders: Callable[[str], tuple[Any, Any]]
) -> None:
    model, tokenizer = folders(template)
    restarts: list[str] = []
    conversation = Conversation(
        model, tokenizer, config=config, max_tokens=12, on_restart=restarts.append
    )
    for text in TURNS:
        answer = say(conversation, text)
        history = conversation.messages[:-1]
        prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True)
        assert conversation.tokens == prompt + answer
        consistent(conversation)
        if config is EXACT:
            assert answer == greedy(model, prompt, 12)
    assert restarts == []


def test_where_evicted_rows_would_be_needed_it_is_all_read_again(
    folders: Callable[[str], tuple[Any, Any]],
) -> None:
    model, tokenizer = folders(COUNTING)
    restarts: list[str] = []
    conversation = Conversation(
        model, tokenizer, config=SMALL, max_tokens=8, on_restart=restarts.append
    )
    say(conversation, TURNS[0])
    assert restarts == []
    answer = say(conversation, TURNS[1])
    assert len(restarts) == 1
    prompt = tokenizer.apply_chat_template(conversation.messages[:-1], add_generation_prompt=True)
    fresh = [
        response.token
        for response in kvkeep.stream_generate(model, tokenizer, prompt, config=SMALL, max_tokens=8)
    ]
    assert answer == fresh
    assert conversation.tokens == prompt + answer
    consistent(conversation)


def test_an_exact_cache_is_trimmed_however_early_the_change(
    folders: Callable[[str], tuple[Any, Any]],
) -> None:
    model, tokenizer = folders(COUNTING)
    restarts: list[str] = []
    conversation = Conversation(
        model, tokenizer, config=EXACT, max_tokens=8, on_restart=restarts.append
    )
    for text in TURNS:
        answer = say(conversation, text)
        history = conversation.messages[:-1]
        prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True)
        assert answer == greedy(model, prompt, 8)
    assert restarts == []


@pytest.mark.parametrize("config", [SMALL, None], ids=["evicted", "off"])
def test_layers_that_cannot_be_trimmed_are_read_again(
    config: Any, folders: Callable[[str], tuple[Any, Any]]
) -> None:
    """A sliding window has forgotten what was in front of the tokens that changed."""
    tokenizer = folders(FORGETFUL)[1]
    model = tiny_llama(layers=3, sliding_layers=(1,), vocab=len(tokenizer), head_dim=32)
    restarts: list[str] = []
    conversation = Conversation(
        model, tokenizer, config=config, max_tokens=8, on_restart=restarts.append
    )
    say(conversation, TURNS[0])
    say(conversation, TURNS[1])
    assert len(restarts) == 1
    consistent(conversation)


# -- interruptions ---------------------------------------------------------------------


@pytest.mark.parametrize("config", [EXACT, SMALL, None], ids=["exact", "evicted", "off"])
@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_closed_answer_is_kept_as_far_as_it_came(
    config: Any, taken: int, tiny: tuple[Any, Any]
) -> None:
    model, tokenizer = tiny
    conversation = Conversation(model, tokenizer, config=config, max_tokens=20)
    answer = conversation.add_user(TURNS[0])
    tokens = [next(answer).token for _ in range(taken)]
    answer.close()
    history = [{"role": "user", "content": TURNS[0]}]
    prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True)
    assert conversation.tokens == prompt + tokens
    consistent(conversation)
    assert conversation.messages[-1] == {
        "role": "assistant",
        "content": tokenizer.decode(tokens),
    }
    say(conversation, TURNS[1])
    consistent(conversation)
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_a_new_message_ends_the_answer_before_it(tiny: tuple[Any, Any]) -> None:
    conversation = Conversation(*tiny, config=SMALL, max_tokens=20)
    abandoned = conversation.add_user(TURNS[0])
    next(abandoned)
    say(conversation, TURNS[1])
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2
    consistent(conversation)
    unstarted = conversation.add_user("never asked")
    say(conversation, TURNS[2])
    assert "never asked" not in str(conversation.messages)
    assert list(unstarted) == []


class _Interrupting:
    """A layer that raises at its n-th call, after its own cache was written."""

    def __init__(self, layer: Any, at: int) -> None:
        self.layer, self.left = layer, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@pytest.mark.parametrize("config", [EXACT, SMALL, None], ids=["exact", "evicted", "off"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6, 9])
def test_ctrl_c_inside_a_step_leaves_no_layer_ahead(
    config: Any, layer: int, call: int, tmp_path: Path
) -> None:
    """Calls 1 to 3 or so are the prefill in chunks, later ones are decoding steps."""
    model: Any
    model, tokenizer = mlx_lm.load(str(write_tiny_folder(tmp_path)))[:2]
    conversation = Conversation(
        model, tokenizer, config=config, max_tokens=20, prefill_step_size=16
    )
    say(conversation, TURNS[0])
    healthy = model.model.layers[layer]
    model.model.layers[layer] = _Interrupting(healthy, call)
    with pytest.raises(KeyboardInterrupt):
        say(conversation, TURNS[1])
    model.model.layers[layer] = healthy
    consistent(conversation)
    assert len(conversation.tokens) > len(TURNS[0])  # nothing had to be read again
    assert conversation.messages[2] == {"role": "user", "content": TURNS[1]}
    assert conversation.messages[3]["role"] == "assistant"
    answer = say(conversation, TURNS[2])
    consistent(conversation)
    if config is not SMALL:
        history = conversation.messages[:-1]
        prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True)
        assert answer == greedy(model, prompt, 20)


def test_ctrl_c_while_rows_are_evicted_begins_the_cache_again(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvkeep.compaction

    conversation = Conversation(*tiny, config=SMALL, max_tokens=8)
    say(conversation, TURNS[0])
    stored = kvkeep.compaction.retained
    calls = []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:  # one layer is compact, the other is not
            raise KeyboardInterrupt
        return stored(*args)

    monkeypatch.setattr(kvkeep.compaction, "retained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        say(conversation, TURNS[1])
    assert conversation.tokens == []
    assert all(layer.empty() for layer in conversation.cache)
    assert len(conversation.messages) == 4
    say(conversation, TURNS[2])
    consistent(conversation)
    assert conversation.stats.rows <= 30 + 8 + 1


def test_a_message_that_fails_is_taken_back(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    config = kvkeep.EvictionConfig(policy="snapkv", budget=kvkeep.Budget(10, "bytes"), min_tokens=0)
    conversation = Conversation(model, tokenizer, config=config, max_tokens=4)
    with pytest.raises(BudgetError, match="holds no row"):
        say(conversation, TURNS[0])
    assert conversation.messages == []
    conversation.config = EXACT
    answer = say(conversation, TURNS[0])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": TURNS[0]}], add_generation_prompt=True
    )
    assert answer == greedy(model, prompt, 4)
    consistent(conversation)


def test_a_template_that_refuses_takes_the_message_back(
    folders: Callable[[str], tuple[Any, Any]],
) -> None:
    refusing = (
        "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHAT_TEMPLATE
    )
    conversation = Conversation(*folders(refusing), config=SMALL, max_tokens=4)
    say(conversation, TURNS[0])
    before = list(conversation.tokens), list(conversation.messages)
    with pytest.raises(ConfigError, match="the chat template refuses the messages; got too long"):
        say(conversation, TURNS[1])
    assert (conversation.tokens, conversation.messages) == before
    consistent(conversation)


# -- what is refused -------------------------------------------------------------------


def test_what_a_conversation_cannot_do_is_refused(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    with pytest.raises(ConfigError, match="max_kv_size and eviction"):
        Conversation(model, tokenizer, config=SMALL, max_kv_size=20)
    with pytest.raises(ConfigError, match="cannot evict quantised rows"):
        Conversation(model, tokenizer, config=SMALL, kv_bits=8)
    bare = mlx_lm.load(str(write_tiny_folder(tmp_path, template=None)))[1]
    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(model, bare)


def test_sliding_layers_stay_as_they_are(tiny: tuple[Any, Any]) -> None:
    tokenizer = tiny[1]
    model = tiny_llama(layers=3, sliding_layers=(1,), vocab=len(tokenizer), head_dim=32)
    conversation = Conversation(model, tokenizer, config=SMALL, max_tokens=6)
    kinds = [type(layer) for layer in make_prompt_cache(model)]
    for text in TURNS:
        say(conversation, text)
        consistent(conversation)
    assert type(conversation.cache[1]) is kinds[1]
    assert type(conversation.cache[0]) is kvkeep.PositionPreservingKVCache
