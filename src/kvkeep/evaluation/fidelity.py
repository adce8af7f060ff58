"""How far a compact cache's predictions are from the exact cache's, on a text of one's own."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from kvkeep.errors import ConfigError
from kvkeep.evaluation.reading import Reading, evicted, read
from kvkeep.evaluation.records import FidelityRecord, Record
from kvkeep.evaluation.results import ResultsFile
from kvkeep.evaluation.running import Progress, repeats, require_profiles
from kvkeep.evaluation.settings import Variant
from kvkeep.spec import checked_count

_CHUNK = 128  # positions whose distributions over the vocabulary exist at once


@dataclass(frozen=True)
class TextPlan:
    """What a run over a text computes.

    Attributes:
        name: of the text.
        text: its characters.
        variants: settings; the full cache among them compares with itself.
        lengths: tokens read before eviction.
        continuation: N, tokens that follow.
        limit: stretches of the text, at most; they do not overlap.

    Raises:
        ConfigError: a number is out of range.
    """

    name: str
    text: str
    variants: tuple[Variant, ...]
    lengths: tuple[int, ...] = (1000,)
    continuation: int = 128
    limit: int = 8

    def __post_init__(self) -> None:
        for length in self.lengths:
            checked_count("length", length, 2)
        checked_count("continuation", self.continuation, 1)
        checked_count("limit", self.limit, 1)

    @property
    def digest(self) -> str:
        """16 hex digits over the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Stretch:
    """A piece of a text.

    Attributes:
        index: from 0.
        length: how many of the tokens are read before eviction.
        tokens: [length + N] ids.
    """

    index: int
    length: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Predictions:
    """What a cache says of the tokens that follow.

    Attributes:
        logprobs: [N, vocab] float32, in pieces of at most 128 positions.
        loss: -log p of each token that follows, [N].
    """

    logprobs: tuple[mx.array, ...]
    loss: tuple[float, ...]


