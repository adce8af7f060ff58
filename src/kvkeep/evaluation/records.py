"""What a results file holds: a header that says what the numbers hang on, and a line each."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from kvkeep.attention import model_identity
from kvkeep.evaluation.settings import Option, Setting
from kvkeep.evaluation.tasks import TASKS

SCHEMA = "kvkeep eval results"
SCHEMA_VERSION = 1
#: Header fields that are told but may differ when a run goes on.
TOLD = ("model_name", "python", "platform")


@dataclass(frozen=True)
class Header:
    """The first line: whatever else the numbers depend on. A file belongs to one header.

    Attributes:
        schema, schema_version: of the file.
        model: type and hash of configuration and weights (`model_identity`).
        model_name: as the user spelled it.
        kvkeep, mlx, mlx_lm, transformers: versions.
        python, platform: where it ran.
        device: kind and name.
        dtype: of the weights.
        seed: of all prompts.
        prose: digest of the running text.
        prefill_step: tokens per chunk.
        tasks: version of each task.
    """

    schema: str
    schema_version: int
    model: str
    model_name: str
    kvkeep: str
    mlx: str
    mlx_lm: str
    transformers: str
    python: str
    platform: str
    device: str
    dtype: str
    seed: int
    prose: str
    prefill_step: int
    tasks: Mapping[str, int]


@dataclass(frozen=True)
class TaskRecord:
    """One example under one setting.

    Attributes:
        task, version, index, example_seed, length: the example.
        protocol: "aware" (the question is compressed with the rest) or "agnostic".
        policy, budget, allocation, store, options: the setting.
        prompt_tokens: tokens before the first answer.
        compressed_tokens: of them, those that were compressed.
        rows: rows per KV head that stayed of them (the mean, rounded).
        kv_bytes, exact_kv_bytes: of the live rows after and before.
        score: in [0, 1], the mean over the turns.
        turn_scores: one per turn.
        answers: what the model wrote, per turn.
        expected: the right answers, per turn.
        seconds: prefill (of the shared reading), score, compact, decode.
        kind: "task".
    """

    task: str
    version: int
    index: int
    example_seed: int
    length: int
    protocol: str
    policy: str
    budget: str
    allocation: str
    store: str
    options: Mapping[str, Option]
    prompt_tokens: int
    compressed_tokens: int
    rows: int
    kv_bytes: int
    exact_kv_bytes: int
    score: float
    turn_scores: tuple[float, ...]
    answers: tuple[str, ...]
    expected: tuple[tuple[str, ...], ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    kind: str = "task"

    @property
    def key(self) -> tuple[str, ...]:
        """What was computed: no file has two records of one key."""
        where = (self.task, str(self.length), str(self.index), self.protocol)
        return (self.kind, *where, self.setting.key)

    @property
    def setting(self) -> Setting:
        """The setting's names."""
        return Setting(self.policy, self.budget, self.allocation, self.store, self.options)


@dataclass(frozen=True)
class FidelityRecord:
    """One stretch of a text: its continuation over the exact and over a compact cache.

    Position i of a curve is the prediction of the i-th token after eviction.

    Attributes:
        text: digest of the text.
        text_name: name of its file.
        index: which stretch, from 0.
        length: tokens before eviction.
        continuation: N, tokens that follow.
        policy, budget, allocation, store, options: the setting.
        compressed_tokens, rows, kv_bytes, exact_kv_bytes: as in `TaskRecord`.
        kl: mean of `kl_curve`, nats.
        agreement: share of positions with the same most likely token.
        perplexity, exact_perplexity: exp of the mean loss over the compact and exact cache.
        kl_curve: KL(exact || compact) at each position, nats.
        agreement_curve: 1 or 0 at each position.
        loss_curve, exact_loss_curve: -log p(token) at each position, nats.
        seconds: prefill (of the shared reading), score, compact, continuation.
        kind: "fidelity".
    """

    text: str
    text_name: str
    index: int
    length: int
    continuation: int
    policy: str
    budget: str
    allocation: str
    store: str
    options: Mapping[str, Option]
    compressed_tokens: int
    rows: int
    kv_bytes: int
    exact_kv_bytes: int
    kl: float
    agreement: float
    perplexity: float
    exact_perplexity: float
    kl_curve: tuple[float, ...]
    agreement_curve: tuple[int, ...]
    loss_curve: tuple[float, ...]
    exact_loss_curve: tuple[float, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    kind: str = "fidelity"

    @property
    def key(self) -> tuple[str, ...]:
        """As in `TaskRecord`."""
        where = (self.text, str(self.length), str(self.continuation), str(self.index))
        return (self.kind, *where, self.setting.key)

    @property
    def setting(self) -> Setting:
        """The setting's names."""
        return Setting(self.policy, self.budget, self.allocation, self.store, self.options)


@dataclass(frozen=True)
class HarnessRecord:
    """A task of lm-evaluation-harness under one setting.

    Attributes:
        task: its name there.
        lm_eval: version.
        limit: examples, at most; None is all.
        shots: examples in the prompt; None is the task's own number.
        policy, budget, allocation, store, options: the setting.
        metrics: what the harness reports, by its names.
        kind: "harness".
    """

    task: str
    lm_eval: str
    limit: int | None
    shots: int | None
    policy: str
    budget: str
    allocation: str
    store: str
    options: Mapping[str, Option]
    metrics: Mapping[str, float]
    kind: str = "harness"

    @property
    def key(self) -> tuple[str, ...]:
        """As in `TaskRecord`."""
        where = (self.task, self.lm_eval, str(self.limit), str(self.shots))
        return (self.kind, *where, self.setting.key)

    @property
    def setting(self) -> Setting:
        """The setting's names."""
        return Setting(self.policy, self.budget, self.allocation, self.store, self.options)


Record = TaskRecord | FidelityRecord | HarnessRecord
KINDS: Mapping[str, type[Record]] = {
    "task": TaskRecord,
    "fidelity": FidelityRecord,
    "harness": HarnessRecord,
}


def header_of(
    model: Any, *, name: str = "", seed: int = 0, prose: str = "", prefill_step: int = 2048
) -> Header:
    """The header of a run with this model, here and now."""
    versions = {p: importlib.metadata.version(p) for p in ("kvkeep", "mlx", "mlx-lm")}
    return Header(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        model=model_identity(model),
        model_name=name,
        kvkeep=versions["kvkeep"],
        mlx=versions["mlx"],
        mlx_lm=versions["mlx-lm"],
        transformers=importlib.metadata.version("transformers"),
        python=platform.python_version(),
        platform=platform.platform(),
        device=_device(),
        dtype=_dtype(model),
        seed=seed,
        prose=prose,
        prefill_step=prefill_step,
        tasks={task.name: task.version for task in TASKS.values()},
    )


def _device() -> str:
    kind = str(mx.default_device().type).rpartition(".")[2]
    return f"{kind}, {mx.device_info().get('device_name', 'unknown')}"


def _dtype(model: Any) -> str:
    """The dtypes of the weights, the most common first."""
    sizes: dict[str, int] = {}
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for _, weight in weights:
        name = str(weight.dtype).rpartition(".")[2]
        sizes[name] = sizes.get(name, 0) + weight.nbytes
    return "+".join(sorted(sizes, key=lambda name: (-sizes[name], name)))
