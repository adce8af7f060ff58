"""Generating over a compact cache: mlx-lm's own stepping, bit-equal where nothing is evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import kvkeep
from kvkeep import EvictionConfig, PositionPreservingKVCache
from kvkeep.caches import PositionPreservingQuantizedKVCache
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import ConfigError
from oracles import prefilled
from tiny_models import VOCAB, nudged, random_tokens, tiny_bare_model, tiny_llama

PROMPT = random_tokens(90)
KEEP_ALL = EvictionConfig.parse({"policy": "snapkv", "budget": "100%", "min_tokens": 0})
EVICT = EvictionConfig.parse(
    {"policy": "snapkv", "budget": 24, "window": 6, "pool_kernel": 5, "min_tokens": 0}
)


def word_tokenizer(eos: str | None = None) -> TokenizerWrapper:
    """Words w0 … w62 and <s>, which starts every text."""
    vocab = {"<s>": VOCAB - 1, **{f"w{i}": i for i in range(VOCAB - 1)}}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", VOCAB - 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="w0", eos_token=eos
    )
    return TokenizerWrapper(fast)


def run(how: Callable[..., Any], model: Any, prompt: Any, **options: Any) -> list[Any]:
    return list(how(model, word_tokenizer(), prompt, **{"max_tokens": 24, **options}))


def ours(model: Any, prompt: Any = PROMPT, config: Any = EVICT, **options: Any) -> list[Any]:
    return run(kvkeep.stream_generate, model, prompt, config=config, **options)


def theirs(model: Any, prompt: Any = PROMPT, **options: Any) -> list[Any]:
    return run(mlx_lm.stream_generate, model, prompt, **options)


def tokens_of(responses: list[Any]) -> list[int]:
    return [response.token for response in responses]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    """Every field but the speeds and the memory is equal, log-probabilities bit for bit."""
    assert len(ours) == len(theirs)
    names = ("text", "token", "from_draft", "prompt_tokens", "generation_tokens", "finish_reason")
    for a, b in zip(ours, theirs, strict=True):
        assert [getattr(a, name) for name in names] == [getattr(b, name) for name in names]
        np.testing.assert_array_equal(np.asarray(a.logprobs), np.asarray(b.logprobs))


@pytest.mark.parametrize("step", [1, 7, 64, 2048])
@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("budget", ["100%", 5000])
def test_keeping_everything_is_stock_greedy_decoding(budget: Any, policy: str, step: int) -> None:
    model = tiny_llama()
    config = EvictionConfig.parse({"policy": policy, "budget": budget, "min_tokens": 0})
    stock = theirs(model, prefill_step_size=step)
    responses = ours(model, config=config, prefill_step_size=step)
    assert_same(responses, stock)
    assert len(set(tokens_of(stock))) > 3  # not one token over and over
    assert responses[0].kv is not None
    assert not responses[0].kv.evicted
    assert responses[0].kv.original_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("config", [None, KEEP_ALL], ids=["off", "keep-all"])
@pytest.mark.parametrize(
    "prompt", ["w1 w2 w3", "<s> w1 w2", " ".join(f"w{i % 60}" for i in PROMPT)]
)
def test_text_is_encoded_as_mlx_lm_encodes_it(prompt: str, config: Any) -> None:
    model = tiny_llama()
    assert_same(ours(model, prompt, config), theirs(model, prompt))


def test_no_config_is_mlx_lm_itself() -> None:
    model = tiny_llama()
    responses = ours(model, config=None)
    assert_same(responses, theirs(model))
    assert all(response.kv is None for response in responses)
    cache, twin = make_prompt_cache(model), make_prompt_cache(model)
    assert_same(ours(model, config=None, prompt_cache=cache), theirs(model, prompt_cache=twin))
    assert [layer.offset for layer in cache] == [layer.offset for layer in twin]


def test_no_config_passes_every_keyword_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def stream(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> list[Any]:
        calls.append({"prompt": prompt.tolist(), **options})
        return []

    monkeypatch.setattr(mlx_lm, "stream_generate", stream)
    options = {"max_kv_size": 64, "kv_bits": 4, "sampler": print, "draft_model": tiny_llama()}
    assert ours(tiny_llama(), [1, 2], None, prompt_progress_callback=print, **options) == []
    (call,) = calls
    assert call["prompt"] == [1, 2]
    assert call["max_tokens"] == 24
    assert call["prompt_progress_callback"] is print
    assert all(call[name] is value for name, value in options.items())


@pytest.mark.parametrize("config", [EVICT, EvictionConfig.parse({"budget": 24, "min_tokens": 0})])
@pytest.mark.parametrize("step", [7, 2048])
def test_an_evicted_run_is_mlx_lms_over_the_compact_cache(config: Any, step: int) -> None:
    model = tiny_llama()
    cache = kvkeep.compact_prompt_cache(
        model, PROMPT[:-1], config=config, prefill_step_size=step
    ).cache
    stepped = theirs(model, PROMPT[-1:], prompt_cache=cache)
    responses = ours(model, config=config, prefill_step_size=step)
    assert tokens_of(responses) == tokens_of(stepped)
    for a, b in zip(responses, stepped, strict=True):
        np.testing.assert_array_equal(np.asarray(a.logprobs), np.asarray(b.logprobs))
    assert tokens_of(responses) != tokens_of(theirs(model))  # eviction shows here


def test_what_a_response_reports() -> None:
    responses = ours(tiny_llama())
    assert len(responses) == 24
    for number, response in enumerate(responses, start=1):
        assert response.prompt_tokens == len(PROMPT)
        assert response.generation_tokens == number
        assert response.prompt_tps > 0
        assert response.finish_reason == ("length" if number == 24 else None)
        kv = response.kv
        assert (kv.evicted, kv.retained_tokens, kv.original_tokens) == (True, 24, 89)
        assert (kv.cache, kv.true_offset, kv.kv_layers) == ([], 89, 2)
        assert kv.times.prefill > 0
    seconds = responses[0].prompt_tokens / responses[0].prompt_tps
    assert seconds >= responses[0].kv.times.prefill  # the whole prompt, nothing left out


def test_a_response_is_mlx_lms_with_one_field_more() -> None:
    stock_class = type(theirs(tiny_llama(), max_tokens=1)[0])
    response = ours(tiny_llama(), max_tokens=1)[0]
    assert isinstance(response, stock_class)
    assert vars(response).keys() - {field.name for field in fields(stock_class)} == {"kv"}
    # In mlx_lm itself the name means the function, not the module that defines the class.
    assert not hasattr(mlx_lm.generate, "GenerationResponse")


def test_generate_gives_the_whole_text(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = tiny_llama(), word_tokenizer()
    text = kvkeep.generate(model, tokenizer, PROMPT, config=EVICT, max_tokens=24)
    assert text == "".join(response.text for response in ours(model))
    assert capsys.readouterr().out == ""
    again = kvkeep.generate(model, tokenizer, PROMPT, config=EVICT, max_tokens=24, verbose=True)
    assert again == text
    assert capsys.readouterr().out == text + "\n"
    stock = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=24)
    assert kvkeep.generate(model, tokenizer, PROMPT, config=KEEP_ALL, max_tokens=24) == stock


def test_it_stops_where_mlx_lm_stops() -> None:
    model = tiny_llama()
    third = tokens_of(theirs(model))[3]
    options = {"max_tokens": 24, "config": KEEP_ALL}
    tokenizer = word_tokenizer(eos=f"w{third}")
    responses = list(kvkeep.stream_generate(model, tokenizer, PROMPT, **options))
    assert_same(responses, list(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=24)))
    assert responses[-1].finish_reason == "stop"


def test_a_sampler_draws_as_in_mlx_lm() -> None:
    model = tiny_llama()

    def drawn(stream: Callable[..., Any], **more: Any) -> list[int]:
        mx.random.seed(7)
        return tokens_of(stream(model, sampler=make_sampler(temp=1.0, top_p=0.9), **more))

    assert drawn(ours, config=KEEP_ALL) == drawn(theirs)


# -- processors ------------------------------------------------------------------------


class Recorder:
    """A logits processor that notes what it is shown and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:2], PROMPT[:1]], ids=len)
