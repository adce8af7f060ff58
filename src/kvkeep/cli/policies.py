"""`kvkeep policies`: which policies and allocations there are, and what each looks at."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvkeep.allocation import ALLOCATIONS
from kvkeep.cli.report import print_table
from kvkeep.generation import RECOMMENDED
from kvkeep.policies import POLICIES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `policies`, which takes no flags."""
    parser = subparsers.add_parser(
        "policies",
        help="list the eviction policies and allocations, what each needs, where it comes from",
        description="List the policies that --kv-eviction takes and the allocations that"
        " --kv-allocation takes. A query-aware policy keeps rows"
        " that fit the question at the prompt's end; an agnostic one does not look at it. Options"
        " are set by the flags of the same name, such as --kv-window for window.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print both tables; exit status 0."""
    print_table(policies_table())
    print()
    print_table(allocations_table())
    return 0


def policies_table() -> Table:
    """One entry per registered policy, the recommended one marked."""
    table = _table("policy", "keeps; needs; options; source")
    for name, policy in POLICIES.items():
        mark = " *" if name == RECOMMENDED.policy else ""
        table.add_row(Text(name + mark), Text("\n").join(map(Text, policy_lines(policy))))
    table.caption = f"* default of the commands (budget {RECOMMENDED.limit})"
    table.caption_justify = "left"
    return table


def allocations_table() -> Table:
    """One entry per registered allocation, the recommended one marked."""
    table = _table("allocation", "deals rows out; looks at; options; source")
    for name, allocation in ALLOCATIONS.items():
        mark = " *" if name == RECOMMENDED.allocation else ""
        lines = map(Text, allocation_lines(allocation))
        table.add_row(Text(name + mark), Text("\n").join(lines))
    table.caption = "* default of the commands"
    table.caption_justify = "left"
    return table


def _table(first: str, second: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, leading=1, padding=(0, 2, 0, 0)
    )
    table.add_column(first, no_wrap=True)
    table.add_column(second, overflow="fold")
    return table


def allocation_lines(allocation: type[Any]) -> list[str]:
    """Summary, what it looks at, options with defaults (if any), source."""
    seen = {
        "nothing": "no score",
        "layer": "the scores of each layer",
        "model": "all layers at once",
    }[allocation.sight]
    counts = "heads of a layer differ" if allocation.by_head else "heads of a layer are equal"
    lines = [allocation.summary, f"looks at {seen}; {counts}", _options(allocation)]
    return [line for line in (*lines, allocation.source) if line]


def _options(choice: type[Any]) -> str:
    fields = (field for field in dataclasses.fields(choice) if field.name != "profile")
    return ", ".join(f"{field.name}={field.default}" for field in fields)


def policy_lines(policy: type[Any]) -> list[str]:
    """Summary, needs with question and scope, options with defaults (if any), source."""
    needs = ", ".join(sorted(policy.needs)) or "nothing"
    question = "query-aware" if policy.query_aware else "agnostic"
    scope = f"one set per {policy.scope}"
    needed = f"needs {needs}; {question}; {scope}"
    lines = [policy.summary, needed, _options(policy), policy.source]
    return [line for line in lines if line]
