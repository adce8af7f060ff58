"""The offline pass: step by step over samples, resumable, to a profile."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention import install, model_identity, model_name
from kvkeep.errors import ConfigError, HeadProfileError
from kvkeep.haystack import Haystack
from kvkeep.heads.forward import head_shape, require_reproducible
from kvkeep.heads.gates import GateTraining
from kvkeep.heads.measures import HeadMeasuring
from kvkeep.heads.resuming import load_state, save_state, state_file_of
from kvkeep.heads.samples import MakeSample, passkey_samples
from kvkeep.heads.settings import ProfileSettings
from kvkeep.spec import HeadProfile

#: (steps done, steps in all, a few words on the scores so far).
Progress = Callable[[int, int, str], None]
_SAVE_EVERY = 10  # steps, each some seconds: a kill loses little


def profile_heads(
    model: Any,
    tokenizer: Any,
    settings: ProfileSettings | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    name: str = "",
    haystack: Haystack | None = None,
    samples: MakeSample | None = None,
    progress: Progress | None = None,
) -> HeadProfile:
    """Tell a model's retrieval heads from its streaming heads. The weights are not changed.

    Args:
        model: as mlx-lm loads it.
        tokenizer: its tokenizer.
        settings: method and options; by default gates are trained as DuoAttention does.
        output: the profile is written there. While it is not finished, a file beside it holds
            the state: after an interruption the same call goes on, with the same result.
        name: what people call the model.
        haystack: running text around the passkeys; by default that of `kvkeep.haystack`.
        samples: step -> sample, instead of passkey texts.
        progress: called before the first step and after each.

    Raises:
        HeadProfileError: the model's heads cannot be told apart, or the unfinished file is of
            another run.
        UnsupportedModelError: the model does not show its last hidden states.
        ConfigError: a sample is too short for its passkeys, or for what streaming heads keep.
    """
    settings = settings or ProfileSettings()
    shape = head_shape(model)
    make = samples or passkey_samples(
        tokenizer,
        settings.length,
        passkeys=settings.passkeys,
        words=settings.words,
        kind=settings.kind,
        seed=settings.seed,
        haystack=haystack,
    )
    first = make(0)
    _require_something_to_lose(settings, first.recall_start)
    require_reproducible(model, shape, first.tokens)
    install(model)
    kind = GateTraining if settings.method == "optimise" else HeadMeasuring
    method = kind(model, shape, make, settings)
    versions = {p: importlib.metadata.version(p) for p in ("kvkeep", "mlx", "mlx-lm")}
    run = {
        "model": model_identity(model),
        "method": settings.method,
        "options": settings.options(),
        "seed": settings.seed,
        "steps": settings.samples,
        "sinks": settings.sinks,
        "recent": settings.recent,
        "text": "its own" if samples is not None else getattr(haystack, "name", "default"),
        "versions": versions,
    }
    state = _run(method, settings.samples, run, output, progress)
    table = np.asarray(method.scores(state, settings.samples).astype(mx.float32))
    profile = HeadProfile(
        model=run["model"],
        scores={
            layer: tuple(map(float, row)) for layer, row in zip(shape.layers, table, strict=True)
        },
        sinks=settings.sinks,
        recent=settings.recent,
        method=settings.method,
        options=settings.options(),
        seed=settings.seed,
        steps=settings.samples,
        model_name=name or model_name(model),
        versions=versions,
    )
    if output is not None:
        profile.save(output)
        state_file_of(output).unlink(missing_ok=True)
    return profile


def _run(
    method: GateTraining | HeadMeasuring,
    steps: int,
    run: dict[str, Any],
    output: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> dict[str, mx.array]:
    """The state after all steps, saved now and then and when interrupted."""
    report = progress or (lambda *_: None)
    file = None if output is None else state_file_of(output)
    state, done = method.start(), 0
    if file is not None:
        _require_writable(file)
        done, state = load_state(file, state, run) or (done, state)
    try:
        report(done, steps, method.shown(state, done))
        for index in range(done, steps):
            state, done = method.advance(state, index), index + 1
            if file is not None and done % _SAVE_EVERY == 0 and done < steps:
                save_state(file, done, state, run)
            report(done, steps, method.shown(state, done))
    except KeyboardInterrupt:
        if file is not None and done:
            save_state(file, done, state, run)
        raise
    if not all(bool(mx.isfinite(array).all().item()) for array in state.values()):
        raise HeadProfileError(
            "the scores are not finite",
            expected="finite scores",
            received="infinite ones or NaN",
            remedy="Load the model in float32 or bfloat16, or lower --lr.",
        )
    return state


def _require_something_to_lose(settings: ProfileSettings, length: int) -> None:
    if length <= settings.sinks + settings.recent:
        raise ConfigError(
            "streaming heads would keep the whole text",
            expected=f"texts of more than sinks + recent = {settings.sinks + settings.recent} rows",
            received=f"{length} rows",
            remedy="Raise the length, or lower sinks or recent.",
        )


def _require_writable(file: Path) -> None:
    """Say before the work that its result cannot be kept, not after it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadProfileError(f"cannot write to {file.parent}", received=str(error)) from error
    if not os.access(file.parent, os.W_OK):
        raise HeadProfileError(f"cannot write to {file.parent}", received="no permission")
