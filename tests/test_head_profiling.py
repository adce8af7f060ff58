"""The offline pass: resumable, tied to its model, refusing what it cannot profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from head_samples import random_sample, tiny_settings
from kvkeep.errors import ConfigError, HeadProfileError, UnsupportedModelError
from kvkeep.heads import (
    ProfileSettings,
    model_identity,
    passkey_samples,
    profile_heads,
    require_profile_of,
    state_file_of,
)
from kvkeep.heads import profiling as profiling_module
from kvkeep.spec import HeadProfile, load_head_profile
from tiny_models import (
    VOCAB,
    BareAttentionLayer,
    nudged,
    tiny_bare_model,
    tiny_llama,
    tiny_tokenizer,
)

METHODS = pytest.mark.parametrize("method", ["optimise", "recall", "estimate"])


def profiled(output: Path | None = None, **options: Any) -> HeadProfile:
    """A profile of `tiny_llama`; `model`, `samples` and `progress` may be given too."""
    rest = {name: options.pop(name) for name in ("progress", "samples") if name in options}
    model = options.pop("model", None) or tiny_llama()
    return profile_heads(
        model,
        tiny_tokenizer(),
        tiny_settings(**options),
        output=output,
        **{"samples": random_sample, **rest},
    )


def stopping_after(steps: int, error: type[BaseException]) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, words: str) -> None:
        if done == steps:
            raise error

    return progress


class Killed(BaseException):
    """Stands for a process that ends without a word."""


@METHODS
def test_the_same_call_gives_the_same_profile(method: str) -> None:
    assert profiled(method=method) == profiled(method=method)
    assert profiled(method=method).scores != profiled(method=method, steps=5).scores


@METHODS
@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    method: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling_module, "_SAVE_EVERY", 2)
    profiled(tmp_path / "whole.json", method=method)
    path = tmp_path / "parts.json"
    seen: list[int] = []
    for stop in (3, 5):
        with pytest.raises(error):
            profiled(path, method=method, progress=stopping_after(stop, error))
        assert state_file_of(path).exists()
        assert not path.exists()
    profiled(path, method=method, progress=lambda done, total, words: seen.append(done))
    assert seen == [5, 6] if error is KeyboardInterrupt else [4, 5, 6]
    assert path.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["parts.json", "whole.json"]


def test_resuming_is_not_repeating(tmp_path: Path) -> None:
    """The samples of done steps are not drawn again, but for the first that checks the model."""
    drawn: list[int] = []

    def samples(index: int) -> Any:
        drawn.append(index)
        return random_sample(index)

    with pytest.raises(KeyboardInterrupt):
        profiled(tmp_path / "x.json", progress=stopping_after(4, KeyboardInterrupt))
    profiled(tmp_path / "x.json", samples=samples)
    assert drawn == [0, 4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 7}, "another steps; expected 7; got 6"),
        ({"seed": 1}, "another seed; expected 1; got 0"),
        ({"lr": 0.2}, "another options"),
        ({"recent": 6}, "another recent; expected 6; got 5"),
        ({"method": "recall"}, "cannot be gone on with"),
        ({"model": tiny_llama(seed=9)}, "another model"),
        ({"model": tiny_llama(layers=3)}, "cannot be gone on with"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_state_of_another_run_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(KeyboardInterrupt):
        profiled(path, progress=stopping_after(2, KeyboardInterrupt))
    before = state_file_of(path).read_bytes()
    with pytest.raises(HeadProfileError) as caught:
        profiled(path, **change)
    assert message in str(caught.value)
    assert str(state_file_of(path)) in str(caught.value)
    assert state_file_of(path).read_bytes() == before
    assert not path.exists()


@pytest.mark.parametrize("keep", [0, 40, -10])
def test_a_damaged_state_is_refused(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(KeyboardInterrupt):
        profiled(path, progress=stopping_after(2, KeyboardInterrupt))
    state = state_file_of(path)
    state.write_bytes(state.read_bytes()[:keep])
    with pytest.raises(HeadProfileError, match="cannot be gone on with"):
        profiled(path)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    seen: list[int] = []
    with pytest.raises(HeadProfileError, match="cannot write"):
        profiled(tmp_path / "taken" / "x.json", progress=lambda *a: seen.append(a[0]))
    assert seen == []


def test_a_profile_says_how_it_was_made(tmp_path: Path) -> None:
    model = tiny_llama(layers=3, sliding_layers=[1])
    profile = profiled(tmp_path / "x.json", model=model, seed=4, texts=2)
    assert load_head_profile(tmp_path / "x.json") == profile
    assert list(profile.scores) == [0, 2]
    assert (profile.sinks, profile.recent, profile.steps, profile.seed) == (2, 5, 6, 4)
    assert profile.options["texts"] == 2
    assert profile.options["streaming_from"] == "question"
    assert set(profile.versions) == {"kvkeep", "mlx", "mlx-lm"}
    assert profile.model == model_identity(model)
    require_profile_of(profile, model)


@METHODS
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "quantised"])
def test_models_of_other_number_formats_are_profiled_alike(method: str, kind: str) -> None:
    plain = tiny_llama(head_dim=32)
    other = tiny_llama(head_dim=32)
    if kind == "quantised":
        nn.quantize(other, group_size=32, bits=8)
    else:
        other.set_dtype(getattr(mx, kind))
    expected, found = (profiled(method=method, model=model) for model in (plain, other))
    for layer, row in expected.scores.items():
        assert found.scores[layer] == pytest.approx(row, abs=0.1)
    assert (found.model == expected.model) == (kind == "float16")


def test_a_profile_of_another_model_is_refused_by_both_names() -> None:
    profile = dataclasses.replace(profiled(method="recall"), model_name="the first")
    other = tiny_llama(seed=1)
    with pytest.raises(HeadProfileError) as caught:
        require_profile_of(profile, other)
    for part in (model_identity(tiny_llama()), model_identity(other), "the first"):
        assert part in str(caught.value)


def test_identity_sees_what_matters() -> None:
    plain = model_identity(tiny_llama())
    assert model_identity(tiny_llama()) == plain
    through_float32 = tiny_llama()
    through_float32.args.rms_norm_eps = 9.999999747378752e-06
    assert model_identity(through_float32) == plain
    half = tiny_llama()
    half.set_dtype(mx.float16)
    assert model_identity(half) == plain
    others = [tiny_llama(seed=1), tiny_llama(layers=3), nudged(tiny_llama(), 0.01)]
    longer = tiny_llama()
    longer.args.rope_theta = 20000
    others.append(longer)
    elsewhere = tiny_llama()
    elsewhere.args.model_path = "/somewhere/else"  # type: ignore[attr-defined]
    assert model_identity(elsewhere) == plain
    assert len({plain, *map(model_identity, others)}) == 5


class Biased(BareAttentionLayer):
    """A block whose attention goes through mlx-lm's function, with what `mask` adds."""

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        h = self.norm(x)
        batch, length, _ = h.shape

        def split(rows: mx.array, heads: int) -> mx.array:
            return rows.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)

        keys, values = cache.update_and_fetch(
            split(self.k_proj(h), self.kv_heads), split(self.v_proj(h), self.kv_heads)
        )
        out = scaled_dot_product_attention(
            split(self.q_proj(h), self.heads), keys, values, cache=cache, scale=1.0, mask=mask
        )
        return x + self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


