"""`kvkeep`, `kvkeep generate` and what all commands share."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.chat import setup_arg_parser as mlx_chat_parser
from mlx_lm.generate import setup_arg_parser as mlx_generate_parser
from rich.console import Console

import kvkeep
from commands import chat_tokens, fault_of
from kvkeep.cli import chat, generate, progress
from kvkeep.cli.flags import eviction_config
from kvkeep.cli.main import build_parser, main
from kvkeep.cli.report import nbytes, seconds
from kvkeep.errors import BudgetError, ConfigError
from tiny_folder import write_tiny_folder

SOURCE = Path(kvkeep.__file__).resolve().parents[1]
DOCUMENT = " ".join(f"Line {i} of the log says that {i * i} boats came in." for i in range(12))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose greedy answers never end by themselves."""
    return str(write_tiny_folder(tmp_path_factory.mktemp("endless") / "model", endless=True))


@pytest.fixture(scope="session")
def tiny(folder: str) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(folder)[:2]
    return model, tokenizer


def subparser(module: Any) -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser().add_subparsers()
    module.add_parser(commands)
    (parser,) = commands.choices.values()
    return parser


# -- the frame -------------------------------------------------------------------------


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("generate", "chat", "model"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kvkeep {kvkeep.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["chat", "-h"]])
def test_help_ends_well(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    assert "usage: kvkeep" in capsys.readouterr().out


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--kv-window", "eight"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "kvkeep: error: argument --kv-window: invalid int value: 'eight'"
        " (see kvkeep generate --help)"
    )


@pytest.mark.parametrize(
    ("module", "theirs"), [(generate, mlx_generate_parser), (chat, mlx_chat_parser)]
)
def test_every_flag_of_mlx_lm_is_there(module: Any, theirs: Any) -> None:
    ours = {action.dest: action for action in subparser(module)._actions}
    for action in theirs()._actions:
        mine = ours[action.dest]
        assert mine.option_strings == action.option_strings
        assert mine.type is action.type or callable(action.type)
        if action.dest != "prefill_step_size":  # a CPU reads in shorter chunks
            assert mine.default == action.default


