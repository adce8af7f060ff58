"""`kvkeep generate`: mlx-lm's answers, saved caches, and the figures it reports."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import main as mlx_main
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from commands import cells, chat_tokens, fault_of, figures
from kvkeep.cli.main import main
from kvkeep.cli.report import nbytes
from kvkeep.reuse import load_prompt_cache, save_prompt_cache
from tiny_folder import write_tiny_folder

DOCUMENT = " ".join(f"Line {i} of the log says that {i * i} boats came in." for i in range(12))
LAYERS, KV_HEADS, HEAD_DIM, FLOAT = 2, 2, 32, 4


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def tiny(folder: str) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(folder)[:2]
    return model, tokenizer


# -- mlx-lm's flags mean what they mean there --------------------------------


def theirs(monkeypatch: pytest.MonkeyPatch, capsys: Any, argv: list[str], stdin: str) -> str:
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *argv, "--verbose", "F"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    mlx_main()
    return capsys.readouterr().out


def ours(monkeypatch: pytest.MonkeyPatch, capsys: Any, argv: list[str], stdin: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert main(["generate", *argv, "--verbose", "F"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


FLAGS = {
    "plain": [],
    "system prompt": ["--system-prompt", "Be brief."],
    "prefilled answer": ["--prefill-response", "The answer"],
    "no template": ["--ignore-chat-template"],
    "template options": ["--chat-template-config", '{"opening": "Well: "}'],
    "escapes": ["--prompt", r"one\ntwo\tthree"],
    "end tokens": ["--extra-eos-token", "v", "0", "L", "a", "e"],
    "sampled": ["--temp", "0.9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"],
    "top k": ["--temp", "1.5", "--top-k", "20", "--seed", "4"],
    "xtc": ["--temp", "1", "--xtc-probability", "0.5", "--xtc-threshold", "0.02", "--seed", "5"],
    "one token": ["--max-tokens", "1"],
    "chunks": ["--prefill-step-size", "7"],
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("eviction", [["--kv-eviction", "none"], ["--kv-budget", "100%"]])
def test_the_answer_is_mlx_lms_own(
    flags: list[str],
    eviction: list[str],
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", folder, "--prompt", "-", "--max-tokens", "24", *flags]
    expected = theirs(monkeypatch, capsys, argv, DOCUMENT[:200])
    assert ours(monkeypatch, capsys, [*argv, *eviction], DOCUMENT[:200]) == expected


@pytest.mark.parametrize(
    "cache",
    [
        ["--max-kv-size", "32"],
        ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"],
    ],
)
def test_mlx_lms_other_caches_are_its_own(
    cache: list[str],
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", folder, "--prompt", DOCUMENT, *cache, "--prefill-step-size", "200"]
    expected = theirs(monkeypatch, capsys, argv, "")
    assert ours(monkeypatch, capsys, [*argv, "--kv-eviction", "none"], "") == expected


@pytest.mark.parametrize("eviction", [["--kv-eviction", "none"], ["--kv-budget", "40"]])
def test_a_draft_model_changes_no_token(
    eviction: list[str],
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft = str(write_tiny_folder(tmp_path / "draft", seed=1))
    argv = ["--model", folder, "--prompt", DOCUMENT, "--max-tokens", "24", *eviction]
    expected = ours(monkeypatch, capsys, argv, "")
    drafted = [*argv, "--draft-model", draft, "--num-draft-tokens", "2"]
    assert ours(monkeypatch, capsys, drafted, "") == expected


def test_quantised_rows_after_eviction(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", folder, "--prompt", DOCUMENT, "--max-tokens", "8", "--kv-budget", "40"]
    exact = ours(monkeypatch, capsys, argv, "")
    argv += ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]
    assert ours(monkeypatch, capsys, argv, "")[:2] == exact[:2]


# -- saved caches ------------------------------------------------------------


@pytest.fixture
def saved(folder: str, tiny: tuple[Any, Any], tmp_path: Path) -> dict[str, str]:
    """Cache files of one conversation's beginning: exact, compact, quantised."""
    model, tokenizer = tiny
    start = tokenizer.encode("<|user|>" + DOCUMENT)
    metadata = {"model": folder, "tokenizer_config": json.dumps({})}
    compact = kvkeep.compact_prompt_cache(model, start, budget=50).cache
    exact = make_prompt_cache(model)
    model(mx.array(start)[None], cache=exact)
    caches = {
        "exact": exact,
        "compact": compact,
        "quantised": [layer.to_quantized(32, 8) for layer in exact],
    }
    files = {name: str(tmp_path / f"{name}.safetensors") for name in caches}
    for name, cache in caches.items():
        save_prompt_cache(files[name], cache, metadata)
    return files


