"""Questions about one of many passages: short lives of people who never were."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvkeep.errors import ConfigError
from kvkeep.evaluation.examples import GAP, Turn
from kvkeep.evaluation.tasks.base import Draft, Parts, Task

_RULER = "RULER (arXiv:2404.06654), section 3.4 (there over SQuAD and HotpotQA)"
_FIRST_NAMES_TEXT = """
Ada Agnes Albert Amos Beatrice Bertha Caleb Cora Dorothy Edgar Edith Elias Ernest Esther Eugene
Flora Gideon Gilbert Harriet Hilda Horace Hugo Ida Irene Isaac Ivy Jasper Leonard Lydia Mabel
Martha Matilda Mildred Milo Nathan Norman Olive Otto Pearl Percy Phoebe Ralph Reuben Rufus
Silas Stella Theodore Ursula Vera Winifred
"""
_LAST_NAMES_TEXT = """
Abbott Ashby Bannister Barlow Beckett Blackwood Bramley Calloway Carver Chadwick Colby Crowther
Dalton Draper Eastman Ellery Fairfax Fenwick Finch Garrick Goodall Hargrove Hawthorne Holloway
Ingram Jessop Kendrick Lockwood Loxley Marlowe Mercer Milburn Norwood Oakes Ormond Pemberton
Pickering Prescott Quill Radcliffe Ramsey Redfern Sedgwick Sheldon Stanton Sutcliffe Thackeray
Thornton Underhill Vance Wakefield Weatherby Whitlock Winslow Wyndham Yardley
"""
_TOWN_STARTS_TEXT = """
Alder Ash Birch Black Bram Clay Cold Crow East Elm Fern Fox Gold Hart Hazel High Hollow King
Lamb Long Marsh Mill Moss North Oak Otter Raven Red Rose Salt Shep Silver Stone Swan Thorn
West White Wild Winter Wood
"""
_TOWN_ENDS_TEXT = "bridge bury combe dale field ford gate ham hurst mere minster ton well wick"
_CALLINGS_TEXT = """
actor architect astronomer baker beekeeper blacksmith botanist butcher carpenter chemist
clockmaker cobbler cooper dentist diver farrier fisherman gardener geologist glassblower
goldsmith jeweller journalist judge lawyer librarian locksmith mason miner nurse optician
painter pharmacist photographer pilot plumber potter printer saddler sailor sculptor shepherd
surgeon surveyor tailor tanner translator weaver
"""
_INSTRUMENTS_TEXT = """
accordion banjo bassoon cello clarinet cornet dulcimer flute guitar harmonica harp harpsichord
lute mandolin oboe organ piano trombone trumpet tuba viola violin xylophone zither
"""

_FIRST_NAMES = _FIRST_NAMES_TEXT.split()
_LAST_NAMES = _LAST_NAMES_TEXT.split()
_TOWN_STARTS = _TOWN_STARTS_TEXT.split()
_TOWN_ENDS = _TOWN_ENDS_TEXT.split()
_CALLINGS = _CALLINGS_TEXT.split()
_INSTRUMENTS = _INSTRUMENTS_TEXT.split()


@dataclass(frozen=True)
class _Person:
    name: str
    town: str
    year: int
    calling: str
    instrument: str
    home: str
    teacher: str = ""

    def passage(self) -> str:
        """Everything about a person, in five or six sentences."""
        article = "an" if self.calling[0] in "aeiou" else "a"
        taught = f" The teacher of {self.name} was {self.teacher}." if self.teacher else ""
        return (
            f"{self.name} was born in {self.town} in {self.year}.{taught}"
            f" {self.name} worked as {article} {self.calling} for most of a long life."
            f" In the evenings {self.name} played the {self.instrument} for the neighbours."
            f" The last years were spent in {self.home}, in a small house close to the river."
        )


@dataclass(frozen=True)
class _Fact:
    """Something that a passage says: how it is asked for and how an answer begins."""

    field: str
    question: str
    prefix: str


_FACTS = (
    _Fact("town", "In which town was {} born?", "{} was born in"),
    _Fact("year", "In which year was {} born?", "{} was born in the year"),
    _Fact("calling", "What did {} work as?", "{} worked as a"),
    _Fact("instrument", "Which instrument did {} play?", "{} played the"),
    _Fact("home", "In which town did {} spend the last years?", "The last years were spent in"),
)


def one_hop() -> Task:
    """The answer stands in the passage about the person asked for."""

    def make(draft: Draft) -> Parts:
        draw = random.Random(f"kvkeep questions {draft.seed}")
        fact = draw.choice(_FACTS)
        people = _people(draw)
        person = people(())
        answer = str(getattr(person, fact.field))
        document, passages = _among(draft, [person], people, {answer})
        turn = Turn(
            question=fact.question.format(person.name),
            answers=(answer,),
            answer_prefix=_before(fact.prefix.format(person.name), answer),
            gold=f" {answer}.",
        )
        return Parts(document, (turn,), details={"fact": fact.field, "passages": passages})

    return Task(
        name="questions",
        version=1,
        summary="a question about one of many passages",
        source=_RULER,
        scoring="all",
        max_tokens=16,
        make=make,
    )


def two_hops() -> Task:
    """The passage asked for names a person, whose passage holds the answer."""

    def make(draft: Draft) -> Parts:
        draw = random.Random(f"kvkeep questions of two hops {draft.seed}")
        people = _people(draw)
        teacher = people(())
        pupil = people((teacher.name, teacher.town))
        pupil = _Person(**{**vars(pupil), "teacher": teacher.name})
        document, passages = _among(draft, [teacher, pupil], people, {teacher.town})
        turn = Turn(
            question=f"In which town was the teacher of {pupil.name} born?",
            answers=(teacher.town,),
            answer_prefix=f"The teacher of {pupil.name} was born in",
            gold=f" {teacher.town}.",
        )
        return Parts(document, (turn,), details={"fact": "town", "passages": passages})

    return Task(
        name="questions-two-hop",
        version=1,
        summary="a question whose answer stands in another passage than the one it names",
        source=_RULER,
        scoring="all",
        max_tokens=16,
        make=make,
    )


def _people(draw: random.Random) -> Callable[[tuple[str, ...]], _Person]:
    """What invents people with names of their own, who share no word with those to avoid."""
    names = [f"{first} {last}" for last in _LAST_NAMES for first in _FIRST_NAMES]
    draw.shuffle(names)
    towns = [start + end for start in _TOWN_STARTS for end in _TOWN_ENDS]
    left = iter(names)

    def invent(avoid: tuple[str, ...]) -> _Person:
        while True:
            name = next(left, None)
            if name is None:
                raise ConfigError(
                    "the prompt is too long for passages about different people",
                    expected=f"at most {len(names)} passages",
                    remedy="Ask for a shorter prompt.",
                )
            town, home = draw.sample(towns, 2)
            person = _Person(
                name=name,
                town=town,
                year=draw.randrange(1700, 1960),
                calling=draw.choice(_CALLINGS),
                instrument=draw.choice(_INSTRUMENTS),
                home=home,
            )
            if not {str(value) for value in vars(person).values()} & set(avoid):
                return person

    return invent


def _among(
    draft: Draft,
    asked: list[_Person],
    people: Callable[[tuple[str, ...]], _Person],
    answers: set[str],
) -> tuple[str, int]:
    """Passages about the people asked for, at the draft's depth, among as many others as fit."""
    count = draft.count_tokens
    used = sum(count(person.passage()) + 8 for person in asked)
    others: list[_Person] = []
    while used <= draft.n_tokens:
        others.append(people(tuple(answers)))
        used += count(others[-1].passage()) + 2
    while others:
        text = _document(draft, asked, others)
        if count(text) <= draft.n_tokens:
            return text, len(asked) + len(others)
        others.pop()
    raise ConfigError(
        f"{draft.n_tokens} tokens are too few for passages that distract",
        expected="room for one more passage than those asked for",
        received=f"{draft.n_tokens} tokens",
        remedy="Ask for a longer prompt.",
    )


def _document(draft: Draft, asked: list[_Person], others: list[_Person]) -> str:
    people = list(others)
    for at, person in enumerate(asked):
        # Two passages that belong together lie half a document apart.
        depth = (draft.depth + at / len(asked)) % 1.0
        people.insert(min(int(depth * (len(people) + 1)), len(people)), person)
    told = (f"Passage {at}: {person.passage()}" for at, person in enumerate(people, 1))
    return GAP.join(told)


def _before(prefix: str, answer: str) -> str:
    """The prefix with "an" where the answer asks for it."""
    return f"{prefix}n" if prefix.endswith(" a") and answer[0] in "aeiou" else prefix
