"""Evaluations of tiny models: a tokenizer of letters with a chat template, plans, results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvkeep.evaluation import (
    Plan,
    Questions,
    Record,
    ResultsFile,
    header_of,
    prose_digest,
    run_tasks,
    variants_of,
)
from tiny_models import VOCAB, _Letters, tiny_llama

#: One of each kind of need: none, a window, gathered while the prompt is read, read again.
POLICIES = (
    "snapkv:window=8",
    "span:allocation=adaptive",
    "lookahead:draft_tokens=4",
    "snapkv-d",
    "knorm",
    "random:seed=3",
    "criticalkv",
    "compactor",
    "observed_attention",
    "expected_attention",
    "kvzip:allocation=global",
)


class ChatLetters(_Letters):
    """One character per token, and a chat template."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        assert options["add_generation_prompt"] and not options["tokenize"]
        told = [f"<{message['role']}>{message['content']}" for message in messages]
        return "".join(told) + "<assistant>"


def chat_tokenizer() -> TokenizerWrapper:
    return TokenizerWrapper(ChatLetters())


@functools.cache
def model(seed: int = 0) -> Any:
    """The same one every time; nothing here changes its weights."""
    return tiny_llama(vocab=VOCAB, seed=seed)


def plan_of(
    tasks: Sequence[str] = ("needle-prose", "multi-turn"),
    *,
    lengths: tuple[int, ...] = (900,),
    limit: int = 1,
    seed: int = 0,
    policies: Sequence[str] = ("snapkv", "knorm"),
    budgets: Sequence[str] = ("25%",),
    protocols: tuple[str, ...] = ("aware",),
) -> Plan:
    questions = Questions(tuple(tasks), lengths, limit, seed)
    return Plan(questions, variants_of(policies, budgets), protocols)


def results_file(path: Path, the_model: Any, seed: int = 0) -> ResultsFile:
    return ResultsFile(path, header_of(the_model, name="tiny", seed=seed, prose=prose_digest()))


def evaluated(path: Path, plan: Plan, **more: Any) -> tuple[Record, ...]:
    """The plan's records, with the tiny model; what the file holds is not computed again."""
    with results_file(path, model(), plan.questions.seed) as file:
        return run_tasks(model(), chat_tokenizer(), plan, file, **more)


def numbers(records: Sequence[Record]) -> list[Record]:
    """Records without the seconds, which no two runs share."""
    return [dataclasses.replace(record, seconds={}) for record in records]
