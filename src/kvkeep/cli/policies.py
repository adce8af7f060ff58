"""`kvkeep policies`: which policies there are, and what each looks at."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvkeep.cli.report import print_table
from kvkeep.generation import RECOMMENDED
from kvkeep.policies import POLICIES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `policies`, which takes no flags."""
    parser = subparsers.add_parser(
        "policies",
        help="list the eviction policies, what each needs and where it comes from",
        description="List the policies that --kv-eviction takes. A query-aware policy keeps rows"
        " that fit the question at the prompt's end; an agnostic one does not look at it. Options"
        " are set by the flags of the same name, such as --kv-window for window.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; exit status 0."""
    print_table(policies_table())
    return 0


def policies_table() -> Table:
    """One entry per registered policy, the recommended one marked."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, leading=1, padding=(0, 2, 0, 0)
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("keeps; needs; options; source", overflow="fold")
    for name, policy in POLICIES.items():
        mark = " *" if name == RECOMMENDED.policy else ""
        table.add_row(Text(name + mark), Text("\n").join(map(Text, policy_lines(policy))))
    table.caption = f"* default of the commands (budget {RECOMMENDED.limit})"
    table.caption_justify = "left"
    return table


def policy_lines(policy: type[Any]) -> list[str]:
    """Summary, needs with question and scope, options with defaults (if any), source."""
    needs = ", ".join(sorted(policy.needs)) or "nothing"
    question = "query-aware" if policy.query_aware else "agnostic"
    options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(policy))
    scope = f"one set per {policy.scope}"
    lines = [policy.summary, f"needs {needs}; {question}; {scope}", options, policy.source]
    return [line for line in lines if line]