def test_logits_processors_see_the_whole_prompt_as_in_mlx_lm(prompt: list[int]) -> None:
    model = tiny_llama()
    stock, kept, evicted = Recorder(), Recorder(), Recorder()
    theirs(model, prompt, logits_processors=[stock])
    ours(model, prompt, KEEP_ALL, logits_processors=[kept])
    assert kept.seen == stock.seen
    responses = ours(model, prompt, EVICT, logits_processors=[evicted])
    assert evicted.seen[0] == prompt
    assert evicted.seen[23] == [*prompt, *tokens_of(responses)[:23]]


def test_penalties_count_the_prompts_tokens() -> None:
    model = tiny_llama()

    def penalised(stream: Callable[..., Any], **more: Any) -> list[int]:
        processors = make_logits_processors(repetition_penalty=1.5, repetition_context_size=80)
        return tokens_of(stream(model, logits_processors=processors, **more))

    assert penalised(ours, config=KEEP_ALL) == penalised(theirs)
    assert penalised(theirs) != tokens_of(theirs(model))


# -- drafts ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
@pytest.mark.parametrize("noise", [0.0, 0.15, None])
def test_a_draft_model_changes_no_token(noise: float | None, num_draft_tokens: int) -> None:
    model = tiny_llama()
    draft = tiny_llama(seed=9) if noise is None else nudged(tiny_llama(), noise)
    options = {"draft_model": draft, "num_draft_tokens": num_draft_tokens}
    speculated = ours(model, **options)
    assert tokens_of(speculated) == tokens_of(ours(model))
    assert speculated[0].kv.retained_tokens == 24
    assert any(r.from_draft for r in speculated) or noise is None
    kept = ours(model, config=KEEP_ALL, **options)
    assert tokens_of(kept) == tokens_of(theirs(model, **options)) == tokens_of(theirs(model))


