"""Needles: a fact in a long text, one of several alike, several at once, in several turns."""

from __future__ import annotations

from kvkeep.evaluation.examples import Turn
from kvkeep.evaluation.tasks.base import Draft, Parts, Task
from kvkeep.haystack import KINDS, Haystack, Needle, NeedlePrompt, filler, needle_prompt

_RULER = "RULER (arXiv:2404.06654), section 3.1"


def single(kind: str, *, in_filler: bool = False) -> Task:
    """One needle, nothing like it."""

    def make(draft: Draft) -> Parts:
        prompt = _prompt(draft, kind, haystack=filler() if in_filler else draft.prose)
        return Parts(prompt.document, (_turn(prompt),), details=_details(prompt))

    where = "filler" if in_filler else "prose"
    name = "needle-uuid" if kind == "uuid" else f"needle-{where}"
    return Task(
        name=name,
        version=1,
        summary=f"one {kind} hidden in {where}",
        source=f"{_RULER}: single needle",
        scoring="all",
        max_tokens=48 if kind == "uuid" else 16,
        make=make,
    )


def multi_key(kind: str, keys: int) -> Task:
    """One needle is asked for, the others only look like it."""

    def make(draft: Draft) -> Parts:
        prompt = _prompt(draft, kind, n_keys=keys)
        return Parts(prompt.document, (_turn(prompt),), details=_details(prompt))

    return Task(
        name="multi-key",
        version=1,
        summary=f"one of {keys} needles that look alike",
        source=f"{_RULER}: multi-keys",
        scoring="all",
        max_tokens=16,
        make=make,
    )


def multi_value(kind: str, values: int) -> Task:
    """All values of one needle."""

    def make(draft: Draft) -> Parts:
        prompt = _prompt(draft, kind, n_values=values)
        return Parts(prompt.document, (_turn(prompt),), details=_details(prompt))

    return Task(
        name="multi-value",
        version=1,
        summary=f"all {values} values of one needle",
        source=f"{_RULER}: multi-values",
        scoring="fraction",
        max_tokens=40,
        make=make,
    )


def multi_query(kind: str, keys: int, asked: int) -> Task:
    """Several needles are asked for in one question."""

    def make(draft: Draft) -> Parts:
        prompt = _prompt(draft, kind, n_keys=keys)
        noun, some = KINDS[kind].noun, prompt.needles[:asked]
        places = [needle.place for needle in some]
        said = [f"the {noun} of {needle.place} is {needle.values[0]}" for needle in some]
        told = " and ".join(said)
        start = f"the {noun} of {places[0]} is"
        turn = Turn(
            question=f"What are the {noun}s of {' and '.join(places)}?",
            answers=tuple(needle.values[0] for needle in some),
            answer_prefix=_capital(start),
            gold=f"{told.removeprefix(start)}.",
        )
        return Parts(prompt.document, (turn,), details=_details(prompt))

    return Task(
        name="multi-query",
        version=1,
        summary=f"{asked} of {keys} needles in one question",
        source=f"{_RULER}: multi-queries",
        scoring="fraction",
        max_tokens=40,
        make=make,
    )


def multi_turn(kind: str, turns: int) -> Task:
    """Needles asked for one after another, over the same cache."""

    def make(draft: Draft) -> Parts:
        prompt = _prompt(draft, kind, n_keys=turns)
        asked = tuple(_asking(kind, needle) for needle in prompt.needles)
        return Parts(prompt.document, asked, details=_details(prompt))

    return Task(
        name="multi-turn",
        version=1,
        summary=f"{turns} questions about one document, one after another",
        source="the multi-turn mode of SCBench (arXiv:2412.10319), with RULER's needles",
        scoring="all",
        max_tokens=16,
        make=make,
    )


def instruction_first(kind: str) -> Task:
    """The task stands before the document, and nothing after it says what is asked."""

    def make(draft: Draft) -> Parts:
        prompt = _prompt(draft, kind)
        noun, place = KINDS[kind].noun, prompt.needles[0].place
        turn = Turn(
            question="",
            answers=prompt.needles[0].values,
            answer_prefix="",
            gold=f"The {noun} of {place} is {prompt.answer}.",
        )
        return Parts(
            prompt.document,
            (turn,),
            instruction=f"What is the {noun} of {place}? Find it in this text.",
            details=_details(prompt),
        )

    return Task(
        name="instruction-first",
        version=1,
        summary="one needle, asked for before the document",
        source="RULER's single needle with its order turned round",
        scoring="all",
        max_tokens=32,
        make=make,
    )


def _prompt(
    draft: Draft,
    kind: str,
    *,
    haystack: Haystack | None = None,
    n_keys: int = 1,
    n_values: int = 1,
) -> NeedlePrompt:
    return needle_prompt(
        draft.count_tokens,
        draft.n_tokens,
        kind=kind,
        depth=draft.depth,
        seed=draft.seed,
        haystack=draft.prose if haystack is None else haystack,
        n_keys=n_keys,
        n_values=n_values,
    )


def _turn(prompt: NeedlePrompt) -> Turn:
    """The prompt's own question. No white space ends the prefix: tokens begin with theirs."""
    prefix = prompt.answer_prefix.rstrip()
    mark = '"' if KINDS[prompt.kind].quoted else ""
    return Turn(
        question=prompt.question,
        answers=prompt.needles[0].values,
        answer_prefix=prefix,
        gold=f"{prompt.answered.removeprefix(prefix)}{mark}.",
    )


def _asking(kind: str, needle: Needle) -> Turn:
    noun, value = KINDS[kind].noun, needle.values[0]
    quote = '"' if KINDS[kind].quoted else ""
    gap = "" if quote else " "
    return Turn(
        question=f"{KINDS[kind].asked} is the {noun} of {needle.place}?",
        answers=(value,),
        answer_prefix=f"The {noun} of {needle.place} is{' ' if quote else ''}{quote}",
        gold=f"{gap}{value}{quote}.",
    )


def _details(prompt: NeedlePrompt) -> dict[str, str | int | float]:
    return {"kind": prompt.kind, "depth": round(prompt.depth, 4), "haystack": prompt.haystack}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
