"""Synthetic prompts: the needle is there once, where it should be, and the text is long enough."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import ConfigError
from kvkeep.haystack import (
    KINDS,
    Haystack,
    filler,
    library_prose,
    needle_prompt,
    needle_prompts,
    paragraphs_of,
    passkey_prompt,
    prose_from_files,
    prose_of,
    spread_depths,
)


def words(text: str) -> int:
    """Stands for a tokenizer: a token per word."""
    return len(text.split())


def test_the_prose_is_running_text_and_plenty() -> None:
    paragraphs = library_prose().paragraphs
    assert sum(len(sentence) for p in paragraphs for sentence in p) > 400_000
    assert len(set(paragraphs)) == len(paragraphs)
    for paragraph in paragraphs:
        assert paragraph[-1].endswith((".", "!", "?"))
        assert not any("\n" in sentence or "  " in sentence for sentence in paragraph)


def test_tables_code_and_headings_are_no_prose() -> None:
    text = """Heading
    *******

    This is the *first* sentence of all. It goes on with
    a second   one.

    >>> x = 1 + 2; y = call(x); print(x, y, x + y, x - y).

    +----+----+----+----+----+----+----+----+.

    Too short.
    """
    expected = [("This is the first sentence of all.", "It goes on with a second one.")]
    assert paragraphs_of(text) == expected


def test_files_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Once upon a time there was a king. He had a cat.\n\nx = 1", encoding="utf-8")
    found = prose_from_files([path], "tale")
    assert found == Haystack("tale", (("Once upon a time there was a king.", "He had a cat."),))
    with pytest.raises(ConfigError, match="unreadable text file"):
        prose_from_files([tmp_path / "b.txt"])
    with pytest.raises(ConfigError, match="too little text"):
        prose_of(["x = 1"])


def test_parts_share_no_paragraph() -> None:
    whole = library_prose()
    parts = [set(whole.part(index, 3).paragraphs) for index in range(3)]
    assert set.union(*parts) == set(whole.paragraphs)
    assert sum(map(len, parts)) == len(whole.paragraphs)
    with pytest.raises(ConfigError, match="no such part"):
        whole.part(3, 3)


def test_sentences_come_in_an_order_of_their_seed_and_never_end() -> None:
    text = Haystack("t", tuple((f"Paragraph {i}.", "Its second.") for i in range(20)))
    first, again = (list(islice(text.sentences(1), 100)) for _ in range(2))
    other = list(islice(text.sentences(2), 100))
    assert first == again != other
    assert {sentence for sentence, _ in first[:40]} == {s for s, _ in other[:40]}
    assert [begins for _, begins in first] == [True, False] * 50


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    depth=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    n_tokens=st.integers(250, 1500),
    n_keys=st.integers(1, 5),
    n_values=st.integers(1, 3),
    prose=st.booleans(),
)
def test_a_needle_is_there_once_at_its_depth(
    kind: str, depth: float, seed: int, n_tokens: int, n_keys: int, n_values: int, prose: bool
) -> None:
    haystack = library_prose() if prose else filler()
    made = needle_prompt(
        words,
        n_tokens,
        kind=kind,
        depth=depth,
        seed=seed,
        haystack=haystack,
        n_keys=n_keys,
        n_values=n_values,
    )
    asked = made.needles[0]
    assert n_tokens - 120 < words(made.document) <= n_tokens
    assert len(made.needles) == n_keys
    assert len(asked.values) == n_values
    assert [needle.place for needle in made.needles] == list(
        dict.fromkeys(needle.place for needle in made.needles)
    )
    for needle in made.needles:
        for value, hidden in zip(needle.values, needle.hidden, strict=True):
            assert made.document.count(value) == 1
            assert value in hidden.sentence
            assert needle.place in hidden.sentence
            assert made.document[hidden.start : hidden.stop] == hidden.sentence
            assert value not in made.question
        assert [h.start for h in needle.hidden] == sorted(h.start for h in needle.hidden)
    assert made.document.count(asked.place) == n_values
    assert all(value in made.answer for value in asked.values)
    assert made.answer not in made.answer_prefix
    assert asked.place in made.question
    nearest = min(abs(hidden.depth - depth) for hidden in asked.hidden)
    assert nearest < 0.1 + 160 * (n_keys + n_values) / len(made.document)


def test_the_same_arguments_give_the_same_prompt_and_other_seeds_another() -> None:
    made = [needle_prompt(words, 300, seed=seed, n_keys=3) for seed in (4, 4, 5)]
    assert made[0] == made[1]
    assert made[0].document != made[2].document
    assert made[0].answer != made[2].answer


def test_the_text_does_not_depend_on_the_process() -> None:
    """Random strings would seed differently per process if they went through `hash`."""
    made = needle_prompt(words, 60, seed=3, haystack=filler())
    assert made.answered == ANSWER


ANSWER = "The pass code of the old bakery is 7768924"


def test_depths_are_spread_over_the_document() -> None:
    depths = spread_depths(20, seed=1)
    assert [int(depth * 20) for depth in sorted(depths)] == list(range(20))
    assert depths != sorted(depths)
    made = list(needle_prompts(words, 10, 800, seed=7))
    assert [prompt.seed for prompt in made] == list(range(7, 17))
    tenths = sorted(prompt.depth for prompt in made)
    assert all(abs(depth - (i + 0.5) / 10) < 0.1 for i, depth in enumerate(tenths))


def test_similar_needles_lie_on_both_sides() -> None:
    made = needle_prompt(words, 1000, depth=0.5, n_keys=5, seed=2)
    others = [needle.hidden[0].depth for needle in made.needles[1:]]
    assert min(others) < made.depth < max(others)


def test_sentences_with_the_needles_words_are_left_out() -> None:
    text = Haystack("t", (("The harbour office is closed on this day.", "All is well here."),))
    for seed in range(100):
        made = needle_prompt(words, 100, haystack=text, seed=seed)
        if made.needles[0].place == "the harbour office":
            assert "closed" not in made.document
            break
    else:
        pytest.fail("no prompt about the harbour office")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "numbr"}, "Did you mean 'number'"),
        ({"depth": 1.5}, "bad depth"),
        ({"n_keys": 0}, "n_keys"),
        ({"n_keys": 99}, "too many needles"),
        ({"n_values": 0}, "n_values"),
        ({"n_tokens": 12}, "too few"),
        ({"n_tokens": 0}, "n_tokens"),
    ],
)
def test_arguments_out_of_range_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        needle_prompt(words, **{"n_tokens": 200, **change})  # type: ignore[arg-type]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    n_passkeys=st.integers(1, 12),
    n_words=st.integers(1, 12),
    n_tokens=st.integers(700, 1500),
)
def test_passkeys_are_hidden_once_and_recalled_once(
    seed: int, n_passkeys: int, n_words: int, n_tokens: int
) -> None:
    made = passkey_prompt(words, n_tokens, n_passkeys=n_passkeys, n_words=n_words, seed=seed)
    assert n_tokens - 120 < words(made.text) <= n_tokens
    spans = zip(made.passkeys, made.context_spans, made.recall_spans, strict=True)
    ends = []
    for passkey, (start, stop), (again, end) in spans:
        assert made.text[start:stop] == made.text[again:end] == passkey
        assert len(passkey.split()) == n_words
        assert stop < made.recall_start < again
        ends.append(stop)
    assert ends == sorted(ends)
    assert made.text[: made.recall_start].count("passkey") == n_passkeys
    assert made == passkey_prompt(
        words, n_tokens, n_passkeys=n_passkeys, n_words=n_words, seed=seed
    )


def test_a_text_too_short_for_its_passkeys_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        passkey_prompt(words, 60, n_passkeys=5, n_words=8)
