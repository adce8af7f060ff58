"""Evaluation tasks: answers are in the prompt, seeds give the same one, lengths are met."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import ConfigError
from kvkeep.evaluation import (
    RULES,
    TASKS,
    Example,
    Questions,
    example_of,
    export_examples,
    fitted,
    parse_length,
    render,
    score,
    task_of,
    tokenize,
)
from kvkeep.evaluation.scoring import holds
from kvkeep.haystack import prose_of

NAMES = list(TASKS)
ONE_PLACE = (
    "needle-filler",
    "needle-prose",
    "needle-uuid",
    "multi-key",
    "multi-value",
    "multi-query",
)


class Words:
    """A word is a token, and so is each special mark of the chat template."""

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = re.findall(r"<\w+>|[^\s<]+|\n+", text)
        return [hash(word) for word in found]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        told = [f"<{m['role']}> {m['content']} <end>\n" for m in messages]
        return "".join(told) + "<assistant> "


class PlainWords(Words):
    has_chat_template = False


def words(text: str) -> int:
    return len(text.split())


def example(name: str, index: int = 0, seed: int = 0, n_tokens: int = 700) -> Example:
    return example_of(
        task_of(name), index, length=n_tokens, n_tokens=n_tokens, count_tokens=words, seed=seed
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(index=st.integers(0, 40), seed=st.integers(0, 2**40), n_tokens=st.integers(300, 900))
def test_a_seed_gives_one_prompt_that_holds_its_answers(
    name: str, index: int, seed: int, n_tokens: int
) -> None:
    made = example(name, index, seed, n_tokens)
    assert made == example(name, index, seed, n_tokens)
    assert words(made.document) <= n_tokens
    for turn in made.turns:
        assert turn.answers
        assert len(set(turn.answers)) == len(turn.answers)
        # Not even a right answer may be scored less than 1, nor a question give it away.
        assert score(turn.gold, turn.answers, made.scoring) == 1
        for answer in turn.answers:
            assert holds(made.document, answer)
            told = f"{made.instruction} {turn.question} {turn.answer_prefix}"
            assert not holds(told, answer)


@pytest.mark.parametrize("name", NAMES)
def test_examples_differ(name: str) -> None:
    made = [example(name, index, seed) for index in range(3) for seed in range(2)]
    assert len({e.document for e in made}) == 6
    assert len({e.seed for e in made}) == 6


@pytest.mark.parametrize(
    "name", [*ONE_PLACE, "questions", "questions-two-hop", "instruction-first"]
)
@settings(max_examples=15)
@given(index=st.integers(0, 40), seed=st.integers(0, 2**40))
def test_nothing_else_in_the_document_has_the_answer(name: str, index: int, seed: int) -> None:
    made = example(name, index, seed)
    for answer in made.turns[0].answers:
        assert made.document.casefold().count(answer.casefold()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_prompt_asks_the_same(name: str) -> None:
    short, long = example(name, 3, 1, 400), example(name, 3, 1, 800)
    assert short.turns == long.turns
    assert words(long.document) > 1.5 * words(short.document)


def test_depths_are_spread_however_many_examples_there_are() -> None:
    for count in (4, 10):
        depths = [float(example("needle-filler", i).details["depth"]) for i in range(count)]
        gaps = [b - a for a, b in itertools.pairwise(sorted([0, *depths, 1]))]
        assert max(gaps) < 2.2 / count


def test_a_chain_of_variables_is_in_order() -> None:
    for index in range(10):
        made = example("variable-tracking", index)
        told = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", made.document)
        value = re.search(r"value (\d+)", made.question)
        assert value
        assert [name for name, _ in told] == list(made.turns[0].answers)
        assert [old for _, old in told] == [value[1], *made.turns[0].answers[:-1]]


@pytest.mark.parametrize("n_tokens", [200, 700, 3000])
def test_lists_have_the_words_asked_for_most_often(n_tokens: int) -> None:
    for index in range(4):
        for name, told in (("common-words", r"\d+\. (\S+)"), ("frequent-words", r"(\S+)")):
            made = example(name, index, n_tokens=n_tokens)
            ranked = Counter(re.findall(told, made.document)).most_common()
            top, rest = ranked[:3], ranked[3:]
            assert {word for word, _ in top} == set(made.turns[0].answers)
            assert min(count for _, count in top) > max(count for _, count in rest)


def test_a_question_of_two_hops_needs_both_passages() -> None:
    for index in range(8):
        made = example("questions-two-hop", index)
        pupil = re.search(r"teacher of ([\w ]+) born", made.question)
        assert pupil
        (passage,) = [p for p in made.document.split("\n\n") if f"teacher of {pupil[1]} " in p]
        teacher = re.search(r"The teacher of [\w ]+ was ([\w ]+)\.", passage)
        assert teacher
        answer = made.turns[0].answers[0]
        assert answer not in passage
        assert f"{teacher[1]} was born in {answer} " in made.document


def test_turns_ask_for_different_needles() -> None:
    made = example("multi-turn", 2)
    assert len({turn.question for turn in made.turns}) == len(made.turns) == 3
    assert len({turn.answers for turn in made.turns}) == 3


def test_an_instruction_that_stands_first_is_not_repeated() -> None:
    made = example("instruction-first")
    text = render(Words(), made).prompt
    place = re.search(r"pass code of ([\w ]+)\?", made.instruction)
    assert place
    assert text.index(made.instruction) < text.index(made.document)
    assert place[1] not in text[text.index(made.document) + len(made.document) :]
    assert made.question == ""


@pytest.mark.parametrize("tokenizer", [Words(), PlainWords()], ids=["chat", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_length_asked_for(tokenizer: Any, name: str) -> None:
    for length in (400, 900):
        made = fitted(tokenizer, task_of(name), 1, length=length)
        tokens = tokenize(tokenizer, render(tokenizer, made))
        # Short by a sentence or a passage at most.
        assert length - 110 < len(tokens.prompts[0]) <= length
        assert made.length == length


@pytest.mark.parametrize("tokenizer", [Words(), PlainWords()], ids=["chat", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_the_whole(tokenizer: Any, name: str) -> None:
    made = fitted(tokenizer, task_of(name), 0, length=500)
    rendered = render(tokenizer, made)
    assert rendered.context.endswith(made.document)
    assert rendered.prompt.endswith(made.turns[0].answer_prefix)
    tokens, text = tokenize(tokenizer, rendered), rendered.context
    assert list(tokens.prompts[0][: tokens.context]) == tokenizer.encode(rendered.context)
    for ask, prompt, turn in zip(rendered.asks, tokens.prompts, made.turns, strict=True):
        text += ask
        assert list(prompt) == tokenizer.encode(text)
        assert turn.question in ask
    if tokenizer.has_chat_template and len(made.turns) > 1:
        told = [{"role": "user", "content": f"{made.context}\n\n{made.question}"}]
        for before, turn in itertools.pairwise(made.turns):
            gold = before.answer_prefix + before.gold
            told += [{"role": "assistant", "content": gold}]
            told += [{"role": "user", "content": turn.question}]
        whole = tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
        assert text == whole + made.turns[-1].answer_prefix


def test_text_of_ones_own_hides_needles() -> None:
    mine = prose_of(["The quick brown fox jumps over the lazy dog every single morning.\n\n" * 3])
    made = fitted(Words(), task_of("needle-prose"), 0, length=300, prose=mine)
    assert "lazy dog" in made.document
    assert made.details["haystack"] == "files"


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'multi-kee'.*'multi-key'"):
        Questions(tasks=("multi-kee",))
    wrong: list[dict[str, Any]] = [{"limit": 0}, {"seed": -1}, {"lengths": (0,)}]
    for options in wrong:
        with pytest.raises(ConfigError):
            Questions(**options)
    for name in NAMES:
        with pytest.raises(ConfigError):
            fitted(Words(), task_of(name), 0, length=30)
    for text in ("", "k", "0", "-1", "1.5k", "4kk"):
        with pytest.raises(ConfigError, match="bad length"):
            parse_length(text)
    assert [parse_length(text) for text in ("1000", "4k", " 32K ")] == [1000, 4000, 32000]


def test_a_shorter_run_is_the_start_of_a_longer_one() -> None:
    names = ("multi-key", "frequent-words")
    short, long = (list(Questions(names, (300, 400), limit).examples(Words())) for limit in (1, 3))
    assert long[: len(short)] == short
    assert len(long) == Questions(names, (300, 400), 3).count == 12


@pytest.mark.parametrize(
    ("text", "answers", "rule", "right"),
    [
        ("It is 4815.", ["4815"], "all", 1.0),
        ("It is 48151.", ["4815"], "all", 0.0),
        ("It is\nFULL  Width \uff14\uff18", ["full width 48"], "all", 1.0),
        ("chamber", ["amber"], "all", 0.0),
        ("amber-coral", ["amber", "coral"], "all", 1.0),
        ("one, two", ["one", "two", "three", "four"], "fraction", 0.5),
        ("one, two", ["one", "two", "three"], "all", 0.0),
        ("one, two", ["two", "three"], "any", 1.0),
        ("", ["two", "three"], "any", 0.0),
    ],
)
def test_scores(text: str, answers: list[str], rule: str, right: float) -> None:
    assert score(text, answers, rule) == right


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown scoring rule 'most'"):
        score("a", ["a"], "most")


@given(st.text(max_size=40), st.lists(st.text("abc1 ", min_size=1), min_size=1, max_size=4))
def test_rules_are_ordered(text: str, answers: list[str]) -> None:
    every, share, some = (score(text, answers, rule) for rule in ("all", "fraction", "any"))
    assert set(RULES) == {"all", "fraction", "any"}
    assert every <= share <= some


def test_the_export_can_be_put_together_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "prompts.jsonl"
    asked = Questions(("multi-turn", "questions"), (300,), 2, seed=5)
    examples = list(asked.examples(Words()))
    assert export_examples(path, Words(), examples, {"model": "m"}) == 4
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header == {"schema": "kvkeep eval prompts", "schema_version": 1, "model": "m"}
    for line, made in zip(lines, examples, strict=True):
        rendered = render(Words(), made)
        assert line["context_text"] == rendered.context
        assert [turn["ask_text"] for turn in line["turns"]] == list(rendered.asks)
        assert [turn["answers"] for turn in line["turns"]] == [list(t.answers) for t in made.turns]
        assert line["tokens"] == len(Words().encode(rendered.prompt))
        assert (line["task"], line["index"], line["seed"]) == (made.task, made.index, made.seed)
    assert [p.name for p in path.parent.iterdir()] == ["prompts.jsonl"]
