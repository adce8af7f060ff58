"""Prompt caches on disk: mlx-lm's own functions on kvkeep's caches, and kvkeep's careful ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import kvkeep
from kvkeep import (
    BatchPositionPreservingKVCache,
    LayerSelection,
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
    Selection,
)
from kvkeep.errors import CacheFileError
from oracles import greedy, greedy_batch, prefilled
from tiny_models import random_tokens, tiny_llama

LAYERS = 6
# Layer 4 is a sliding-window one, so the list holds a cache that eviction leaves alone.
MODEL = tiny_llama(layers=LAYERS, head_dim=32, sliding_layers=(4,), sliding_window=24)
PROMPT = random_tokens(80)
METADATA = {"model": "tiny", "note": 'ünïcode, \n and "quotes"', "empty": ""}
KINDS = [
    PositionPreservingKVCache,
    PositionPreservingKVCache,
    PositionPreservingKVCache,
    KVCache,
    RotatingKVCache,
    PositionPreservingQuantizedKVCache,
]


def mixed() -> list[Any]:
    """Shared, per-head, unequal heads, stock, sliding-window and quantised caches in one list."""
    stock = prefilled(MODEL, PROMPT[:-1], 16)
    random = np.random.default_rng(0)

    def draw(keep: int) -> np.ndarray:
        return np.sort(random.choice(79, keep, replace=False))

    layers = {
        0: LayerSelection((draw(20),)),
        1: LayerSelection((draw(30), draw(30))),
        2: LayerSelection((np.arange(20), np.arange(30, 50))),
        5: LayerSelection((draw(25), draw(25))),
    }
    cache = kvkeep.evict_selection(stock, Selection(79, layers)).cache
    cache[5] = cache[5].to_quantized(group_size=32, bits=8)
    # A trim and the same tokens again: layer 2 is left with unequal heads.
    for i in (0, 1, 2, 3, 5):
        cache[i].trim(39)
    for layer in (0, 1, 2, 3, 5):
        width = 32
        rows = mx.array(np.random.default_rng(layer).standard_normal((1, 2, 39, width)), mx.float32)
        cache[layer].update_and_fetch(rows, rows)
    assert cache[2].owns_attention
    return cache


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert [type(layer) for layer in ours] == [type(layer) for layer in theirs] == KINDS
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.offset == other.offset
        assert getattr(mine, "positions", None) == getattr(other, "positions", None)
        assert getattr(mine, "meta_state", None) == getattr(other, "meta_state", None)
        assert getattr(mine, "owns_attention", None) == getattr(other, "owns_attention", None)


def assert_decodes_the_same(ours: list[Any], theirs: list[Any]) -> None:
    mine, other = (greedy(MODEL, cache, PROMPT[-1], 8) for cache in (ours, theirs))
    assert mine[0] == other[0]
    np.testing.assert_array_equal(mine[1], other[1])


def contents(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# -- mlx-lm's own functions -----------------------------------------------------------


def test_mlx_lm_saves_and_loads_a_mixed_list(tmp_path: Path) -> None:
    path = str(tmp_path / "mixed.safetensors")
    cache = mixed()
    mlx_cache.save_prompt_cache(path, cache, METADATA)
    loaded, metadata = mlx_cache.load_prompt_cache(path, return_metadata=True)
    assert metadata == METADATA
    assert_same(loaded, cache)
    assert_decodes_the_same(loaded, cache)


def test_a_loaded_cache_is_as_good_as_the_saved_one(tmp_path: Path) -> None:
    """Trim, append, save again: the second file holds the same as the first run's cache."""
    path = str(tmp_path / "once.safetensors")
    cache = mixed()
    mlx_cache.save_prompt_cache(path, cache)
    loaded: Any = mlx_cache.load_prompt_cache(path)
    for both in (cache, loaded):
        greedy(MODEL, both, 3, 4)
        for i in (0, 1, 2, 3, 5):
            both[i].trim(4)
    again = str(tmp_path / "twice.safetensors")
    mlx_cache.save_prompt_cache(again, [c for c in loaded if type(c) is not RotatingKVCache])
    expected = [c for c in cache if type(c) is not RotatingKVCache]
    for mine, other in zip(mlx_cache.load_prompt_cache(again), expected, strict=True):
        assert (mine.offset, mine.state[2:] and type(mine)) == (other.offset, type(other))
        assert getattr(mine, "positions", None) == getattr(other, "positions", None)