def test_a_drafts_caches_may_follow_the_models() -> None:
    model, draft = tiny_llama(), nudged(tiny_llama(layers=1), 0.0)
    cache = make_prompt_cache(model) + make_prompt_cache(draft)
    first = ours(model, draft_model=draft, prompt_cache=cache)
    assert [type(layer) for layer in cache] == [PositionPreservingKVCache] * 2 + [KVCache]
    alone = make_prompt_cache(model)
    assert tokens_of(first) == tokens_of(ours(model, prompt_cache=alone))
    sizes = [layer.size() for layer in cache]
    second = ours(model, PROMPT[:40], draft_model=draft, prompt_cache=cache)
    assert len(second) == 24
    assert cache[2].offset > sizes[2] + 39
    assert [type(layer) for layer in cache] == [PositionPreservingKVCache] * 2 + [KVCache]


# -- caches ----------------------------------------------------------------------------


def test_a_prompt_cache_goes_on_over_turns_and_is_compacted_again() -> None:
    model = tiny_llama()
    cache, twin = make_prompt_cache(model), make_prompt_cache(model)
    entries = cache
    for turn, prompt in enumerate((PROMPT, random_tokens(50, seed=3), random_tokens(9, seed=4))):
        responses = ours(model, prompt, prompt_cache=cache)
        result = prefill_and_compact(model, prompt[:-1], twin, EVICT)
        stepped = theirs(model, prompt[-1:], prompt_cache=twin)
        assert tokens_of(responses) == tokens_of(stepped)
        assert cache is entries
        assert [layer.positions for layer in cache] == [layer.positions for layer in twin]
        assert responses[0].kv.true_offset == result.true_offset
        assert responses[0].kv.retained_tokens == 24
        assert responses[0].kv.evicted
        assert responses[0].prompt_tokens == len(prompt)
        # The last token of the prompt and all but the last generated one were appended.
        assert all(24 < layer.size() <= 24 + 25 for layer in cache), turn


