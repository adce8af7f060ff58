"""lm-evaluation-harness under eviction: its tasks, mlx-lm's adapter, a compacted prompt cache."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import batch_generate, generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import ConfigError
from kvkeep.evaluation.records import HarnessRecord, Record
from kvkeep.evaluation.results import ResultsFile
from kvkeep.evaluation.running import Progress, require_profiles
from kvkeep.evaluation.settings import Variant
from kvkeep.generation import draft_start, repeat_prompt
from kvkeep.spec import EvictionConfig, checked_count

_DEFAULT_TOKENS = 256  # of an answer whose task names no number


def require_lm_eval() -> ModuleType:
    """lm_eval, or a clear word on how to get it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise ConfigError(
            "tasks of lm-evaluation-harness need the package lm_eval",
            received=str(error),
            remedy="pip install 'kvkeep[lm-eval]'",
        ) from error


def evicting_lm(
    model: Any,
    tokenizer: Any,
    config: EvictionConfig | None,
    *,
    max_tokens: int | None = None,
    batch_size: int = 8,
    use_chat_template: bool | None = None,
    prefill_step: int = 2048,
) -> Any:
    """A model of lm-evaluation-harness whose prompts are evicted: mlx-lm's `MLXLM`, extended.

    Of a request with a context, all of the context but its last token is prefilled and
    compacted; the last token and the continuation are read over what stayed. So the
    likelihoods of several choices come from one compact cache, and generation starts from it.

    Args:
        model, tokenizer: as mlx-lm loads them.
        config: None runs exact, through the same path.
        max_tokens: of an answer, whatever the task says.
        batch_size: prompts that are generated from at once.
        use_chat_template: None is: if the tokenizer has one.
        prefill_step: tokens per chunk.

    Raises:
        ConfigError: lm_eval is not installed.
    """
    require_lm_eval()
    evaluate = importlib.import_module("mlx_lm.evaluate")

    class EvictingLM(evaluate.MLXLM):
        def __init__(self) -> None:
            super(evaluate.MLXLM, self).__init__()  # MLXLM's own would load the model again
            self._model, self.tokenizer = model, tokenizer
            self._max_tokens, self._batch_size = max_tokens, batch_size
            self._sampler = None
            templated = tokenizer.chat_template is not None
            self.use_chat_template = templated if use_chat_template is None else use_chat_template

        def _process_prompt(
            self, prompt: Sequence[int], step_size: int = prefill_step
        ) -> tuple[mx.array, list[Any]]:
            tokens = list(map(int, prompt))
            cache = prompt_cache_of(self._model, self.tokenizer, tokens, config, step_size)
            with mx.stream(generation_stream):
                logits = self._model(mx.array(tokens[-1:])[None], cache=cache)
                logprobs = nn.log_softmax(logits[:, -1, :].astype(mx.float32))
                mx.eval(logprobs, [layer.state for layer in cache])
            return logprobs, cache

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            raise ConfigError(
                "rolling likelihoods have no prompt that could be evicted",
                expected="tasks that generate or choose between continuations",
                received="a task of type loglikelihood_rolling",
                remedy="`kvkeep eval --text FILE` measures perplexity after eviction.",
            )

        def generate_until(self, requests: Any) -> list[str]:
            asked = [request.args for request in requests]
            found: list[str] = []
            for start in range(0, len(asked), batch_size):
                found += generated(
                    model,
                    tokenizer,
                    asked[start : start + batch_size],
                    config,
                    max_tokens=max_tokens,
                    special=not self.use_chat_template,
                    step=prefill_step,
                )
            return found

    return EvictingLM()


def generated(
    model: Any,
    tokenizer: Any,
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    config: EvictionConfig | None,
    *,
    max_tokens: int | None = None,
    special: bool = False,
    step: int = 2048,
) -> list[str]:
    """Greedy answers to requests of one batch, each over its own compact cache.

    Args:
        asked: (context, the harness's options: "until", "max_gen_toks").
        config: None runs exact.
        max_tokens: of an answer; None is what the options say.
        special: add the tokenizer's special tokens.
        step: tokens per chunk of a prefill.
    """
    prompts = [list(tokenizer.encode(text, add_special_tokens=special)) for text, _ in asked]
    texts = batch_generate(
        model,
        tokenizer,
        [tokens[-1:] for tokens in prompts],
        prompt_caches=[
            prompt_cache_of(model, tokenizer, tokens, config, step) for tokens in prompts
        ],
        max_tokens=[
            max_tokens or options.get("max_gen_toks", _DEFAULT_TOKENS) for _, options in asked
        ],
    ).texts
    thinks = tokenizer.think_end if tokenizer.has_thinking else None
    return [
        answer_of(text, options.get("until", ()), thinks)
        for text, (_, options) in zip(texts, asked, strict=True)
    ]