def test_a_batch_cache_is_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny_llama()
    prompts = [random_tokens(50, 1), random_tokens(30, 2)]
    caches = [
        kvkeep.evict_prompt_cache(
            prefilled(model, p), list(range(0, len(p), 2)), true_offset=len(p)
        ).cache
        for p in prompts
    ]
    batch = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    path = str(tmp_path / "batch.safetensors")
    mlx_cache.save_prompt_cache(path, batch)
    loaded: Any = mlx_cache.load_prompt_cache(path)
    assert all(type(layer) is BatchPositionPreservingKVCache for layer in loaded)
    mine, other = (greedy_batch(model, cache, [1, 2], 5) for cache in (loaded, batch))
    assert mine[0] == other[0]
    np.testing.assert_array_equal(mine[1], other[1])


def test_a_new_process_loads_and_decodes_the_same(tmp_path: Path) -> None:
    """There nothing but `import kvkeep` has prepared mlx-lm, its attention included."""
    path = tmp_path / "mixed.safetensors"
    cache = mixed()
    kvkeep.save_prompt_cache(path, cache, METADATA)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import kvkeep\n"
        "import mlx_lm.models.cache as c\n"
        "from oracles import greedy\n"
        "from test_cache_files import MODEL, PROMPT\n"
        "print(greedy(MODEL, c.load_prompt_cache(sys.argv[2]), PROMPT[-1], 8)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(greedy(MODEL, cache, PROMPT[-1], 8)[0])


# -- kvkeep's functions ---------------------------------------------------------------


def test_round_trip_with_metadata(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "folder" / "mixed.safetensors"
    cache = mixed()
    kvkeep.save_prompt_cache(path, cache, METADATA)
    assert contents(path.parent) == ["mixed.safetensors"]
    loaded, metadata = kvkeep.load_prompt_cache(path, return_metadata=True)
    assert metadata == METADATA
    assert_same(loaded, cache)
    assert_decodes_the_same(loaded, cache)


def test_each_side_reads_the_other_sides_file(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    cache = mixed()
    kvkeep.save_prompt_cache(ours, cache)
    mlx_cache.save_prompt_cache(str(theirs), cache)
    stock: Any = mlx_cache.load_prompt_cache(str(ours))
    assert_same(stock, cache)
    assert_same(kvkeep.load_prompt_cache(theirs), cache)


def test_the_suffix_may_be_left_out(tmp_path: Path) -> None:
    kvkeep.save_prompt_cache(tmp_path / "plain", mixed())
    assert contents(tmp_path) == ["plain.safetensors"]
    assert_same(kvkeep.load_prompt_cache(tmp_path / "plain"), mixed())


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    kvkeep.save_prompt_cache(path, mixed())
    return path


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.99])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CacheFileError, match="not a readable prompt cache"):
        kvkeep.load_prompt_cache(path)


def test_a_damaged_header(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:8] + data[8:200].replace(b'"', b"'") + data[200:])
    with pytest.raises(CacheFileError):
        kvkeep.load_prompt_cache(path)


WEIGHTS = {"model.layers.0.weight": mx.zeros((4, 4))}


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"format": "pt"},
        {"0.a": "b", "1.0": "KVCache", "2.0": ""},
        {"1.0": "no_such_class", "2.0": ""},
        {"1.0": "make_prompt_cache", "2.0": ""},
        {"1.0": "PositionPreservingKVCache", "2.0": ""},
        {"a": "1", "b": "2", "c": "3"},
    ],
)
@pytest.mark.parametrize("arrays", [WEIGHTS, {"0.0": mx.zeros((2, 2))}], ids=["weights", "array"])
def test_a_foreign_safetensors_file(
    tmp_path: Path, metadata: dict[str, str], arrays: dict[str, mx.array]
) -> None:
    path = tmp_path / "foreign.safetensors"
    mx.save_safetensors(str(path), arrays, metadata)
    with pytest.raises(CacheFileError) as raised:
        kvkeep.load_prompt_cache(path)
    assert "save_prompt_cache" in str(raised.value)


