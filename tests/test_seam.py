"""The attention seam: where it stands, and that it changes nothing for anybody else."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from textwrap import dedent
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from kvkeep.attention import install, installed, observing, remove, seam
from oracles import logits_of, prefilled
from tiny_models import random_tokens, tiny_llama

NAME = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def _seam_as_it_was() -> Iterator[None]:
    before = installed()
    yield
    setattr(base, NAME, seam._stock)  # whatever a test left there
    install()
    if not before:
        remove()


@pytest.fixture
def stock() -> Any:
    """mlx-lm's own function, with the seam out of its place."""
    remove()
    return base.scaled_dot_product_attention


def held_by(module: ModuleType) -> Any:
    return module.__dict__[NAME]


def call(*args: Any, **options: Any) -> Any:
    """What a model's attention calls, looked up now."""
    return held_by(base)(*args, **options)


def assert_runs(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_installed_on_first_use_and_reaches_models_imported_before_and_after() -> None:
    assert_runs(
        """
        import sys
        import mlx_lm.models.base as base
        import mlx_lm.models.llama as before
        stock = base.scaled_dot_product_attention

        import kvkeep
        from kvkeep import attention
        assert not attention.installed()
        assert base.scaled_dot_product_attention is stock
        assert before.scaled_dot_product_attention is stock
        assert "mlx_lm.models.qwen3" not in sys.modules

        args = before.ModelArgs(model_type="llama", hidden_size=16, num_hidden_layers=1,
            intermediate_size=16, num_attention_heads=2, rms_norm_eps=1e-5, vocab_size=20)
        model = before.Model(args)
        kvkeep.compact_prompt_cache(model, list(range(20)), budget=30)
        assert attention.installed()
        dispatch = base.scaled_dot_product_attention
        assert dispatch is not stock
        assert before.scaled_dot_product_attention is dispatch

        import mlx_lm.models.qwen3 as after
        assert after.scaled_dot_product_attention is dispatch

        attention.remove()
        assert not attention.installed()
        for module in (base, before, after):
            assert module.scaled_dot_product_attention is stock, module
        """
    )


def test_installing_twice_is_installing_once(stock: Any) -> None:
    install()
    dispatch = base.scaled_dot_product_attention
    assert dispatch is not stock
    install()
    assert base.scaled_dot_product_attention is dispatch
    assert installed()
    remove()
    remove()
    assert base.scaled_dot_product_attention is stock
    assert held_by(llama) is stock
    assert not installed()


def test_a_model_outside_mlx_lm_is_covered_through_its_module(stock: Any) -> None:
    module = ModuleType("a_model_from_elsewhere")
    module.__dict__[NAME] = stock
    bystander = ModuleType("a_bystander")
    bystander.__dict__[NAME] = stock
    model_class = type("Model", (), {"__module__": module.__name__})
    for m in (module, bystander):
        sys.modules[m.__name__] = m
    try:
        install(model_class())
        assert module.__dict__[NAME] is base.scaled_dot_product_attention is not stock
        assert bystander.__dict__[NAME] is stock
        remove()
        assert module.__dict__[NAME] is stock
    finally:
        for m in (module, bystander):
            del sys.modules[m.__name__]


def test_another_function_of_that_name_is_left_alone(stock: Any) -> None:
    module = ModuleType("mlx_lm.models.with_its_own")
    module.__dict__[NAME] = own = lambda *_: None
    sys.modules[module.__name__] = module
    try:
        install()
        assert module.__dict__[NAME] is own
        remove()
        assert module.__dict__[NAME] is own
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    "cache",
    [None, KVCache(), RotatingKVCache(8), QuantizedKVCache(32, 8), object()],
    ids=lambda cache: type(cache).__name__,
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_other_caches_pass_through_unchanged(
    cache: Any, with_sinks: bool, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, answer = [], object()

    def original(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return answer

    install()
    monkeypatch.setattr(seam, "_original", original)
    queries, keys, values, mask, sinks = (object() for _ in range(5))
    more = {"sinks": sinks} if with_sinks else {}
    assert call(queries, keys, values, cache=cache, scale=0.3, mask=mask, **more) is answer
    assert call(queries, keys, values, cache, 0.3, mask, **more) is answer
    for args, options in calls:
        assert [id(a) for a in args] == [id(a) for a in (queries, keys, values)]
        expected = {"cache": cache, "scale": 0.3, "mask": mask, "sinks": more.get("sinks")}
        assert options.keys() == expected.keys()
        assert all(options[name] is value for name, value in expected.items())
    assert len(calls) == 2


@pytest.mark.parametrize("bits", [None, 8])
def test_a_stock_run_is_bit_equal_with_and_without(bits: int | None, stock: Any) -> None:
    model = tiny_llama(head_dim=32)
    tokens = random_tokens(40)

    def run() -> np.ndarray:
        cache = prefilled(model, tokens, 16)
        if bits:
            cache = [layer.to_quantized(group_size=32, bits=bits) for layer in cache]
        return logits_of(model, cache, [1, 2, 3])

    without = run()
    install()
    np.testing.assert_array_equal(run(), without)


def wrap_the_base() -> tuple[Any, list[int]]:
    """Another tool puts its own function over what stands in mlx-lm's base."""
    inner, calls = base.scaled_dot_product_attention, []

    def wrapper(*args: Any, **options: Any) -> mx.array:
        calls.append(1)
        return inner(*args, **options)

    return wrapper, calls


def test_another_tool_that_wraps_the_dispatcher_is_called_once(
    stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    wrapper, calls = wrap_the_base()
    monkeypatch.setattr(base, NAME, wrapper)
    install()
    assert installed()
    x = mx.random.normal((1, 2, 3, 8))
    cache = KVCache()
    cache.update_and_fetch(x, x)
    out = call(x, x, x, cache=None, scale=1.0, mask="causal")
    right = stock(x, x, x, cache=None, scale=1.0, mask="causal")
    np.testing.assert_array_equal(np.asarray(out), np.asarray(right))
    assert len(calls) == 1
    with observing([cache], [0], window=2) as observers:
        call(x, x, x, cache=cache, scale=1.0, mask="causal")
        assert observers[0].calls == 1
    remove()
    assert base.scaled_dot_product_attention is wrapper
    out = call(x, x, x, cache=None, scale=1.0, mask="causal")
    np.testing.assert_array_equal(np.asarray(out), np.asarray(right))
    assert held_by(llama) is stock


def test_another_tool_that_came_first_is_given_back(
    stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper, calls = wrap_the_base()
    monkeypatch.setattr(base, NAME, wrapper)
    install()
    logits_of(tiny_llama(), make_prompt_cache(tiny_llama()), [1, 2])
    assert calls, "the models' attention does not reach it"
    remove()
    assert base.scaled_dot_product_attention is wrapper


def test_threads_may_install_and_remove_at_once(stock: Any) -> None:
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(50):
            install()
            remove()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    remove()
    assert base.scaled_dot_product_attention is stock
    assert held_by(llama) is stock
    install()
    assert held_by(llama) is base.scaled_dot_product_attention is not stock
