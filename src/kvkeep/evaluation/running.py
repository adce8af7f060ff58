"""The run: each prompt read once, each setting asked over a copy, each result written at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from kvkeep.allocation import allocation_of
from kvkeep.attention import DraftStart, RepeatPrompt, require_profile_of
from kvkeep.errors import ConfigError
from kvkeep.evaluation.answering import answers
from kvkeep.evaluation.asking import Asked, Questions
from kvkeep.evaluation.examples import Example
from kvkeep.evaluation.reading import Reading, evicted, read
from kvkeep.evaluation.records import Record, TaskRecord
from kvkeep.evaluation.rendering import Tokens, render, tokenize
from kvkeep.evaluation.results import ResultsFile
from kvkeep.evaluation.scoring import score
from kvkeep.evaluation.settings import PROTOCOLS, Variant
from kvkeep.generation import repeat_prompt
from kvkeep.haystack import Haystack
from kvkeep.spec import named

#: (results there are, results there will be, a few words on what comes next).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """What a run of tasks computes.

    Attributes:
        questions: the prompts.
        variants: settings, the full cache among them.
        protocols: of `PROTOCOLS`.

    Raises:
        ConfigError: a protocol is unknown, or there is nothing to do.
    """

    questions: Questions
    variants: tuple[Variant, ...]
    protocols: tuple[str, ...] = ("aware",)

    def __post_init__(self) -> None:
        for protocol in self.protocols:
            named("protocol", protocol, dict.fromkeys(PROTOCOLS))
        if not self.variants or not self.protocols:
            raise ConfigError("nothing to evaluate", expected="settings and protocols")

    @property
    def count(self) -> int:
        """How many results there will be."""
        return self.questions.count * len(self.variants) * len(self.protocols)


def run_tasks(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    file: ResultsFile,
    *,
    prose: Haystack | None = None,
    progress: Progress | None = None,
) -> tuple[Record, ...]:
    """Compute what the file does not hold yet, and append it record by record.

    Protocol "aware" compresses the whole prompt but its last token, as `kvkeep.generate`
    does; "agnostic" compresses instruction and document, and the question follows after.

    Args:
        model, tokenizer: as mlx-lm loads them.
        plan: what to compute.
        file: its header must be of this model, seed and prose.
        prose: text to hide needles in.
        progress: called before the first result and after each.

    Returns:
        The plan's records, old and new, in its order.

    Raises:
        ConfigError: a length has no room for a task, or a policy cannot score this prompt.
        BudgetError, UnsupportedModelError, HeadProfileError: a setting cannot be carried out.
        EvaluationError: the file cannot be written.
    """
    require_profiles(model, plan.variants)
    report, done = progress or (lambda *_: None), _done(plan, file)
    report(done, plan.count, "")
    wanted: dict[tuple[str, ...], int] = {}
    with mx.stream(generation_stream), wired_limit(model):
        for asked in plan.questions:
            keys = _keys(asked, plan)
            wanted |= {key: len(wanted) + at for at, key in enumerate(keys)}
            if all(key in file for key in keys):
                continue
            example = asked.example(tokenizer, prose)
            tokens = tokenize(tokenizer, render(tokenizer, example))
            for protocol in plan.protocols:
                missing = [v for v in plan.variants if _key(asked, protocol, v) not in file]
                words = f"{example.task}, {example.length:,} tokens"
                step = file.header.prefill_step
                for record in _records(model, tokenizer, example, tokens, protocol, missing, step):
                    file.add(record)
                    done += 1
                    report(done, plan.count, words)
    found = [record for record in file.records if record.key in wanted]
    return tuple(sorted(found, key=lambda record: wanted[record.key]))


def require_profiles(model: Any, variants: Sequence[Variant]) -> None:
    """Refuse head profiles of another model before anything is computed.

    Raises:
        HeadProfileError: names both.
    """
    for variant in variants:
        if variant.config is not None:
            allocation = allocation_of(variant.config)
            if allocation.head_profile is not None:
                require_profile_of(allocation.head_profile, model)


def repeats(tokenizer: Any, variants: Sequence[Variant]) -> RepeatPrompt | None:
    """Instructions to repeat the prompt, if one of the policies takes any."""
    for variant in variants:
        if variant.config is not None:
            prompt = repeat_prompt(tokenizer, variant.config)
            if prompt is not None:
                return prompt
    return None


def _records(
    model: Any,
    tokenizer: Any,
    example: Example,
    tokens: Tokens,
    protocol: str,
    variants: Sequence[Variant],
    step: int,
) -> Iterator[TaskRecord]:
    if not variants:
        return
    held = tokens.ends[0] if protocol == "aware" else tokens.context
    reading = read(
        model,
        tokens.prompts[0][:held],
        [variant.config for variant in variants if variant.config is not None],
        step=step,
        repeat=repeats(tokenizer, variants),
        draft=_draft(tokenizer, tokens, held),
    )
    for variant in variants:
        yield _record(model, tokenizer, example, tokens, protocol, variant, reading, step)
        mx.clear_cache()


def _draft(tokenizer: Any, tokens: Tokens, held: int) -> DraftStart:
    """Policies that draft begin with what follows the compressed part, known or not."""
    prompt = tokens.prompts[0]
    aware = held + 1 == len(prompt)
    return DraftStart(prompt[held] if aware else None, frozenset(tokenizer.eos_token_ids))


def _record(
    model: Any,
    tokenizer: Any,
    example: Example,
    tokens: Tokens,
    protocol: str,
    variant: Variant,
    reading: Reading,
    step: int,
) -> TaskRecord:
    kv = evicted(reading, variant.config)
    start = time.perf_counter()
    said = answers(
        model,
        tokenizer,
        kv.cache,
        tokens,
        held=reading.length,
        max_tokens=example.max_tokens,
        step=step,
    )
    seconds = {
        "prefill": reading.seconds,
        "score": kv.times.score,
        "compact": kv.times.compact,
        "decode": time.perf_counter() - start,
    }
    expected = tuple(turn.answers for turn in example.turns)
    scores = tuple(
        score(text, right, example.scoring) for text, right in zip(said, expected, strict=True)
    )
    setting = variant.setting
    return TaskRecord(
        task=example.task,
        version=example.version,
        index=example.index,
        example_seed=example.seed,
        length=example.length,
        protocol=protocol,
        policy=setting.policy,
        budget=setting.budget,
        allocation=setting.allocation,
        store=setting.store,
        options=setting.options,
        prompt_tokens=len(tokens.prompts[0]),
        compressed_tokens=reading.length,
        rows=kv.retained_tokens,
        kv_bytes=kv.compact_cache_nbytes,
        exact_kv_bytes=kv.exact_cache_nbytes,
        score=sum(scores) / len(scores),
        turn_scores=scores,
        answers=said,
        expected=expected,
        seconds={name: round(value, 4) for name, value in seconds.items()},
    )


def _key(asked: Asked, protocol: str, variant: Variant) -> tuple[str, ...]:
    where = (asked.task, str(asked.length), str(asked.index), protocol)
    return ("task", *where, variant.setting.key)


def _keys(asked: Asked, plan: Plan) -> list[tuple[str, ...]]:
    return [_key(asked, p, variant) for p in plan.protocols for variant in plan.variants]


def _done(plan: Plan, file: ResultsFile) -> int:
    return sum(key in file for asked in plan.questions for key in _keys(asked, plan))