def read_text(path: str | Path) -> str:
    """A UTF-8 text file.

    Raises:
        ConfigError: it cannot be read, or holds nothing.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "unreadable text file", expected="a text file in UTF-8", received=f"{error}"
        ) from error
    if not text.strip():
        raise ConfigError(f"{path} holds no text", expected="a text to predict")
    return text


def stretches(tokenizer: Any, plan: TextPlan) -> list[Stretch]:
    """All stretches of a run, those of small index first.

    Raises:
        ConfigError: the text is shorter than one of them.
    """
    ids = list(tokenizer.encode(plan.text))
    found = []
    for length in plan.lengths:
        size = length + plan.continuation
        if len(ids) < size:
            raise ConfigError(
                f"the text is too short for a length of {length:,}",
                expected=f"at least {size:,} tokens ({length:,} and {plan.continuation:,} after)",
                received=f"{len(ids):,} tokens",
                remedy="Give a longer text, or lower --lengths or --continuation.",
            )
        for index in range(min(plan.limit, len(ids) // size)):
            found.append(Stretch(index, length, tuple(ids[index * size : (index + 1) * size])))
    return sorted(found, key=lambda stretch: stretch.index)


def run_text(
    model: Any,
    tokenizer: Any,
    plan: TextPlan,
    file: ResultsFile,
    *,
    progress: Progress | None = None,
) -> tuple[Record, ...]:
    """Compute what the file does not hold yet, and append it record by record.

    All but the last token of a stretch's first part are read and evicted, as in generation; the
    last one and the continuation are then fed as they stand in the text, over the exact cache
    and over each compact copy.

    Returns:
        The plan's records, old and new.

    Raises:
        ConfigError, BudgetError, UnsupportedModelError, HeadProfileError, EvaluationError: as in
            `run_tasks`.
    """
    require_profiles(model, plan.variants)
    pieces = stretches(tokenizer, plan)
    keys = [_key(plan, piece, v) for piece in pieces for v in plan.variants]
    total, done = len(keys), sum(key in file for key in keys)
    report = progress or (lambda *_: None)
    report(done, total, "")
    with mx.stream(generation_stream), wired_limit(model):
        for piece in pieces:
            missing = [v for v in plan.variants if _key(plan, piece, v) not in file]
            words = f"{plan.name}, {piece.length:,} tokens"
            step = file.header.prefill_step
            for record in _records(model, tokenizer, plan, piece, missing, step):
                file.add(record)
                done += 1
                report(done, total, words)
    wanted = set(keys)
    return tuple(record for record in file.records if record.key in wanted)


def predictions(model: Any, cache: list[Any], tokens: Sequence[int]) -> Predictions:
    """Feed tokens to a cache, and keep what it says of each next one.

    Args:
        model: an mlx-lm model.
        cache: appended to, all tokens but the last.
        tokens: N + 1 ids.
    """
    rows, loss = [], []
    count = len(tokens) - 1
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        logits = model(mx.array(list(tokens[start:stop]))[None], cache=cache)[0]
        logprobs = nn.log_softmax(logits.astype(mx.float32), axis=-1)
        targets = mx.array(list(tokens[start + 1 : stop + 1]))[:, None]
        told = -mx.take_along_axis(logprobs, targets, axis=-1)[:, 0]
        mx.eval(logprobs, told)
        rows.append(logprobs)
        loss += told.tolist()  # type: ignore[operator]  # a list of floats
    return Predictions(tuple(rows), tuple(loss))


def divergence(exact: Predictions, other: Predictions) -> tuple[list[float], list[int]]:
    """KL(exact || other) in nats, and whether the most likely tokens agree: [N] each."""
    kl: list[float] = []
    agree: list[int] = []
    for p, q in zip(exact.logprobs, other.logprobs, strict=True):
        # A token that neither side can say (-inf) adds nothing.
        terms = mx.where(mx.isinf(p), 0.0, mx.exp(p) * (p - q))
        kl += mx.maximum(terms.sum(axis=-1), 0.0).tolist()  # type: ignore[operator]
        same = p.argmax(axis=-1) == q.argmax(axis=-1)
        agree += same.astype(mx.int32).tolist()  # type: ignore[operator]
    return kl, agree


def _records(
    model: Any,
    tokenizer: Any,
    plan: TextPlan,
    piece: Stretch,
    variants: Sequence[Variant],
    step: int,
) -> Iterator[FidelityRecord]:
    if not variants:
        return
    first, rest = piece.tokens[: piece.length - 1], piece.tokens[piece.length - 1 :]
    configs = [variant.config for variant in variants if variant.config is not None]
    reading = read(model, first, configs, step=step, repeat=repeats(tokenizer, variants))
    exact = predictions(model, evicted(reading, None).cache, rest)
    for variant in variants:
        yield _record(model, plan, piece, variant, reading, exact, rest)
        mx.clear_cache()


def _record(
    model: Any,
    plan: TextPlan,
    piece: Stretch,
    variant: Variant,
    reading: Reading,
    exact: Predictions,
    rest: Sequence[int],
) -> FidelityRecord:
    kv = evicted(reading, variant.config)
    start = time.perf_counter()
    other = predictions(model, kv.cache, rest)
    kl, agree = divergence(exact, other)
    seconds = {
        "prefill": reading.seconds,
        "score": kv.times.score,
        "compact": kv.times.compact,
        "continuation": time.perf_counter() - start,
    }
    setting, count = variant.setting, len(kl)
    return FidelityRecord(
        text=plan.digest,
        text_name=plan.name,
        index=piece.index,
        length=piece.length,
        continuation=plan.continuation,
        policy=setting.policy,
        budget=setting.budget,
        allocation=setting.allocation,
        store=setting.store,
        options=setting.options,
        compressed_tokens=reading.length,
        rows=kv.retained_tokens,
        kv_bytes=kv.compact_cache_nbytes,
        exact_kv_bytes=kv.exact_cache_nbytes,
        kl=sum(kl) / count,
        agreement=sum(agree) / count,
        perplexity=math.exp(sum(other.loss) / count),
        exact_perplexity=math.exp(sum(exact.loss) / count),
        kl_curve=tuple(kl),
        agreement_curve=tuple(agree),
        loss_curve=other.loss,
        exact_loss_curve=exact.loss,
        seconds={name: round(value, 4) for name, value in seconds.items()},
    )


def _key(plan: TextPlan, piece: Stretch, variant: Variant) -> tuple[str, ...]:
    where = (plan.digest, str(piece.length), str(plan.continuation), str(piece.index))
    return ("fidelity", *where, variant.setting.key)