def biased_model() -> Any:
    """A model that adds positional scores to its attention through the mask."""
    model: Any = tiny_bare_model()
    model.layers = [Biased(32, 4, 2, 16) for _ in range(2)]

    class Model(type(model)):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            h = self.embed_tokens(inputs)
            cache = cache or [KVCache() for _ in self.layers]
            rows = mx.arange(h.shape[1])
            far = (rows[:, None] - rows[None]).astype(mx.float32)
            mask = mx.where(far >= 0, -0.5 * far, -1e9)
            for layer, layer_cache in zip(self.layers, cache, strict=True):
                h = layer(h, mask, layer_cache)
            return self.embed_tokens.as_linear(h)

    model.__class__ = Model
    mx.eval(model.parameters())
    return model


@METHODS
def test_models_whose_heads_cannot_be_seen_are_refused_by_name(method: str) -> None:
    with pytest.raises(HeadProfileError, match=r"'bare' cannot be profiled.*one call.*\[0, 1\]"):
        profiled(method=method, model=tiny_bare_model())
    with pytest.raises(HeadProfileError, match=r"'bare' cannot be profiled.*plain causal"):
        profiled(method=method, model=biased_model())


def test_models_without_full_attention_are_refused() -> None:
    model = tiny_llama()
    model.make_cache = lambda: [object(), object()]  # type: ignore[method-assign]
    model.__class__ = type("Model", (type(model),), {"__call__": lambda *a, **k: None})
    with pytest.raises(HeadProfileError, match="0 such layers"):
        profiled(model=model)


