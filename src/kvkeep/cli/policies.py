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
    """One row per registered policy, the recommended one marked."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, leading=1, padding=(0, 1, 0, 0)
    )
    for title in ("policy", "needs", "question", "scope", "options", "keeps, source"):
        # Names and options are typed by hand: they must not be broken over lines.
        table.add_column(title, no_wrap=title in ("policy", "options"), overflow="fold")
    for name, policy in POLICIES.items():
        table.add_row(*(Text(cell) for cell in policy_row(name, policy)))
    table.caption = f"* default of the commands (budget {RECOMMENDED.limit})"
    table.caption_justify = "left"
    return table


def policy_row(name: str, policy: type[Any]) -> tuple[str, ...]:
    """Name, needs, query-aware or agnostic, scope, options with defaults, what and whence."""
    return (
        f"{name} *" if name == RECOMMENDED.policy else name,
        ", ".join(sorted(policy.needs)) or "nothing",
        "query-aware" if policy.query_aware else "agnostic",
        policy.scope,
        "\n".join(f"{field.name}={field.default}" for field in dataclasses.fields(policy)) or "–",
        f"{policy.summary}\n{policy.source}",
    )