def test_a_turn_of_one_token_evicts_nothing() -> None:
    model = tiny_llama()
    cache = make_prompt_cache(model)
    ours(model, prompt_cache=cache)
    sizes = [layer.size() for layer in cache]
    responses = ours(model, [5], prompt_cache=cache, max_tokens=3)
    assert responses[0].kv is None
    assert all(layer.size() > size for layer, size in zip(cache, sizes, strict=True))


@pytest.mark.parametrize("config", [KEEP_ALL, EVICT], ids=["keep-all", "evict"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_of_a_few_tokens(length: int, config: EvictionConfig) -> None:
    model = tiny_llama()
    assert_same(ours(model, PROMPT[:length], config), theirs(model, PROMPT[:length]))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_compact_cache_is_quantised_by_kv_bits(bits: int) -> None:
    model = tiny_llama(head_dim=32)
    cache = make_prompt_cache(model)
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 0}
    responses = ours(model, prompt_cache=cache, **options)
    for layer in cache:
        assert type(layer) is PositionPreservingQuantizedKVCache
        assert layer.bits == bits
        assert layer.offset > 89 + 20
        assert layer.head_positions[0][:4] == (0, 1, 2, 3)
    exact = ours(model)
    # mlx-lm quantises after a step: the second token is the first that reads packed rows.
    assert responses[0].token == exact[0].token
    second, right = (np.asarray(r[1].logprobs) for r in (responses, exact))
    assert 0 < np.abs(second - right).max() < (0.05 if bits == 8 else 1.0)


def test_kv_bits_wait_for_their_start() -> None:
    model = tiny_llama(head_dim=32)
    cache = make_prompt_cache(model)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 5000}
    assert_same(ours(model, prompt_cache=cache, **options), ours(model))
    assert all(type(layer) is PositionPreservingKVCache for layer in cache)


def test_a_model_that_calls_mx_fast_itself_generates() -> None:
    model = tiny_bare_model()
    config = EvictionConfig.parse({"policy": "snapkv-d", "budget": 24, "min_tokens": 0})
    responses = ours(model, config=config)
    assert len(responses) == 24
    assert responses[0].kv.retained_tokens == 24


def test_another_stream_gives_the_same() -> None:
    model = tiny_llama()
    stream, used = mx.new_stream(mx.default_device()), []

    def watch(*_: int) -> None:
        used.append(mx.default_stream(mx.default_device()))

    responses = ours(model, stream=stream, prompt_progress_callback=watch)
    assert tokens_of(responses) == tokens_of(ours(model))
    assert used == [stream, stream]  # the prompt is read on the stream that decodes


@pytest.mark.parametrize("config", [KEEP_ALL, EVICT], ids=["keep-all", "evict"])
def test_progress_runs_from_nothing_to_all_that_is_prefilled(config: EvictionConfig) -> None:
    reports: list[tuple[int, int]] = []
    ours(
        tiny_llama(),
        config=config,
        prefill_step_size=20,
        prompt_progress_callback=lambda *report: reports.append(report),
    )
    assert reports == [(done, 89) for done in (0, 20, 40, 60, 80, 89)]


# -- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_kv_size": 64}, r"max_kv_size and eviction exclude.*max_kv_size=64.*--kv-budget"),
        ({"input_embeddings": mx.zeros((90, 32))}, "does not take input embeddings"),
        ({"max_tokens": 0}, r"no tokens to generate.*max_tokens >= 1"),
    ],
)
def test_options_that_exclude_eviction_are_refused_before_the_prompt_is_read(
    options: dict[str, Any], text: str
) -> None:
    model = tiny_llama()
    cache = prefilled(model, [1, 2, 3])
    with pytest.raises(ConfigError, match=text):
        ours(model, prompt_cache=cache, **options)
    assert [layer.offset for layer in cache] == [3, 3]


def test_the_recommended_config_is_the_default() -> None:
    long = random_tokens(400)
    responses = list(kvkeep.stream_generate(tiny_llama(), word_tokenizer(), long, max_tokens=2))
    assert responses[0].kv is not None
    assert responses[0].kv.retained_tokens == 399 // 4
    assert EvictionConfig.parse({"policy": "lookahead", "budget": "25%"}) == kvkeep.RECOMMENDED
