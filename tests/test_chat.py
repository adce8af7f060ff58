"""`kvkeep chat`: lines in, answers out, and what it says on the way."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import kvkeep
from kvkeep.cli import chat
from kvkeep.cli.main import main
from kvkeep.conversation import Conversation
from oracles import prefilled
from tiny_folder import CHAT_TEMPLATE, write_tiny_folder

LINES = ("The ferry was forty minutes late.", "How late was it?", "And the mail boat?")
FLAGS = ("--max-tokens", "10", "--kv-budget", "30", "--kv-min-tokens", "0")
SMALL = kvkeep.EvictionConfig(policy="span", budget=kvkeep.Budget(30), min_tokens=0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


Chat = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def talk(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Run `kvkeep chat` on lines from a pipe: exit status, stdout, stderr's lines."""

    def run(*lines: str, flags: tuple[str, ...] = FLAGS) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        status = main(["chat", "--model", folder, *flags])
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


class Typist:
    """A person at a terminal: gives lines to `input()`, or an exception."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *entries: str | type[BaseException]
    ) -> None:
        self.entries = list(entries)
        terminal = io.StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr("builtins.input", self.type)

    def type(self, prompt: str) -> str:
        assert prompt == "> "
        entry = self.entries.pop(0)
        if not isinstance(entry, str):
            raise entry
        return entry


def answers(folder: str, *lines: str, config: Any = SMALL, **options: Any) -> list[str]:
    """What the library's conversation answers."""
    model, tokenizer = mlx_lm.load(folder)[:2]
    conversation = Conversation(model, tokenizer, config=config, **{"max_tokens": 10, **options})
    return ["".join(r.text for r in conversation.add_user(line)) for line in lines]


def test_each_line_of_a_pipe_is_a_message(talk: Chat, folder: str) -> None:
    status, out, err = talk(LINES[0], "", "   ", *LINES[1:])
    assert status == 0
    assert out == "".join(text + "\n" for text in answers(folder, *LINES))
    assert err == []


def test_commands(talk: Chat, folder: str) -> None:
    status, out, err = talk("h", LINES[0], "s", "r", LINES[0], " q ", LINES[1])
    assert status == 0
    (first,) = answers(folder, LINES[0])
    assert out == f"{first}\n{first}\n"  # the second came from an empty memory
    assert err[0].startswith("q: quit")
    assert err[1] == "messages      1"
    read = len(LINES[0]) + 3
    assert err[2] == f"tokens read   {read + 10}"
    # The budget, the prompt's last token and the answer.
    assert err[3].startswith("rows held     41 per KV head")
    row = 2 * 2 * 2 * 32 * 4
    live, allocated = (f"{rows * row / 1000:.2f} kB" for rows in (41, 286))
    assert err[4] == f"KV cache      {live} live, {allocated} allocated"
    assert err[5] == "compactions   1"
    assert err[6].startswith(f"the last turn 30 of {read - 1} per KV head")
    assert err[7:] == ["reset: everything is forgotten"]


def test_stats_before_the_first_message(talk: Chat) -> None:
    status, out, err = talk("s")
    assert (status, out) == (0, "")
    assert err[1:3] == ["tokens read   0", "rows held     0 per KV head (0.0%)"]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (("--system-prompt", "Be brief."), {"system_prompt": "Be brief."}),
        (("--kv-eviction", "none"), {"config": None}),
        (("--max-tokens", "3"), {"max_tokens": 3}),
        (("--prefill-step-size", "5"), {"prefill_step_size": 5}),
    ],
)
def test_flags_reach_the_conversation(
    flags: tuple[str, ...], options: dict[str, Any], talk: Chat, folder: str
) -> None:
    status, out, _ = talk(*LINES, flags=(*FLAGS, *flags))
    assert status == 0
    assert out == "".join(text + "\n" for text in answers(folder, *LINES, **options))


def test_sampling_follows_the_seed(talk: Chat) -> None:
    def sampled(seed: str) -> str:
        return talk(*LINES, flags=(*FLAGS, "--temp", "1", "--seed", seed))[1]

    assert sampled("1") == sampled("1") != sampled("2")


