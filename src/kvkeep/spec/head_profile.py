"""Which KV heads retrieve and which stream: the values of a profile, and its file."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvkeep.errors import HeadProfileError
from kvkeep.spec.checks import checked_count

#: Marks the file, and the version of its layout. A reader takes its own version only.
FORMAT, VERSION = "kvkeep head profile", 1

Option = int | float | str


@dataclass(frozen=True)
class HeadProfile:
    """One score per KV head: the higher, the more the head reads far back.

    Attributes:
        model: identity of the model that was profiled (`kvkeep.heads.model_identity`).
        scores: index in the cache list -> H_kv scores. Layers that are not plain full
            attention are not in it.
        sinks: rows at the start that a streaming head keeps.
        recent: latest rows that a streaming head keeps.
        method: how the scores were found.
        options: that method's settings, by name.
        seed: the text was drawn with it.
        steps: steps taken, each over one sample.
        model_name: what people call the model; not compared.
        versions: package -> version that made the profile; not compared.

    Raises:
        HeadProfileError: there is no score, layers have unequal numbers of heads, or a value is
            not finite or out of range.
    """

    model: str
    scores: Mapping[int, tuple[float, ...]]
    sinks: int
    recent: int
    method: str
    options: Mapping[str, Option] = field(default_factory=dict)
    seed: int = 0
    steps: int = 0
    model_name: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "method"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise _fault(f"bad {name}", "some text", value)
        for name, least in (("sinks", 0), ("recent", 1), ("seed", 0), ("steps", 0)):
            checked_count(name, getattr(self, name), least, HeadProfileError)
        scores = {
            checked_count("layer index", layer, 0, HeadProfileError): _checked_row(layer, row)
            for layer, row in self.scores.items()
        }
        if not scores or not all(scores.values()):
            raise _fault("no scores", "one score per KV head of one layer or more", f"{scores}")
        counts = {len(row) for row in scores.values()}
        if len(counts) > 1:
            raise _fault(
                "layers with unequal numbers of KV heads", "one number", f"{sorted(counts)}"
            )
        object.__setattr__(self, "scores", MappingProxyType(dict(sorted(scores.items()))))
        for name in ("options", "versions"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def kv_heads(self) -> int:
        """H_kv."""
        return len(next(iter(self.scores.values())))

    def retrieval_heads(self, share: float) -> frozenset[tuple[int, int]]:
        """The `share` of all heads with the highest scores, as (layer, head).

        The number is rounded; of equal scores the lower layer and head come first.

        Raises:
            HeadProfileError: `share` is not in [0, 1].
        """
        if not 0 <= share <= 1:
            raise _fault("bad share of heads", "a number from 0 to 1", f"{share}")
        ranked = sorted(
            (-score, layer, head)
            for layer, row in self.scores.items()
            for head, score in enumerate(row)
        )
        return frozenset((layer, head) for _, layer, head in ranked[: round(share * len(ranked))])

    def save(self, file_name: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, under another name first and then moved.

        Raises:
            HeadProfileError: it cannot be written. An older file stays as it was.
        """
        path = Path(file_name)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "model_name": self.model_name,
            "method": self.method,
            "options": dict(self.options),
            "seed": self.seed,
            "steps": self.steps,
            "sinks": self.sinks,
            "recent": self.recent,
            "versions": dict(self.versions),
            "scores": {str(layer): list(row) for layer, row in self.scores.items()},
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-") as folder:
                temporary = Path(folder) / path.name
                temporary.write_text(_as_text(content), encoding="utf-8")
                os.replace(temporary, path)
        except OSError as error:
            raise HeadProfileError(f"cannot write {path}", received=str(error)) from error


def load_head_profile(file_name: str | os.PathLike[str]) -> HeadProfile:
    """Read a profile that `HeadProfile.save` wrote.

    Raises:
        HeadProfileError: the file is missing, truncated, of another layout version, no head
            profile at all, or holds values that no profile has.
    """
    path = Path(file_name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _fault(
            f"no readable head profile at {path}", "a file of `kvkeep heads profile`", f"{error}"
        ) from error
    except ValueError as error:
        raise _fault(
            f"{path} is no complete head profile", "JSON of `kvkeep heads profile`", f"{error}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _fault(f"{path} is no head profile", f'a file with "format": "{FORMAT}"', "another")
    if content.get("version") != VERSION:
        raise _fault(
            f"{path} has another layout",
            f"version {VERSION}",
            f"version {content.get('version')!r}",
            "Profile the model again, or use the kvkeep that wrote it.",
        )
    try:
        scores = {_layer(key): tuple(row) for key, row in content["scores"].items()}
        return HeadProfile(
            scores=scores,
            options=_mapping(content["options"]),
            versions=_mapping(content["versions"]),
            **{name: content[name] for name in _PLAIN},
        )
    except KeyError as error:
        raise _fault(f"{path} is incomplete", f"an entry {error}", "none") from error
    except (AttributeError, TypeError) as error:
        raise _fault(f"{path} is damaged", "lists of scores by layer", f"{error}") from error
    except HeadProfileError as error:
        raise _fault(f"{path}: {error.problem}", error.expected, error.received) from error


_PLAIN = ("model", "model_name", "method", "seed", "steps", "sinks", "recent")


def _as_text(content: Mapping[str, Any]) -> str:
    """JSON with one line per entry and one per layer."""
    entries = []
    for key, value in content.items():
        if key == "scores":
            rows = [f"    {json.dumps(k)}: {json.dumps(row)}" for k, row in value.items()]
            text = "{\n" + ",\n".join(rows) + "\n  }"
        else:
            text = json.dumps(value)
        entries.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _checked_row(layer: int, row: Any) -> tuple[float, ...]:
    numbers = tuple(row)
    for number in numbers:
        whole = isinstance(number, int | float) and not isinstance(number, bool)
        if not whole or not math.isfinite(number):
            raise _fault(f"bad score in layer {layer}", "finite numbers", f"{number!r}")
    return tuple(float(number) for number in numbers)


def _layer(key: str) -> int:
    if not key.isdecimal():
        raise _fault("bad layer index", "a whole number", key)
    return int(key)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} where names and values are meant")
    return value


def _fault(
    problem: str, expected: str | None, received: object, remedy: str | None = None
) -> HeadProfileError:
    return HeadProfileError(problem, expected=expected, received=received, remedy=remedy)