def test_debugging_shows_where_an_error_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVKEEP_DEBUG", "1")
    assert main(["generate", "--kv-budget", "0"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("kvkeep: error: budget of 0 rows")


def test_ctrl_c_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream_generate", interrupted)
    assert main(["generate", "--model", folder]) == 130
    assert capsys.readouterr() == ("", "")


# -- the eviction flags ----------------------------------------------------------------


def config_of(*flags: str) -> kvkeep.EvictionConfig | None:
    return eviction_config(build_parser().parse_args(["generate", *flags]))


def test_without_flags_the_recommended_config_is_used() -> None:
    assert config_of() == kvkeep.RECOMMENDED
    assert config_of("--kv-eviction", "none", "--kv-budget", "7") is None


def test_each_flag_sets_its_setting() -> None:
    flags = (
        "--kv-eviction snapkv --kv-budget 512MB --kv-window 16 --kv-sink-tokens 2"
        " --kv-recent-tokens 9 --kv-min-tokens 40 --kv-allocation uniform --kv-store shared"
        " --kv-pooling max --kv-pool-kernel 7 --kv-protect 0:512,900:910"
    )
    assert config_of(*flags.split()) == kvkeep.EvictionConfig(
        policy="snapkv",
        budget=kvkeep.Budget(512_000_000, "bytes"),
        window=16,
        sink_tokens=2,
        recent_tokens=9,
        min_tokens=40,
        allocation="uniform",
        store="shared",
        pooling="max",
        pool_kernel=7,
        protect=((0, 512), (900, 910)),
    )


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        ("--kv-eviction snapk", ConfigError, "Did you mean 'snapkv'"),
        ("--kv-allocation unifrom", ConfigError, "Did you mean 'uniform'"),
        ("--kv-budget 0", BudgetError, "budget of 0 rows"),
        ("--kv-budget 120%", BudgetError, "at most 100%"),
        ("--kv-budget 3XB", BudgetError, "unknown budget unit"),
        ("--kv-protect 5:2", ConfigError, "bad value for protect"),
        ("--kv-pool-kernel 4", ConfigError, "odd number"),
        ("--kv-store heap", ConfigError, "bad value for store"),
        ("--kv-eviction snapkv-d --kv-pooling max", ConfigError, "has no option 'pooling'"),
    ],
)
def test_a_wrong_eviction_flag_is_refused(flags: str, error: type, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        config_of(*flags.split())


@pytest.mark.parametrize(
    ("flags", "both"),
    [
        ("--image a.png", ("--image", "--kv-eviction lookahead")),
        ("--max-kv-size 64", ("--max-kv-size", "--kv-eviction lookahead")),
        ("--compare --kv-eviction none", ("--compare", "--kv-eviction none")),
        ("--compare --draft-model demo", ("--compare", "--draft-model")),
    ],
)
def test_flags_that_exclude_each_other_are_both_named(
    flags: str, both: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = fault_of(capsys, "generate", *flags.split())
    assert line.startswith(f"{both[0]} and {both[1]} exclude each other.")


@pytest.mark.parametrize(
    "flag",
    [
        "--temp -1",
        "--temp nan",
        "--top-p 1.5",
        "--min-p -0.1",
        "--top-k -2",
        "--xtc-probability 2",
        "--xtc-threshold 0.6",
        "--min-tokens-to-keep 0",
        "--seed -1",
        "--prefill-step-size 0",
        "--num-draft-tokens 0",
        "--kv-bits 7",
        "--kv-group-size 10",
        "--max-tokens 0",
    ],
)
def test_numbers_out_of_range_are_refused_before_a_model_is_loaded(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fault_of(capsys, "generate", "--model", "./no-such-folder", *flag.split())
    assert line.startswith(f"bad value for {flag.split()[0]}; expected ")


@pytest.mark.parametrize("value", ["{", "[1]", '{"tokenize": true}'])
def test_a_chat_template_config_must_be_an_object(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fault_of(capsys, "generate", "--chat-template-config", value)
    assert "--chat-template-config" in line
    assert "a JSON object" in line


# -- loading ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("./no-such-folder", "there is no such folder"),
        ("/no/such/folder", "there is no such folder"),
        ("nobody/no-such-model", "the Hugging Face hub cannot be asked for it"),
        ("no such model", "there is no such folder"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fault_of(capsys, "generate", "--model", name)
    assert line.startswith(f"--model {name}")
    assert text in line


def test_a_folder_that_does_not_load_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not load" in fault_of(capsys, "generate", "--model", str(tmp_path))
    broken = write_tiny_folder(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    assert "does not load" in fault_of(capsys, "generate", "--model", str(broken))
    missing = fault_of(capsys, "generate", "--model", str(broken), "--adapter-path", "./none")
    assert missing.startswith("--adapter-path ./none: there is no such folder")


# -- what is shown --------------------------------------------------------------------------


def test_numbers_are_shown_for_people() -> None:
    assert [nbytes(n) for n in (999, 25_300, 4.2e6, 1.5e9)] == [
        "999 B",
        "25.30 kB",
        "4.20 MB",
        "1.50 GB",
    ]
    assert [seconds(t) for t in (0.0123, 0.5, 61)] == ["12.3 ms", "0.50 s", "61.00 s"]


def test_plain_progress_lines_come_now_and_then() -> None:
    shown = io.StringIO()
    now = iter([0.0, 0.5, 2.0, 3.0, 8.0, 9.0, 20.0])
    report = progress._lines(Console(file=shown, width=200), clock=lambda: next(now))
    for done in (0, 100, 400, 500, 1600, 1800, 2000):
        report(done, 2000)
    assert shown.getvalue().splitlines() == [
        "reading the prompt: 400/2,000 tokens, 200 tok/s, 8 s left",
        "reading the prompt: 1,600/2,000 tokens, 200 tok/s, 2 s left",
    ]


def test_the_bar_is_gone_before_the_answer_begins() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    with progress._bar(console) as report:
        report(0, 1)
        assert shown.getvalue() == ""  # a prompt of one token needs no bar
        for done in (0, 600, 1200):
            report(done, 1200)
        drawn = shown.getvalue()
        assert "reading the prompt" in drawn
        assert "1,200/1,200 tokens" in drawn
        assert drawn.endswith("\x1b[1A\x1b[2K")  # one line up, erased: the answer starts there
    assert shown.getvalue() == drawn


# -- as a process ----------------------------------------------------------------------


def process(*argv: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    return subprocess.Popen(
        [sys.executable, "-m", "kvkeep", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        # Tests in a shell's background inherit an ignored SIGINT, which would never end the run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_real_run_reads_stdin(folder: str, tiny: tuple[Any, Any]) -> None:
    flags = ["--model", folder, "--prompt", "-", "--max-tokens", "8"]
    with process("generate", *flags) as run:
        out, err = run.communicate(DOCUMENT.encode(), timeout=120)
    assert (run.returncode, err) == (0, b"")
    model, tokenizer = tiny
    tokens = chat_tokens(tokenizer, DOCUMENT)
    text = kvkeep.generate(model, tokenizer, tokens, max_tokens=8)
    assert out.decode().startswith(text + "\n\nprompt ")


def test_a_real_ctrl_c_leaves_no_traceback(endless: str) -> None:
    with process("generate", "--model", endless, "--max-tokens", "-1") as run:
        assert run.stdin is not None and run.stdout is not None and run.stderr is not None
        assert run.stdout.read(1)  # the answer has begun
        run.send_signal(signal.SIGINT)
        err = run.stderr.read()
        run.stdout.read()
        assert run.wait(timeout=60) == 130
    assert err == b""


def test_a_reader_that_goes_away_is_no_traceback(endless: str) -> None:
    with process("generate", "--model", endless, "--max-tokens", "-1") as run:
        assert run.stdin is not None and run.stdout is not None and run.stderr is not None
        assert run.stdout.read(1)
        run.stdout.close()
        assert run.wait(timeout=60) == 1
        assert run.stderr.read() == b""
