"""Needles found with few rows: exact answers of the demo model by policy, budget and task.

    python benchmarks/needles.py [--set report] [--prompts N] [--budget 25% ...] [--out PATH]

Each prompt is prefilled once; every setting answers over an evicted copy of its cache, and the
full cache's rate stands on top of the table. PATH.jsonl gets a line per prompt and setting, after
each prompt; what is in it already is not computed again. PATH.md gets the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results
from needle_tasks import SETS, SeedSet, Task

from kvkeep.bench import write_text

FULL = "full cache"
BUDGETS = ("12%", "25%", "50%")
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is evaluated beside the full cache.

    Attributes:
        name: of the table's row.
        options: keywords of an `EvictionConfig`, the budget left out.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)


PROFILE = str(Path(__file__).parents[1] / "docs/results/heads/demo-optimise.json")


def _setting(policy: str, **options: Any) -> Setting:
    told = {key: value for key, value in options.items() if key != "head_profile"}
    shown = [policy, *(f"{key.replace('_', ' ')} {value}" for key, value in told.items())]
    return Setting(", ".join(shown), {"policy": policy, **options})


SETTINGS = (
    _setting("lookahead"),
    _setting("span"),
    _setting("span", allocation="adaptive"),
    _setting("snapkv"),
    _setting("snapkv", allocation="adaptive"),
    _setting("snapkv", window=32),
    _setting("snapkv", window=32, pool_kernel=5),
    _setting("snapkv", window=64, pool_kernel=5),
    _setting("snapkv-d"),
    _setting("chunkkv"),
    _setting("cake"),
    _setting("rkv"),
    _setting("tova"),
    _setting("keydiff"),
    _setting("knorm"),
    _setting("lagkv"),
    _setting("cur"),
    _setting("sink_recent"),
    _setting("random"),
    _setting("span", store="shared"),
    _setting("span", allocation="pyramid"),
    _setting("span", allocation="cake"),
    _setting("span", allocation="duo", head_profile=PROFILE),
    _setting("snapkv", allocation="pyramid"),
    _setting("snapkv", window=32, allocation="adaptive", head_scale="none"),
    _setting("sink_recent", allocation="duo", head_profile=PROFILE),
    _setting("kvzip"),
    _setting("kvzip", allocation="global"),
    _setting("kvzip", allocation="adaptive", head_scale="none"),
    _setting("criticalkv"),
    _setting("expected_attention"),
    _setting("observed_attention"),
    _setting("compactor"),
    _setting("leverage"),
    _setting("non_causal_attn"),
)


def main(arguments: list[str] | None = None) -> int:
    """Evaluate what is missing in the record, then write the tables."""
    options = parse(arguments)
    import kvkeep  # noqa: F401  # a fast BLAS only counts if it comes before mlx

    record = options.out.with_suffix(".jsonl")
    seed_set = SETS[options.set]
    about = provenance(options, seed_set)
    lines = resumed(record, about)
    evaluate(options, seed_set, record, about, lines)
    text = markdown(about, seed_set.tasks, lines)
    write_text(options.out.with_suffix(".md"), text)
    print(text)
    return 0


def evaluate(
    options: argparse.Namespace,
    seed_set: SeedSet,
    record: Path,
    about: Record,
    lines: list[Record],
) -> None:
    """Add what is missing to `lines`, and write the file after each prompt."""
    from needle_answers import answers, asked, evicted, own_reading, read

    from kvkeep import EvictionConfig, copy_cache
    from kvkeep.allocation import allocation_of
    from kvkeep.generation import draft_start, repeat_prompt
    from kvkeep.policies import policy_of

    settings = [s for s in SETTINGS if options.only is None or s.options["policy"] in options.only]
    configs = {
        (setting.name, budget): EvictionConfig.parse({"budget": budget, **setting.options})
        for setting in settings
        for budget in options.budget
    }
    window = max(
        max(policy_of(config).observation_window, allocation_of(config).window)
        for config in configs.values()
    )
    model, tokenizer = load_model()

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    done = {(line["task"], line["prompt"], line["setting"], line["budget"]) for line in lines}
    for task in seed_set.tasks:
        prompts = seed_set.prompts(task, options.prompts, options.tokens, count_tokens)
        for index, prompt in enumerate(prompts):
            wanted = [(FULL, ""), *configs]
            missing = [key for key in wanted if (str(task), index, *key) not in done]
            if not missing:
                continue
            start = time.perf_counter()
            tokens = asked(tokenizer, prompt, question=options.question)
            readings = {
                key: own_reading(configs[key]) if key[0] != FULL else None for key in missing
            }
            for policy in dict.fromkeys(readings.values()):
                keys = [key for key in missing if readings[key] == policy]
                config = None if policy is None else configs[keys[0]]
                repeat = draft = None
                if config is not None:
                    first = tokens.given[0] if len(tokens.given) == 1 else None  # known in use
                    repeat = repeat_prompt(tokenizer, config)
                    draft = draft_start(tokenizer, config, first)
                exact = read(
                    model, tokens.context, window, policy=policy, repeat=repeat, draft=draft
                )
                for key in keys:
                    full = key[0] == FULL
                    cache = copy_cache(exact.cache) if full else evicted(exact, configs[key])
                    right = answers(model, cache, tokens)
                    lines.append(_line(task, index, key, right, len(tokens.context), prompt.depth))
            write_lines(record, about, lines)
            took = time.perf_counter() - start
            print(f"{task}, prompt {index}: {len(missing)} settings, {took:.0f} s", flush=True)


def load_model() -> tuple[Any, Any]:
    """The demo model and its tokenizer."""
    import mlx_lm

    from kvkeep.demo_model import resolve_model

    return mlx_lm.load(str(resolve_model("demo")))[:2]


def _line(
    task: Task, index: int, key: tuple[str, str], right: bool, length: int, depth: float
) -> Record:
    return {
        "task": str(task),
        "prompt": index,
        "setting": key[0],
        "budget": key[1],
        "right": right,
        "length": length,
        "depth": round(depth, 3),
    }


def provenance(options: argparse.Namespace, seed_set: SeedSet) -> Record:
    """What the answers depend on; a record of another one is not continued."""
    from kvkeep import __version__
    from kvkeep.demo_model import SMOLLM2_135M, default_dtype

    machine = results.machine()
    return {
        "model": SMOLLM2_135M.title,
        "model sha256": SMOLLM2_135M.sha256,
        "dtype": default_dtype(),
        "kvkeep": __version__,
        **{name: machine[name.replace("-", "_")] for name in ("python", "mlx", "mlx-lm")},
        "set": seed_set.name,
        "first seed": seed_set.first_seed,
        "prompts per task": options.prompts,
        "document tokens": options.tokens,
        "question": options.question,
    }


def resumed(record: Path, about: Record) -> list[Record]:
    """The lines of an earlier run of the same provenance; none where there is no file.

    Exits with an error if the file is of another provenance.
    """
    if not record.exists():
        return []
    first, *rest = record.read_text(encoding="utf-8").splitlines()
    if json.loads(first) != about:
        sys.exit(f"{record.name} is of another run ({first}): name another --out or remove it")
    return [json.loads(line) for line in rest]


def write_lines(record: Path, about: Record, lines: Iterable[Record]) -> None:
    """Write the whole record anew, under a temporary name."""
    write_text(record, "".join(json.dumps(line) + "\n" for line in (about, *lines)))


def markdown(about: Record, tasks: Iterable[Task], lines: Iterable[Record]) -> str:
    """Exact answers of prompts asked, a table per budget: setting by task, best first."""
    names = [str(task) for task in tasks]
    found: dict[tuple[str, str, str], list[bool]] = {}
    for line in lines:
        key = (line["setting"], line["budget"], line["task"])
        found.setdefault(key, []).append(line["right"])
    rows = sorted({key[:2] for key in found}, key=lambda row: _order(row, found))
    budgets = sorted({budget for _, budget in rows if budget}, key=_share)
    out = ["# Needles", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    for budget in budgets:
        out += [f"## {budget} of the rows", "", _cells("setting", "all", *names)]
        out += [_cells(*["---"] * (len(names) + 2))]
        for row in rows:
            if row[1] in ("", budget):
                by_task = [found.get((*row, name), []) for name in names]
                together = [right for answers in by_task for right in answers]
                out.append(_cells(row[0], _rate(together), *map(_rate, by_task)))
        out.append("")
    return "\n".join(out)


def _order(row: tuple[str, str], found: dict[tuple[str, str, str], list[bool]]) -> tuple:
    """The full cache first, then the best."""
    right = [answer for key, answers in found.items() if key[:2] == row for answer in answers]
    return row[0] != FULL, -sum(right) / len(right), row[0]


def _share(budget: str) -> float:
    return float(budget.rstrip("%"))


def _rate(right: list[bool]) -> str:
    return f"{sum(right)}/{len(right)}" if right else ""


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    policies = sorted({setting.options["policy"] for setting in SETTINGS})
    parser = argparse.ArgumentParser(description="Exact answers over evicted caches.")
    parser.add_argument("--set", choices=sorted(SETS), default="report", help="seed set")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per task")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a document")
    parser.add_argument("--budget", nargs="+", default=list(BUDGETS), help="rows that may stay")
    parser.add_argument("--only", nargs="+", choices=policies, help="policies; all by default")
    parser.add_argument(
        "--question",
        choices=("inside", "after"),
        default="inside",
        help="inside what is evicted, or after the eviction",
    )
    parser.add_argument("--out", type=Path, default=Path("build/needles"), help="files to write")
    options = parser.parse_args(arguments)
    if options.prompts < 1 or options.tokens < 200:
        parser.error("--prompts must be at least 1, --tokens at least 200")
    return options


if __name__ == "__main__":
    sys.exit(main())
