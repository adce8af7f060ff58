"""Prompts as JSON lines, for programs that have no kvkeep: the same text, whole and in parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvkeep.evaluation.examples import Example
from kvkeep.evaluation.rendering import Rendered, render, tokenize
from kvkeep.evaluation.writing import write_text

EXPORT_SCHEMA = "kvkeep eval prompts"
EXPORT_VERSION = 1


def exported(tokenizer: Any, example: Example) -> dict[str, Any]:
    """One line of the export.

    `context_text` and each turn's `ask_text`, put together in order, are exactly what a model
    reads before it answers that turn (with the right answers to earlier turns in between);
    `context`, `question` and `answer_prefix` are the same before the chat template.
    """
    rendered = render(tokenizer, example)
    tokens = tokenize(tokenizer, rendered)
    return {
        "task": example.task,
        "version": example.version,
        "index": example.index,
        "seed": example.seed,
        "length": example.length,
        "tokens": len(tokens.prompts[0]),
        "context_tokens": tokens.context,
        "scoring": example.scoring,
        "max_tokens": example.max_tokens,
        "templated": rendered.templated,
        "instruction": example.instruction,
        "context": example.context,
        "context_text": rendered.context,
        "turns": _turns(example, rendered),
        "details": dict(example.details),
    }


def export_examples(
    path: Path, tokenizer: Any, examples: Iterable[Example], about: dict[str, Any]
) -> int:
    """Write a header line and a line per example; returns how many.

    Args:
        path: replaced when all is written.
        tokenizer: whose chat template renders.
        examples: in the order of the file.
        about: provenance, added to the header.

    Raises:
        EvaluationError: the file cannot be written.
        ConfigError: the template refuses a message.
    """
    header = {"schema": EXPORT_SCHEMA, "schema_version": EXPORT_VERSION, **about}
    lines = [header, *(exported(tokenizer, example) for example in examples)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_text(path, text)
    return len(lines) - 1


def _turns(example: Example, rendered: Rendered) -> list[dict[str, Any]]:
    return [
        {
            "question": turn.question,
            "answers": list(turn.answers),
            "answer_prefix": turn.answer_prefix,
            "gold": turn.gold,
            "ask_text": ask,
        }
        for turn, ask in zip(example.turns, rendered.asks, strict=True)
    ]