@pytest.mark.parametrize("name", ["notes.txt", "notes.safetensors", "notes"])
@pytest.mark.parametrize("text", ["", "hello", "x" * 5000])
def test_a_text_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CacheFileError):
        kvkeep.load_prompt_cache(tmp_path / name)


def test_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(CacheFileError, match="no such prompt cache"):
            kvkeep.load_prompt_cache(path)


def test_a_state_that_contradicts_itself(tmp_path: Path) -> None:
    keys, values, table, start, appended, protected = mixed()[0].state
    wrong = PositionPreservingKVCache()

    class Forged:
        state = (keys, values, table[:, 1:], start, appended, protected)

    Forged.__name__ = type(wrong).__name__
    path = tmp_path / "forged.safetensors"
    mlx_cache.save_prompt_cache(str(path), [Forged()])
    with pytest.raises(CacheFileError, match="inconsistent cache state"):
        kvkeep.load_prompt_cache(path)


@pytest.mark.parametrize("cache", [[], [KVCache()], [PositionPreservingKVCache()]])
def test_nothing_to_save(tmp_path: Path, cache: list[Any]) -> None:
    with pytest.raises(CacheFileError, match="nothing to save"):
        kvkeep.save_prompt_cache(tmp_path / "x.safetensors", cache)
    assert contents(tmp_path) == []


@pytest.mark.parametrize("stage", ["write", "move", "state", "metadata"])
def test_a_failing_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = saved(tmp_path)
    before, cache = path.read_bytes(), mixed()
    metadata: Any = {}

    def disk_full(name: str, *_: Any, **__: Any) -> None:
        Path(name).write_bytes(b"half a file")
        raise RuntimeError("no space left on device")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no")

    if stage == "write":
        monkeypatch.setattr(mx, "save_safetensors", disk_full)
    elif stage == "move":
        monkeypatch.setattr(os, "replace", refuse)
    elif stage == "state":
        monkeypatch.setattr(KVCache, "state", property(lambda self: (object(),)))
    else:
        metadata = {"number": object()}
    with pytest.raises(CacheFileError, match="cannot write"):
        kvkeep.save_prompt_cache(path, cache, metadata)
    monkeypatch.undo()
    assert contents(tmp_path) == ["good.safetensors"]
    assert path.read_bytes() == before
    assert_same(kvkeep.load_prompt_cache(path), mixed())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheFileError, match="cannot write"):
        kvkeep.save_prompt_cache(tmp_path / "file" / "x.safetensors", mixed())


def test_saving_over_a_loaded_file(tmp_path: Path) -> None:
    """MLX reads arrays when they are used: the file must not change under a loaded cache."""
    path = saved(tmp_path)
    loaded = kvkeep.load_prompt_cache(path)
    kvkeep.save_prompt_cache(path, prefilled(tiny_llama(), PROMPT[:9]))
    assert_decodes_the_same(loaded, mixed())


def test_stock_lists_are_mlx_lms_files(tmp_path: Path) -> None:
    model = tiny_llama(head_dim=32)
    cache = prefilled(model, PROMPT[:-1])
    cache[1] = cache[1].to_quantized(group_size=32, bits=8)
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    kvkeep.save_prompt_cache(ours, cache, {"a": "b"})
    mlx_cache.save_prompt_cache(str(theirs), cache, {"a": "b"})
    assert ours.read_bytes() == theirs.read_bytes()
    assert [type(c) for c in kvkeep.load_prompt_cache(ours)] == [KVCache, QuantizedKVCache]
