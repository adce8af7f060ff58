"""Answers as JSON lines that a run goes on from. Standard library and NumPy: peers import it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: (task, index, setting, budget).
Key = tuple[str, int, str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt, as all sides are asked it.

    Attributes:
        task, index: of `kvkeep eval`.
        text: what the model reads before its answer, template included.
        ids: the text's token ids by kvkeep's tokenizer; a side whose own differ refuses.
        max_tokens: of the answer.
        answers: the right ones; sides do not look at them.
        scoring: name of kvkeep's rule.
    """

    task: str
    index: int
    text: str
    ids: tuple[int, ...]
    max_tokens: int
    answers: tuple[str, ...]
    scoring: str

    def require_ids(self, own: list[int]) -> None:
        """Refuse other token ids than kvkeep's.

        Raises:
            ValueError: names the first difference.
        """
        if tuple(own) != self.ids:
            pairs = zip(own, self.ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(self.ids)))
            raise ValueError(
                f"{self.task} {self.index}: {len(own)} tokens here, {len(self.ids)} in kvkeep,"
                f" the first difference at {at}"
            )


@dataclass(frozen=True)
class Answer:
    """What one side said under one setting.

    Attributes:
        task, index: of the prompt.
        setting: name of a row of the plan.
        budget: as the plan spells it; "100%" for the full cache.
        text: the answer, not scored.
        rows: rows per KV head that attention sees after compression, the mean.
        held_bytes: of the cache's K and V after compression, masked rows included.
    """

    task: str
    index: int
    setting: str
    budget: str
    text: str
    rows: float
    held_bytes: int

    @property
    def key(self) -> Key:
        """No file has two answers of one key."""
        return self.task, self.index, self.setting, self.budget


@dataclass(frozen=True)
class Timing:
    """Seconds of one setting on one prompt, one value per round.

    Attributes:
        setting, budget: as in `Answer`.
        prefill: reading the prompt, scoring and compressing included.
        token: one decode step.
    """

    setting: str
    budget: str
    prefill: tuple[float, ...]
    token: tuple[float, ...]


@dataclass
class AnswerFile:
    """An answers file, begun or gone on with.

    Attributes:
        path: the file.
        about: versions and digests, its first line. A file of other ones is refused.
        answers: all so far.

    Raises:
        ValueError: the file is of another run, or a whole line of it is damaged.
    """

    path: Path
    about: dict[str, Any]
    answers: dict[Key, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, json.dumps(self.about) + "\n")
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a line that an interruption cut off
            os.truncate(self.path, whole)
        there, answers = parsed(data[:whole].decode(), str(self.path))
        if there != self.about:
            differing = [k for k in {*there, *self.about} if there.get(k) != self.about.get(k)]
            raise ValueError(
                f"{self.path} is of another run ({', '.join(sorted(differing))} differ):"
                " move it away to begin anew"
            )
        self.answers = {answer.key: answer for answer in answers}

    def __contains__(self, key: Key) -> bool:
        return key in self.answers

    def add(self, answer: Answer) -> None:
        """Append an answer, one write."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
        self.answers[answer.key] = answer


def read(path: Path) -> tuple[dict[str, Any], list[Answer]]:
    """The first line and the answers of a file; a line that was cut off is left out.

    Raises:
        ValueError: a line is damaged, or two are of one key.
    """
    data = path.read_bytes()
    return parsed(data[: data.rfind(b"\n") + 1].decode(), str(path))


def parsed(text: str, name: str) -> tuple[dict[str, Any], list[Answer]]:
    """As `read`, of a text of whole lines."""
    try:
        first, *rest = map(json.loads, text.splitlines())
        answers = [Answer(**line) for line in rest]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is damaged: {error}") from error
    if len({answer.key for answer in answers}) < len(answers):
        raise ValueError(f"{name} is damaged: two answers of one prompt and setting")
    return first, answers


def read_prompts(path: Path, limit: int | None = None) -> tuple[dict[str, Any], list[Prompt]]:
    """What the prompts hang on, and the prompts that `peers.py` wrote, small indices first.

    Args:
        path: the file.
        limit: prompts per task, at most; None is all.
    """
    about, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    prompts = [
        Prompt(**{**line, "ids": tuple(line["ids"]), "answers": tuple(line["answers"])})
        for line in lines
    ]
    return about, [prompt for prompt in prompts if limit is None or prompt.index < limit]


def write_prompts(path: Path, about: dict[str, Any], prompts: Iterable[Prompt]) -> None:
    """Write them, replacing the file when all are drawn.

    Args:
        path: the file.
        about: what they hang on but their number; answers to other ones are not mixed in.
        prompts: small indices first.
    """
    lines = [about, *(asdict(prompt) for prompt in prompts)]
    write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_timings(path: Path) -> tuple[dict[str, Any], list[Timing]]:
    """What `write_timings` wrote."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return told["about"], [
        Timing(t["setting"], t["budget"], tuple(t["prefill"]), tuple(t["token"]))
        for t in told["timings"]
    ]


def write_timings(path: Path, about: dict[str, Any], timings: list[Timing]) -> None:
    """One JSON file."""
    write(path, json.dumps({"about": about, "timings": [asdict(t) for t in timings]}, indent=1))


def rows_key(prompt: Prompt, setting: str, budget: str) -> str:
    """Name of the rows that a setting keeps of a prompt."""
    return f"{prompt.task} {prompt.index} | {setting} | {budget}"


def write_rows(path: Path, kept: Mapping[str, np.ndarray]) -> None:
    """Write which rows are kept, bool [L, H_kv, T] by `rows_key`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".new-{path.name}")
    np.savez_compressed(temporary, **kept)  # type: ignore[arg-type]
    os.replace(temporary, path)


def read_rows(path: Path) -> dict[str, np.ndarray]:
    """What `write_rows` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def write(path: Path, text: str) -> None:
    """A file that is either the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def weights_digest(model: Path) -> str:
    """Hash of the weights file: sides that name the same one ran the same weights."""
    with (model / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
