"""`kvkeep policies`."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvkeep
from commands import fault_of
from kvkeep import RECOMMENDED, EvictionConfig, get_policy
from kvkeep.allocation import ALLOCATIONS, allocation_of
from kvkeep.cli.flags import eviction_config, true_or_false
from kvkeep.cli.main import build_parser, main
from kvkeep.policies import POLICIES, policy_of


def listed(
    capsys: pytest.CaptureFixture[str], width: int = 220, *, part: int = 0
) -> dict[str, str]:
    """Name → the lines of a policy (part 0) or an allocation (part 1)."""
    assert main(["policies"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    names = (POLICIES, ALLOCATIONS)[part]
    rows: dict[str, str] = {}
    name = ""
    for line in re.split(r"^(?=allocation )", out, flags=re.MULTILINE)[part].splitlines():
        if (first := re.match(r"\S+", line)) and first[0] in names:
            name = first[0]
            assert name not in rows
        if name and line.strip() and not line.startswith("*"):
            rows[name] = rows.get(name, "") + line + "\n"
    return rows


def test_every_policy_is_listed_with_what_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    rows = listed(capsys)
    assert list(rows) == list(POLICIES)
    for name, row in rows.items():
        policy = POLICIES[name]
        assert (", ".join(sorted(policy.needs)) or "nothing") in row
        assert ("query-aware" in row) == policy.query_aware
        assert ("agnostic" in row) == (not policy.query_aware)
        assert policy.scope in row
        assert policy.source in row
        for field in dataclasses.fields(policy):
            assert f"{field.name}={field.default}" in row
        assert policy.summary in row
        assert row.startswith(f"{name} *") == (name == RECOMMENDED.policy)


def test_every_allocation_is_listed_with_what_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    rows = listed(capsys, part=1)
    assert list(rows) == list(ALLOCATIONS)
    for name, row in rows.items():
        rule = ALLOCATIONS[name]
        assert rule.summary in row
        assert rule.source in row
        assert ("heads of a layer differ" in row) == rule.by_head
        assert row.startswith(f"{name} *") == (name == RECOMMENDED.allocation)
    assert "alpha=0.5, head_scale=sum" in rows["adaptive"]
    assert "profile" not in rows["duo"].replace("head profile", "")


@pytest.mark.parametrize("name", sorted({*ALLOCATIONS} - {"duo"}))
def test_every_allocation_option_is_a_flag(name: str) -> None:
    values = {"alpha": "0.35", "beta": "7", "tau1": "1.5", "tau2": "0.5"}
    values["head_scale"] = "sum" if name == "global" else "none"
    fields = [field.name for field in dataclasses.fields(ALLOCATIONS[name])]
    argv = ["generate", "--kv-allocation", name, "--kv-max-groups", "3"]
    for field in fields:
        argv += [f"--kv-{field.replace('_', '-')}", values[field]]
    config = eviction_config(build_parser().parse_args(argv))
    assert isinstance(config, EvictionConfig)
    assert config.max_groups == 3
    rule = allocation_of(config)
    assert type(rule) is ALLOCATIONS[name]
    for field in fields:
        assert str(getattr(rule, field)) == values[field]


@pytest.mark.parametrize("width", ["80", "100"])
def test_names_stay_whole_on_a_narrow_terminal(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    rows = listed(capsys, int(width))
    assert list(rows) == list(POLICIES)
    assert "pool_kernel=31" in rows["snapkv"]
    assert "arXiv:2404.14469" in rows["snapkv"]


def test_it_is_a_command_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert re.search(r"^\s+policies\s+list", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit) as stop:
        main(["policies", "--name", "snapkv"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --name snapkv" in capsys.readouterr().err
    env = {**os.environ, "PYTHONPATH": str(Path(kvkeep.__file__).parents[1]), "COLUMNS": "200"}
    argv = [sys.executable, "-m", "kvkeep", "policies"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "arXiv:2404.14469" in done.stdout


@pytest.mark.parametrize("name", POLICIES)
def test_help_names_every_policy(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        words = re.split(r"[\s,;]+", capsys.readouterr().out)
        assert name in words


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_is_a_flag(name: str) -> None:
    """What the table shows can be set on the command line."""
    values = {
        "group": "mean" if name in ("span", "lookahead") else "max",
        "window": "9", "pool_kernel": "3", "pooling": "max", "chunk_size": "7", "lag": "33",
        "cross": "true", "gamma": "2.5", "mix": "0.5", "seed": "11", "sink_tokens": "6",
        "n_future": "77", "covariance": "false", "value_norm": "false", "epsilon": "0.25",
        "stage_share": "0.75", "draft_tokens": "5",
    }  # fmt: skip
    fields = [field.name for field in dataclasses.fields(POLICIES[name])]
    argv = ["generate", "--kv-eviction", name]
    for field in fields:
        argv += ["--kv-" + field.replace("_", "-"), values[field]]
    config = eviction_config(build_parser().parse_args(argv))
    assert isinstance(config, EvictionConfig)
    policy = policy_of(config)
    assert type(policy) is POLICIES[name]
    for field in fields:
        assert str(getattr(policy, field)).lower() == values[field]
        assert getattr(policy, field) != getattr(get_policy(name), field)


def test_bad_values_of_the_new_flags(capsys: pytest.CaptureFixture[str]) -> None:
    start = ("generate", "--kv-eviction")
    for argv, message in (
        (("knorm", "--kv-lag", "8"), "'knorm' has no option 'lag'"),
        (("lagkv", "--kv-lag", "0"), "bad value for lag"),
        (("cake", "--kv-gamma", "-1"), "bad value for gamma"),
        (("random", "--kv-seed", "-1"), "bad value for seed"),
        (("snapkv", "--kv-alpha", "0.5"), "'uniform' has no option 'alpha'"),
        (("snapkv", "--kv-allocation", "duo"), "needs a head profile"),
        (("snapkv", "--kv-allocation", "adaptive", "--kv-store", "shared"), "store 'ragged'"),
        (("snapkv-d", "--kv-allocation", "adaptive"), "one score for all of them"),
    ):
        assert message in fault_of(capsys, *start, *argv)
    with pytest.raises(SystemExit):
        main([*start, "lagkv", "--kv-cross", "maybe"])
    assert "argument --kv-cross: invalid true_or_false value: 'maybe'" in capsys.readouterr().err
    assert [true_or_false(text) for text in ("true", "FALSE")] == [True, False]