def test_training_needs_the_last_hidden_states() -> None:
    model: Any = tiny_llama()
    inner = model.model

    class Hidden(type(model)):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return self.lm_head(self["inner"](inputs, cache))

        @property
        def layers(self) -> Any:
            return self["inner"].layers

        def make_cache(self) -> list[Any]:
            return [KVCache() for _ in self.layers]

    model.pop("model")
    model["inner"] = inner
    model.__class__ = Hidden
    with pytest.raises(UnsupportedModelError, match="'llama' does not show its last hidden states"):
        profiled(model=model)
    assert profiled(model=model, method="recall").scores == profiled(method="recall").scores


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "guess"}, "unknown method; expected optimise, estimate, recall; got guess"),
        ({"streaming_from": "end"}, "unknown streaming_from"),
        ({"kind": "poems"}, "unknown kind; expected both, words, numbers; got poems"),
        ({"steps": 0}, "bad value for steps"),
        ({"texts": -1}, "bad value for texts"),
        ({"length": 3}, "bad value for length"),
        ({"recent": 0}, "bad value for recent"),
        ({"sinks": -1}, "bad value for sinks"),
        ({"seed": -1}, "bad value for seed"),
        ({"lr": 0.0}, "bad value for lr"),
        ({"lr": float("nan")}, "bad value for lr"),
        ({"reg": -0.1}, "bad value for reg"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileSettings(**change)
    assert message in str(caught.value)


def test_streaming_heads_that_would_lose_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep the whole text"):
        profiled(sinks=20, recent=20)


def test_scores_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()

    class Broken(type(model.model)):
        def __call__(self, *args: Any, **options: Any) -> mx.array:
            hidden = super().__call__(*args, **options)
            seen = any(type(c).__name__ == "GatedLayer" for c in options.get("cache") or ())
            return hidden * float("nan") if seen else hidden

    model.model.__class__ = Broken
    with pytest.raises(HeadProfileError, match="not finite"):
        profiled(tmp_path / "x.json", model=model)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("kind", ["words", "numbers"])
def test_passkey_samples_mark_equal_tokens(kind: str) -> None:
    make = passkey_samples(tiny_tokenizer(), 900, passkeys=2, words=6, seed=3, kind=kind)
    sample = make(0)
    again = passkey_samples(tiny_tokenizer(), 900, passkeys=2, words=6, seed=3, kind=kind)
    assert sample == again(0)
    assert sample != make(1)
    digits = {ord(digit) % VOCAB for digit in "0123456789"}
    span = sample.tokens[slice(*sample.recalls[0].needle)]
    assert (span[0] == ord(" ") % VOCAB) and (set(span[1:]) <= digits) == (kind == "numbers")
    assert len(sample.tokens) <= 900
    assert len(sample.recalls) == 2
    for recall in sample.recalls:
        needle, answer = (sample.tokens[slice(*span)] for span in (recall.needle, recall.answer))
        assert needle == answer and len(needle) > 4
        assert recall.needle[1] <= sample.recall_start < recall.answer[0]
    assert sample.labels[0] == sample.recalls[0].answer[0] - 1
    assert len(sample.labels) == sum(b - a for a, b in (r.answer for r in sample.recalls))


def test_both_kinds_of_passkeys_come_in_turn() -> None:
    words, numbers, both = (
        passkey_samples(tiny_tokenizer(), 900, passkeys=2, words=3, seed=3, kind=kind)
        for kind in ("words", "numbers", "both")
    )
    assert both(0) == words(0) != numbers(0)
    assert both(1) == numbers(1) != words(1)
