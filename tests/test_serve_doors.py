"""What the server refuses, and how it says so; its flags."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from commands import fault_of
from kvkeep.cli import serve as command
from kvkeep.cli.main import build_parser, main
from kvkeep.errors import ConfigError
from kvkeep.generation import SERVED
from kvkeep.server import ServerSettings, parse_kv, serve
from kvkeep.server.faults import RequestError
from kvkeep.spec import Budget, EvictionConfig
from serving import CHAT, TEXT, Running, chat, running, text_of
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("doors") / "model"))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    with running(folder, model="tiny", max_body_bytes=20000) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def still_there(server: Running) -> Iterator[None]:
    """Whatever was refused, the server answers afterwards."""
    yield
    assert isinstance(text_of(server.ask(chat("Hello", max_tokens=3))) or "", str)


@pytest.mark.parametrize(
    ("kv", "param"),
    [
        ({"budgt": 3}, "kv.budgt"),
        ({"budget": -1}, "kv.budget"),
        ({"budget": True}, "kv.budget"),
        ({"budget": [1]}, "kv.budget"),
        ({"eviction": "snapkw"}, "kv.eviction"),
        ({"policy": 3}, "kv.policy"),
        ({"policy": ""}, "kv.policy"),
        ({"policy": "none", "eviction": "none"}, "kv.policy"),
        ({"eviction": "none", "windw": 3}, "kv.windw"),
        ({"window": 0}, "kv.window"),
        ({"window": 10**9}, "kv.window"),
        ({"n-future": 10**9}, "kv.n-future"),
        ({"protect": "sistem"}, "kv.protect"),
        ({"protect": [[5, 2]]}, "kv.protect"),
        ({"protect": 7}, "kv.protect"),
        ({"allocation": "fair"}, "kv.allocation"),
        ({"eviction": "snapkv", "allocation": "adaptive", "store": "shared"}, "kv"),
        ([], "kv"),
        ("none", "kv"),
    ],
)
def test_bad_kv_fields_are_named(server: Running, kv: Any, param: str) -> None:
    for stream in (False, True):
        status, error = server.refused(chat("Hello", kv=kv, stream=stream))
        assert (status, error["param"]) == (400, param)
        assert error["type"] == "invalid_request_error"


def test_a_request_may_not_name_files(server: Running) -> None:
    status, error = server.refused(chat("Hello", kv={"head_profile": "/etc/hosts"}))
    assert (status, error["param"]) == (403, "kv.head_profile")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": 1, "top_k": 5000}, "top_k"),
        ({"logit_bias": {"99999": 1.0}}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"seed": -1}, "seed"),
        ({"stop": [3]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": 3}, "stream_options"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [3]}, "messages"),
        ({"messages": [{"content": "Hello"}]}, "messages"),
        ({"tools": "all"}, "tools"),
        ({"model": 3}, "model"),
        ({"adapters": 3}, "adapters"),
        ({"stream": 1}, "stream"),
    ],
)
def test_bad_fields_are_named(server: Running, fields: dict[str, Any], param: str) -> None:
    status, error = server.refused(chat("Hello") | fields)
    assert (status, error["param"]) == (400, param)


def test_content_that_mlx_lm_refuses_is_the_clients_fault(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "video"}]}]}
    assert server.refused(body)[0] == 400
    assert server.refused({"max_tokens": 3})[0] == 400
    assert server.refused({"prompt": "", "max_tokens": 3}, TEXT)[1]["param"] == "prompt"
    assert server.refused({"prompt": [1], "max_tokens": 3}, TEXT)[1]["param"] == "prompt"
    assert server.refused(chat("Hello"), "/v1/nothing")[0] == 404


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b'{"messages": [], "top_p": NaN}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 9000,
    ],
)
def test_broken_bodies(server: Running, raw: bytes) -> None:
    status, error = server.refused(raw)
    assert status == 400
    assert error["code"] == "invalid_json" or raw.startswith(b'{"max')


def test_bodies_above_the_limit(server: Running) -> None:
    status, error = server.refused(chat("a" * 30000))
    assert (status, error["code"]) == (413, "too_large")
    assert "at most 20000 bytes" in error["message"]


@pytest.mark.parametrize("length", ["-4", "many", "4.5", None])
def test_bad_content_lengths(server: Running, length: str | None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest("POST", CHAT)
    if length is not None:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == (411 if length is None else 400)
    assert b'"error": {"message"' in response.read()
    connection.close()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "/etc"}, 403),
        ({"model": "../other"}, 403),
        ({"model": "owner/repository"}, 404),
        ({"adapters": "/tmp/adapters"}, 403),
        ({"draft_model": "owner/repository"}, 404),
    ],
)
def test_other_models_are_refused(server: Running, fields: dict[str, str], status: int) -> None:
    got, error = server.refused(chat("Hello") | fields)
    assert (got, error["param"]) == (status, next(iter(fields)))


def test_names_of_the_own_model(server: Running, folder: str) -> None:
    answers = [server.ask(chat("Hello", model=n)) for n in ("tiny", folder, "default_model")]
    assert [answer["model"] for answer in answers] == ["tiny", folder, "default_model"]
    assert len({text_of(answer) for answer in answers}) == 1
    status, models = server.get("/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["tiny"])


def test_other_models_where_they_are_allowed(folder: str, tmp_path: Any) -> None:
    other = str(write_tiny_folder(tmp_path / "other", seed=3))
    with running(folder, allow_model_paths=True) as server:
        assert server.ask(chat("Hello", model=other))["model"] == other
        assert server.refused(chat("Hello", model=str(tmp_path / "nothing")))[0] == 404


def test_the_key(folder: str) -> None:
    with running(folder, api_key="secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer é"}):
            status, error = server.refused(
                chat("Hello"), headers={k: v.encode().decode("latin-1") for k, v in headers.items()}
            )
            assert (status, error["code"]) == (401, "invalid_api_key")
        assert server.get("/v1/models")[0] == 401
        assert server.get("/health")[0] == 200
        given = {"Authorization": "Bearer secret"}
        assert server.send(chat("Hello", max_tokens=2), headers=given)[0] == 200
        assert server.get("/v1/models", headers=given)[0] == 200


# -- what a request asks ---------------------------------------------------------------


def test_kv_over_the_servers_defaults() -> None:
    base = EvictionConfig.parse({"policy": "snapkv", "budget": 99, "protect": "3:5"})
    off = ServerSettings(config=base)
    on = ServerSettings(config=base, evicting=True, protect_system=True)
    assert parse_kv(None, off).config is None and not parse_kv(None, off).reported
    assert parse_kv(None, on).config == base and parse_kv(None, on).protect_system
    assert parse_kv({}, off).config is None and parse_kv({}, off).reported
    assert parse_kv({"eviction": "none", "budget": 3}, on).config is None
    only_budget = parse_kv({"budget": 0.5}, off).config
    assert only_budget is not None
    assert (only_budget.policy, only_budget.budget) == ("snapkv", Budget(0.5, "share"))
    ranges = parse_kv({"protect": [[1, 2]]}, on)
    assert ranges.config is not None and ranges.config.protect == ((1, 2),)
    assert not ranges.protect_system
    with pytest.raises(RequestError, match="eviction and policy"):
        parse_kv({"eviction": "snapkv", "policy": "snapkv"}, off)


# -- flags -----------------------------------------------------------------------------


def test_options_of_the_servers_policy_are_not_those_of_another() -> None:
    config = EvictionConfig.parse({"policy": "snapkv", "window": 8, "budget": 9, "alpha": None})
    settings = ServerSettings(config=config, evicting=True)
    asked = parse_kv({"policy": "expected_attention"}, settings).config
    assert asked == EvictionConfig(policy="expected_attention", budget=9)
    asked = parse_kv({"policy": "snapkv", "allocation": "adaptive"}, settings).config
    assert asked == EvictionConfig(policy="snapkv", window=8, budget=9, allocation="adaptive")
    with pytest.raises(RequestError, match="no option 'window'"):
        parse_kv({"policy": "expected_attention", "window": 8}, settings)


def settings_of(*argv: str) -> tuple[ServerSettings, list[str]]:
    args, others = build_parser().parse_known_args(["serve", *argv])
    return command.settings_of(args), others


def test_flags_of_mlx_lm_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)
    settings, others = settings_of(
        "--kv-bits",
        "8",
        "--kv-group-size",
        "32",
        "--temp",
        "0.5",
        "--kv-group",
        "max",
        "--pipeline",
    )
    assert others == ["--kv-bits", "8", "--kv-group-size", "32", "--temp", "0.5", "--pipeline"]
    assert (settings.config.group, settings.evicting, settings.api_key) == ("max", False, None)
    assert settings.config.policy == SERVED.policy


def test_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_API_KEY", "from the environment")
    settings, others = settings_of(
        "--kv-eviction", "snapkv", "--kv-budget", "64", "--kv-protect", "system", "--model", "demo"
    )
    assert others == []
    assert settings.evicting and settings.protect_system and settings.config.protect == ()
    assert (settings.config.policy, settings.config.budget) == ("snapkv", Budget(64))
    assert (settings.model, settings.api_key) == ("demo", "from the environment")


def test_faults_of_flags(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert "unknown eviction policy" in fault_of(capsys, "serve", "--kv-eviction", "nope")
    assert "--max-body-bytes" in fault_of(capsys, "serve", "--max-body-bytes", "0")
    assert "no model to serve" in fault_of(capsys, "serve")
    assert "no such folder" in fault_of(capsys, "serve", "--model", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit):
        main(["serve", "--no-flag-of-anyone"])
    with pytest.raises(SystemExit):
        main(["policies", "--no-flag-of-anyone"])
    assert "unrecognized arguments: --no-flag-of-anyone" in capsys.readouterr().err


def test_a_model_that_does_not_load_ends_the_start(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="does not load"):
        serve(["--model", str(tmp_path), "--port", "0"], ServerSettings())


def test_eviction_under_mlx_launch_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

    monkeypatch.setattr(mx.distributed, "init", lambda *a, **k: Two())
    with pytest.raises(ConfigError, match=r"mlx\.launch.*2 processes"):
        serve(["--model", folder, "--port", "0"], ServerSettings(evicting=True))
