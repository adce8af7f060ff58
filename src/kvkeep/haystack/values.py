"""What needles say: values drawn by a seed, and the things they belong to."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

_WORDS_TEXT = """
amber anchor apple arrow autumn badger bamboo basket beacon beaver berry blanket blossom
bottle bridge bronze butter button cabin camel candle canyon carpet castle cedar cellar
cherry chimney cinnamon circle clover coral cotton cradle crystal daisy desert dolphin
donkey dragon eagle ember engine falcon feather fiddle flower forest fountain garden garlic
ginger granite hammer harbor harvest hazel honey island ivory jacket jasmine jungle kettle
ladder lantern lemon leopard lily lizard magnet maple marble meadow melon mirror monkey
mountain mushroom needle nutmeg ocean olive orange orchid otter oyster paddle panther parrot
pebble pencil pepper pigeon pillow planet pocket pumpkin purple rabbit raven ribbon river
rocket saddle salmon silver spider spruce summer sunset tiger timber tulip turtle valley
velvet violin walnut whistle willow window winter wizard yellow zebra
"""
WORDS = _WORDS_TEXT.split()
_NAMES_TEXT = """
Alice Anna Arthur Charles Clara Daniel David Edward Elena Emily Emma Felix Frank George Grace
Hannah Harry Helen Henry Jack James Jane John Joseph Julia Karen Kevin Laura Leo Linda Lucy
Maria Mark Martin Mary Michael Nina Oliver Oscar Paul Peter Rachel Robert Rose Ruth Samuel
Sarah Simon Sophie Steven Susan Thomas Victor Walter William
"""
_NAMES = _NAMES_TEXT.split()
#: Places that a needle is about; none is a word of the haystacks.
PLACES = (
    "the harbour office",
    "the old bakery",
    "the north tower",
    "the village school",
    "the railway station",
    "the city museum",
    "the blue hotel",
    "the river mill",
    "the town theatre",
    "the south chapel",
    "the stone lighthouse",
    "the market hall",
    "the royal hospital",
    "the wine cellar",
    "the summer palace",
    "the fishing club",
)


@dataclass(frozen=True)
class ValueKind:
    """A kind of needle value.

    Attributes:
        name: what tables and options call it.
        noun: what the sentence calls it ("the pass code of …").
        draw: a generator -> one value.
        quoted: whether the value stands in quotation marks. Small models put words in them
            even where the text does not, and would then answer right but not exactly.
        asked: the question's first word.
    """

    name: str
    noun: str
    draw: Callable[[random.Random], str]
    quoted: bool = False
    asked: str = "What"


def _number(digits: int) -> Callable[[random.Random], str]:
    return lambda draw: str(draw.randrange(10 ** (digits - 1), 10**digits))


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


#: Kinds by name.
KINDS = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            ValueKind("number", "pass code", _number(7)),
            ValueKind("short-number", "door code", _number(4)),
            ValueKind("word", "password", lambda draw: draw.choice(WORDS), quoted=True),
            ValueKind(
                "words", "pass phrase", lambda draw: " ".join(draw.sample(WORDS, 3)), quoted=True
            ),
            ValueKind("name", "night guard", lambda draw: draw.choice(_NAMES), asked="Who"),
            ValueKind("uuid", "serial number", _uuid),
        )
    }
)