def test_a_restart_is_said(folder: str, tmp_path: Path, talk: Chat) -> None:
    counting = "{{ messages | length }}" + CHAT_TEMPLATE
    other = str(write_tiny_folder(tmp_path / "model", template=counting))
    status, _, err = talk(*LINES[:2], flags=(*FLAGS, "--model", other))
    assert status == 0
    assert len(err) == 1
    assert "reading the conversation again" in err[0]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--max-kv-size", "64"), "--max-kv-size and --kv-eviction lookahead exclude each other"),
        (("--temp", "-2"), "bad value for --temp"),
        (("--kv-eviction", "snap"), "unknown eviction policy 'snap'"),
        (("--kv-budget", "100B"), "byte budget holds no row"),
        (("--model", "./none"), "there is no such folder"),
    ],
)
def test_faults_in_a_pipe_are_one_line(flags: tuple[str, ...], text: str, talk: Chat) -> None:
    status, out, err = talk(LINES[0], flags=(*FLAGS, *flags))
    assert (status, out, len(err)) == (2, "", 1)
    assert err[0].startswith("kvkeep: error: ")
    assert text in err[0]


# -- at a terminal ---------------------------------------------------------------------


def test_a_person_sees_what_is_kept_and_what_it_costs(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Typist(monkeypatch, LINES[0], EOFError)
    assert main(["chat", "--model", folder, *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == answers(folder, LINES[0])[0]
    lines = err.splitlines()
    assert lines[0] == f"{folder}; keeps lookahead, 30"
    assert lines[1].startswith("q: quit")
    assert "10 tokens, " in lines[2]
    assert f"41 rows for {len(LINES[0]) + 13} tokens" in lines[2]


def test_ctrl_c_stops_an_answer_and_not_the_conversation(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[Conversation] = []
    real = chat.Conversation

    class Impatient(real):
        """Its first answer is interrupted after three tokens."""

        def add_user(self, *args: Any, **kwargs: Any) -> Any:
            held.append(self)
            answer = super().add_user(*args, **kwargs)

            def stopped() -> Any:
                for _ in range(3):
                    yield next(answer)
                raise KeyboardInterrupt

            return stopped() if len(held) == 1 else answer

    monkeypatch.setattr(chat, "Conversation", Impatient)
    Typist(monkeypatch, LINES[0], LINES[1], "q")
    assert main(["chat", "--model", folder, *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert "stopped" in err.splitlines()
    first, second = out.splitlines()
    assert first == answers(folder, LINES[0])[0][:3]
    messages = held[0].messages
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"] == first
    assert messages[3]["content"] == second
    assert all(layer.offset == len(held[0].tokens) for layer in held[0].cache)


def test_ctrl_c_at_the_prompt_ends_with_130(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Typist(monkeypatch, KeyboardInterrupt)
    assert main(["chat", "--model", folder, *FLAGS]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_fault_does_not_end_a_persons_conversation(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Typist(monkeypatch, LINES[0], "s", "q")
    assert main(["chat", "--model", folder, *FLAGS, "--kv-budget", "100B"]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[2].startswith("byte budget holds no row")
    assert err[3] == "messages      0"


# -- as a process, and on the real model -----------------------------------------------


def test_a_real_pipe(folder: str) -> None:
    source = str(Path(kvkeep.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep", "chat", "--model", folder, *FLAGS],
        input="\n".join(LINES),  # no line break at the end
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(text + "\n" for text in answers(folder, *LINES))


@pytest.mark.demo_model
def test_the_real_model_remembers_across_turns(demo_model: tuple[Any, Any]) -> None:
    """At a budget of 100 % three turns give the greedy tokens of exact caches."""
    model, tokenizer = demo_model
    config = kvkeep.EvictionConfig(policy="span", budget=kvkeep.Budget(1.0, "share"), min_tokens=0)
    conversation = Conversation(model, tokenizer, config=config, max_tokens=12)
    messages: list[dict[str, str]] = []
    for text in (
        "My name is Ingrid and I knit jackets for tide gauges.",
        "What is my name?",
        "And what do I knit?",
    ):
        answer = [response.token for response in conversation.add_user(text)]
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        # A second reading of the whole conversation, into exact caches.
        logits = model(mx.array([[prompt[-1], *answer[:-1]]]), cache=prefilled(model, prompt[:-1]))
        assert mx.argmax(logits[0], axis=-1).tolist() == answer
        messages = list(conversation.messages)
    assert "Ingrid" in messages[3]["content"]
