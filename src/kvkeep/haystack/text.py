"""Text to hide needles in: paragraphs of whole sentences, the same ones for a seed."""

from __future__ import annotations

import functools
import inspect
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import ConfigError
from kvkeep.spec import checked_count

_FILLER = (
    "The grass is green and the sky is blue.",
    "The sun is warm and the wind is mild.",
    "Here we go along the road.",
    "There we come back again.",
)
# Modules whose docstrings are mostly prose; all are there in every supported Python.
_MODULES = """
argparse asyncio collections concurrent.futures configparser contextlib copy csv datetime
decimal difflib doctest email enum fractions functools heapq inspect io itertools
json logging mailbox multiprocessing optparse os pathlib pickle plistlib random re sched
selectors shelve shlex shutil socket statistics string subprocess tarfile tempfile
textwrap threading traceback unittest unittest.mock urllib.parse uuid weakref
xml.dom xml.sax zipfile
"""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")
_MARKUP = re.compile(r"[*`]{1,2}(?=\S)|(?<=\S)[*`]{1,2}")


@dataclass(frozen=True)
class Haystack:
    """Paragraphs to draw a document from.

    Attributes:
        name: what tables call it.
        paragraphs: each a tuple of sentences.

    Raises:
        ConfigError: there is no paragraph, or an empty one.
    """

    name: str
    paragraphs: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.paragraphs or not all(self.paragraphs):
            raise ConfigError(
                f"haystack {self.name!r} holds too little text",
                expected="at least one paragraph, each of at least one sentence",
                received=f"{len(self.paragraphs)} paragraphs",
                remedy="Give it files with running text.",
            )

    def part(self, index: int, count: int) -> Haystack:
        """Every `count`-th paragraph from `index` on: parts share no paragraph.

        Raises:
            ConfigError: there is no such part, or it would be empty.
        """
        parts = checked_count("count", count, 1)
        if checked_count("index", index, 0) >= parts:
            raise ConfigError(
                "no such part", expected=f"an index below {parts}", received=f"{index}"
            )
        return Haystack(self.name, self.paragraphs[index::parts])

    def sentences(self, seed: int) -> Iterator[tuple[str, bool]]:
        """Sentences without end: paragraphs in an order drawn by `seed`, then in another.

        Yields:
            (sentence, whether it begins a paragraph).
        """
        draw = random.Random(f"kvkeep {self.name} {seed}")
        order = list(range(len(self.paragraphs)))
        while True:
            draw.shuffle(order)
            for index in order:
                for place, sentence in enumerate(self.paragraphs[index]):
                    yield sentence, place == 0


@functools.cache
def library_prose() -> Haystack:
    """Running text of the Python library: its language reference and module docstrings.

    It needs no download, and differs a little from one version of Python to another.
    """
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    for name in _MODULES.split():
        try:
            module = __import__(name, fromlist=["__doc__"])
        except ImportError:  # a Python built without it
            continue
        texts += _docstrings(module)
    return Haystack("prose", _distinct(texts))


def filler() -> Haystack:
    """A few sentences that say nothing, over and over: the needle is all there is to find."""
    return Haystack("filler", (_FILLER,))


def prose_of(texts: Sequence[str], name: str = "files") -> Haystack:
    """Running text of your own; what is not prose (tables, code, headings) is left out.

    Raises:
        ConfigError: no paragraph of prose is in it.
    """
    return Haystack(name, _distinct(texts))


def prose_from_files(paths: Sequence[str | Path], name: str = "files") -> Haystack:
    """`prose_of` the text of UTF-8 files.

    Raises:
        ConfigError: a file cannot be read, or there is no prose in them.
    """
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "unreadable text file", expected="a text file in UTF-8", received=f"{error}"
            ) from error
    return prose_of(texts, name)


def paragraphs_of(text: str) -> list[tuple[str, ...]]:
    """The paragraphs of a text that read as prose, as sentences with single spaces.

    A paragraph is what blank lines part. It counts as prose if it ends as a sentence does,
    has at least 8 words, and is mostly letters.
    """
    found = []
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(_MARKUP.sub("", block).split())
        if _is_prose(line):
            found.append(tuple(_SENTENCE_END.split(line)))
    return found


def _is_prose(line: str) -> bool:
    if not line.endswith((".", "!", "?")) or "::=" in line or ">>>" in line:
        return False
    if not (line[0].isupper() or line[0] in '"“'):
        return False
    letters = sum(character.isalpha() or character == " " for character in line)
    return len(line.split()) >= 8 and letters >= 0.88 * len(line)


def _docstrings(module: object) -> list[str]:
    """Docstrings of a module and of what it defines, in a fixed order."""
    found = [inspect.getdoc(module) or ""]
    for name in sorted(vars(module)):
        member = vars(module)[name]
        if name.startswith("_") or not (inspect.isclass(member) or inspect.isfunction(member)):
            continue
        found.append(inspect.getdoc(member) or "")
        if inspect.isclass(member):
            methods = [vars(member)[key] for key in sorted(vars(member)) if not key.startswith("_")]
            found += [inspect.getdoc(method) or "" for method in methods if callable(method)]
    return found


def _distinct(texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Every paragraph once, in the order of its first appearance."""
    return tuple(dict.fromkeys(p for text in texts for p in paragraphs_of(text)))