@pytest.mark.parametrize("name", ["exact", "quantised"])
def test_a_saved_cache_is_read_as_mlx_lm_reads_it(
    name: str, saved: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    argv = ["--prompt-cache-file", saved[name], "--prompt", "And then?", "--max-tokens", "24"]
    argv += ["--kv-group-size", "32"]
    expected = theirs(monkeypatch, capsys, argv, "")
    assert ours(monkeypatch, capsys, [*argv, "--kv-eviction", "none"], "") == expected


def test_a_compact_saved_cache_is_continued(
    saved: dict[str, str],
    tiny: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tokenizer = tiny
    cache = load_prompt_cache(saved["compact"])
    question = tokenizer.encode("And then?<|end|><|assistant|>")
    answer = kvkeep.generate(
        model,
        tokenizer,
        question,
        prompt_cache=cache,
        config=kvkeep.EvictionConfig(policy="lookahead", budget=kvkeep.Budget(55)),
        max_tokens=24,
    )
    argv = ["--prompt-cache-file", saved["compact"], "--prompt", "And then?"]
    argv += ["--max-tokens", "24", "--kv-budget", "55"]
    assert ours(monkeypatch, capsys, argv, "") == answer + "\n"


def test_the_table_tells_what_the_saved_cache_held(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--prompt-cache-file", saved["compact"], "--prompt", "And then?"]
    assert main([*argv, "--max-tokens", "4", "--kv-budget", "55"]) == 0
    table = figures(capsys.readouterr().out)
    held = len(DOCUMENT) + 1
    assert table["prompt"] == f"11 tokens after {held} in the saved cache"
    assert table["rows kept"].startswith(f"55 of {held + 10} per KV head")


def test_saved_caches_that_do_not_fit_are_refused(
    saved: dict[str, str], folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(name: str, *argv: str) -> str:
        return fault_of(capsys, "generate", "--prompt-cache-file", saved[name], *argv)

    assert "exclude each other" in fault("quantised")
    assert "--kv-bits and --kv-group-size do not match" in fault(
        "quantised", "--kv-eviction", "none", "--kv-bits", "4"
    )
    assert "Only an exact cache can be compared" in fault("compact", "--compare")
    other = str(write_tiny_folder(tmp_path / "other", seed=1))
    assert "--model is not the model" in fault("exact", "--model", other)
    truncated = tmp_path / "half.safetensors"
    truncated.write_bytes(Path(saved["compact"]).read_bytes()[:300])
    saved["half"], saved["none"] = str(truncated), str(tmp_path / "none.safetensors")
    assert "is not a readable prompt cache" in fault("half")
    assert "no such prompt cache" in fault("none")


# -- what it reports ---------------------------------------------------------


def test_the_table_holds_the_librarys_numbers(
    folder: str, tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny
    tokens = chat_tokens(tokenizer, DOCUMENT)
    last: Any = None
    text = ""
    for last in kvkeep.stream_generate(model, tokenizer, tokens, max_tokens=12):
        text += last.text
    assert main(["generate", "--model", folder, "--prompt", DOCUMENT, "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # over in less than a second: nothing to report
    assert out.startswith(text + "\n")
    table = figures(out)
    read = len(tokens) - 1
    rows = int(0.25 * read)
    row = 2 * LAYERS * KV_HEADS * HEAD_DIM * FLOAT
    assert last.kv.retained_tokens == rows
    assert table["prompt"] == f"{len(tokens)} tokens"
    assert table["rows kept"] == f"{rows} of {read} per KV head ({100 * rows / read:.1f}%)"
    before, after = nbytes(row * read), nbytes(row * rows)
    assert table["KV cache"].startswith(f"{before} before, {after} after")
    assert "12 tokens" in table["decode"]
    assert set(table) >= {"prefill", "score", "compact", "peak memory"}


def test_a_short_prompt_and_an_exact_run_say_so(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--model", folder, "--prompt", "hi", "--max-tokens", "2"]
    assert main(argv) == 0
    assert figures(capsys.readouterr().out)["rows kept"].startswith("all 4 (")
    assert main([*argv, "--kv-eviction", "none"]) == 0
    assert figures(capsys.readouterr().out)["rows kept"] == "all (eviction is off)"


def test_an_empty_prompt_is_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", folder, "--prompt", "", "--ignore-chat-template"]
    assert "empty prompt" in fault_of(capsys, *argv)


def test_images_need_a_model_that_takes_them(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--model", folder, "--image", "a.png", "--kv-eviction", "none"]
    assert fault_of(capsys, *argv) == f"the model {folder} does not take images (--image)."


def test_a_template_that_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = write_tiny_folder(
        tmp_path / "model", template="{{ raise_exception('no system role') }}"
    )
    line = fault_of(capsys, "generate", "--model", str(refusing))
    assert line.startswith("the chat template refuses the messages; got no system role")


@pytest.mark.parametrize("sampling", [[], ["--temp", "0.8", "--seed", "11"]])
def test_compare_shows_both_answers_and_what_they_cost(
    sampling: list[str],
    folder: str,
    tiny: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    argv = ["--model", folder, "--prompt", DOCUMENT, "--max-tokens", "12"]
    assert main(["generate", *argv, *sampling, "--compare"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["answering: exact", "answering: evicted"]
    table = cells(out)
    read = len(chat_tokens(tiny[1], DOCUMENT)) - 1
    rows, row = int(0.25 * read), 2 * LAYERS * KV_HEADS * HEAD_DIM * FLOAT
    assert table["rows per KV head"] == [str(read), str(rows), f"{rows / read:.2f}"]
    live = [nbytes(row * read), nbytes(row * rows)]
    assert table["KV live"] == [*live, f"{rows / read:.2f}"]
    # Buffers grow by 256 rows: one for the answer is added to the kept rows.
    allocated = [row * -(-read // 256) * 256, row * (rows + 256)]
    assert table["KV allocated"][:2] == [nbytes(size) for size in allocated]
    speeds = [float(cell.removesuffix(" tok/s").replace(",", "")) for cell in table["decode"][:2]]
    assert float(table["decode"][2]) == pytest.approx(speeds[1] / speeds[0], abs=0.02)
    if not sampling:
        for cell, eviction in zip(table["answer"], ("none", "lookahead"), strict=False):
            alone = ours(monkeypatch, capsys, [*argv, "--kv-eviction", eviction], "")
            assert cell == f"{alone.strip()} …"
    assert f"{read + 1:,} prompt tokens, read once" in out


# -- the real model --------------------------------------------------------------------

STORY = (
    "The lighthouse keeper wrote his book in pencil, because ink froze in the lamp room. On most"
    " days there was little to say: the wind, the oil that was used, a sail in the distance. In"
    " March the supply boat was late by nine days and he ate his way through the last of the dried"
    " peas. The boat's captain brought newspapers, a sack of flour and a small parcel from the"
    " harbour office. The code of the lamp room door is 4829163. He learned it by heart and burned"
    " the paper, as he had been told, and then went up to trim the wick. In April a whale lay for"
    " two days in the shelter of the rock and breathed so loudly that he could not sleep. In May"
    " the terns came back, and he put a bucket over his head whenever he crossed the yard. His"
    " sister wrote that the goat had got into the church. He read the letter to the terns, who were"
    " not interested, and answered it the same evening by the light of the small lamp. The summer"
    " was dry. He painted the railing white, the door green and, by accident, one boot. Then the"
    " autumn storms began and there was again little to say but the wind and the oil.\n\n"
    "What is the code of the lamp room door?"
)


@pytest.mark.demo_model
def test_the_real_model_answers_on_both_caches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    argv = ["generate", "--model", "demo", "--prompt", STORY, "--max-tokens", "24"]
    assert main([*argv, "--compare", "--kv-budget", "50%"]) == 0
    out = capsys.readouterr().out
    table = cells(out)
    match = re.search(r"([\d,]+) prompt tokens, read once", out)
    assert match is not None
    read = int(match[1]) - 1
    assert 280 < read < 340
    rows, row = read // 2, 2 * 30 * 3 * 64 * (4 if mx.default_device().type == mx.cpu else 2)
    assert table["rows per KV head"] == [str(read), str(rows), f"{rows / read:.2f}"]
    assert table["KV live"][:2] == [nbytes(row * read), nbytes(row * rows)]
    assert all("4829163" in answer for answer in table["answer"][:2])