def prompt_cache_of(
    model: Any, tokenizer: Any, tokens: Sequence[int], config: EvictionConfig | None, step: int
) -> list[Any]:
    """A cache of all tokens but the last, compacted unless `config` is None.

    Raises:
        ConfigError, BudgetError, UnsupportedModelError: as in `compact_prompt_cache`.
    """
    cache = make_prompt_cache(model)
    if len(tokens) < 2:
        return cache
    with mx.stream(generation_stream), wired_limit(model):
        if config is not None:
            return prefill_and_compact(
                model,
                tokens[:-1],
                cache,
                config,
                step=step,
                repeat_prompt=repeat_prompt(tokenizer, config),
                draft_start=draft_start(tokenizer, config, tokens[-1]),
            ).cache
        for start in range(0, len(tokens) - 1, step):
            chunk = mx.array(list(tokens[start : min(start + step, len(tokens) - 1)]))
            model(chunk[None], cache=cache)
            mx.eval([layer.state for layer in cache])
    return cache


def answer_of(text: str, until: str | Sequence[str], think_end: str | None = None) -> str:
    """A generated text up to the first stop string, without what was thought before it."""
    stops = [until] if isinstance(until, str) else list(until)
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    text = text[: min(ends, default=len(text))]
    if think_end is not None and think_end in text:
        text = text.partition(think_end)[2]
    return text


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    variants: Sequence[Variant],
    file: ResultsFile,
    *,
    limit: int | None = None,
    shots: int | None = None,
    batch_size: int = 8,
    include: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[Record, ...]:
    """Evaluate harness tasks under each setting; what the file holds is not computed again.

    Args:
        model, tokenizer: as mlx-lm loads them.
        tasks: names that lm_eval knows.
        variants: settings.
        file: its header must be of this model.
        limit: examples per task; None is all.
        shots: examples shown in the prompt; None is the task's own.
        batch_size: prompts at once.
        include: folder with task files of one's own.
        progress: called before the first result and after each.

    Returns:
        The records, old and new.

    Raises:
        ConfigError: lm_eval is missing or knows no such task; others as in `run_tasks`.
    """
    if limit is not None:
        checked_count("limit", limit, 1)
    lm_eval = require_lm_eval()
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=None if include is None else str(include)
    )
    require_known(tasks, manager)
    require_profiles(model, variants)
    version = importlib.metadata.version("lm_eval")
    keys = {
        (task, at): ("harness", task, version, str(limit), str(shots), variant.setting.key)
        for task in tasks
        for at, variant in enumerate(variants)
    }
    report, done = progress or (lambda *_: None), sum(key in file for key in keys.values())
    report(done, len(keys), "")
    for at, variant in enumerate(variants):
        missing = [task for task in tasks if keys[task, at] not in file]
        if not missing:
            continue
        lm = evicting_lm(
            model,
            tokenizer,
            variant.config,
            batch_size=batch_size,
            prefill_step=file.header.prefill_step,
        )
        for task in missing:
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=[task],
                num_fewshot=shots,
                limit=limit,
                apply_chat_template=lm.use_chat_template,
                task_manager=manager,
                bootstrap_iters=0,
            )
            file.add(_record(task, version, limit, shots, variant, found["results"][task]))
            done += 1
            report(done, len(keys), f"{task}, {variant.setting.name}")
    wanted = set(keys.values())
    return tuple(record for record in file.records if record.key in wanted)


def require_known(tasks: Sequence[str], manager: Any) -> None:
    """Refuse task names before a model answers anything.

    Raises:
        ConfigError: lm_eval has no such task, or it is a group of tasks.
    """
    known = set(manager.all_subtasks)
    for task in tasks:
        if task not in known:
            raise ConfigError(
                f"lm_eval knows no task {task!r}",
                expected="names of single tasks (`lm_eval --tasks list` shows them)",
                received=task,
            )


def _record(
    task: str,
    version: str,
    limit: int | None,
    shots: int | None,
    variant: Variant,
    found: Mapping[str, Any],
) -> HarnessRecord:
    """The numbers of one task; lm_eval names them "metric,filter"."""
    setting = variant.setting
    numbers = {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
    }
    return HarnessRecord(
        task=task,
        lm_eval=version,
        limit=limit,
        shots=shots,
        policy=setting.policy,
        budget=setting.budget,
        allocation=setting.allocation,
        store=setting.store,
        options=setting.options,
        metrics={name: value for name, value in numbers.items() if "_stderr," not in name},
    )
