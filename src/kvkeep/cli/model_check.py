"""`kvkeep model check`: what eviction will do on a model, layer by layer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby

from rich import box
from rich.table import Table
from rich.text import Text

from kvkeep.checking import LayerReport, ModelReport, check_model
from kvkeep.cli.flags import add_eviction_flags, eviction_config
from kvkeep.cli.loading import load_model, mention_demo
from kvkeep.cli.report import nbytes, print_table
from kvkeep.errors import BudgetError, ConfigError
from kvkeep.footprint import Footprint, LayerFootprint
from kvkeep.policies import POLICIES
from kvkeep.spec import EvictionConfig

#: Prompts whose caches are told.
LENGTHS = (8_192, 32_768, 131_072)
_VERDICTS = {
    "exact": "exact: rows leave every layer, and the rest is as it was",
    "partly": "partly: rows leave the layers marked so; the others stay as they are, by design",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check` to the subcommands of `model`."""
    parser = commands.add_parser(
        "check",
        help="show what eviction will do on a model, layer by layer, and what it would save",
        description="Look at a model: which of its layers can lose rows, which policies and stores"
        " work with it, bytes per token, and what a budget saves. Two tokens are run through it.",
    )
    parser.add_argument("--model", required=True, help="The model: a folder or a hub repository.")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="Trust remote code of the tokenizer."
    )
    mention_demo(parser)
    add_eviction_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; exit status 0, or 1 if nothing of the model can be evicted as asked.

    Raises:
        KvkeepError: a flag or the model is at fault.
    """
    config = eviction_config(args)
    if config is None:
        raise ConfigError("there is nothing to check with eviction off")
    loaded = load_model(args.model, trust_remote_code=args.trust_remote_code)
    report = check_model(loaded.model, config)
    show(report, config)
    return 1 if report.verdict == "refused" or report.refusal is not None else 0


def show(report: ModelReport, config: EvictionConfig) -> None:
    """Print a report."""
    if report.layers:
        print_table(layers_table(report))
    if report.footprint is not None and report.verdict != "refused":
        print_table(savings_table(report.footprint, config))
    print_table(verdict_table(report, config))


def layers_table(report: ModelReport) -> Table:
    """Neighbouring layers that are alike share a line."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("layers", "cache", "rows", "bytes per token", "note"):
        table.add_column(name, overflow="fold")
    for indices, layer, size in _runs(report):
        held = "" if size is None else _bytes_of(size)
        table.add_row(indices, layer.kind, "evicted" if layer.evicted else "stay", held, layer.note)
    return table


def _runs(report: ModelReport) -> Iterator[tuple[str, LayerReport, LayerFootprint | None]]:
    sizes = [None] * len(report.layers) if report.footprint is None else report.footprint.layers
    lines = zip(report.layers, sizes, strict=True)
    for _, run in groupby(lines, lambda line: (line[0].kind, line[0].note, line[1])):
        alike = list(run)
        first, last = alike[0][0].layer, alike[-1][0].layer
        yield (str(first) if first == last else f"{first} – {last}"), *alike[0]


def _bytes_of(size: LayerFootprint) -> str:
    if not size.row_bytes:
        return f"{nbytes(size.fixed_bytes)} in all" if size.fixed_bytes else "none"
    most = "" if size.most_rows is None else f", {size.most_rows:,} rows at most"
    return f"{nbytes(size.row_bytes)}{most}"


def savings_table(footprint: Footprint, config: EvictionConfig) -> Table:
    """The cache of prompts of several lengths, whole and at the config's budget."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prompt")
    limit = config.limit
    asked = nbytes(limit.amount) if limit.unit == "bytes" else str(limit)
    for name in ("whole cache", f"at {asked}", "saved"):
        table.add_column(name, justify="right")
    for length in LENGTHS:
        whole = footprint.nbytes(length)
        kept = kept_rows(footprint, config, length)
        if kept is None:
            table.add_row(f"{length:,} tokens", nbytes(whole), "holds no row", "")
            continue
        left = footprint.nbytes(length, kept=min(kept, length))
        saved = 1 - left / whole if whole else 0.0
        table.add_row(f"{length:,} tokens", nbytes(whole), nbytes(left), f"{saved:.0%}")
    return table


def kept_rows(footprint: Footprint, config: EvictionConfig, length: int) -> int | None:
    """Rows per head that the budget leaves of a prompt; None where it holds none."""
    row = footprint.evictable_row_bytes
    fixed = footprint.nbytes(length, kept=0)
    try:
        return config.limit.rows(length, bytes_per_row=row, fixed_bytes=fixed)
    except BudgetError:
        return None


def verdict_table(report: ModelReport, config: EvictionConfig) -> Table:
    """The verdict, what works, and whether the config that was asked for does."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("model", Text(report.name))
    refused = f"refused: it {report.reason}"
    table.add_row("verdict", Text(_VERDICTS.get(report.verdict, refused)))
    if report.verdict == "refused":
        return table
    if report.footprint is not None:
        whole = sum(layer.row_bytes for layer in report.footprint.layers)
        evicted = report.footprint.evictable_row_bytes
        table.add_row("bytes per token", f"{nbytes(whole)}, {nbytes(evicted)} of them evictable")
    every = len(report.policies) == len(POLICIES)
    table.add_row("policies", "all" if every else ", ".join(report.policies))
    table.add_row("stores", ", ".join(report.stores))
    asked = f"policy {config.policy!r}, allocation {config.allocation!r}, store {config.store!r}"
    table.add_row("as asked", Text(report.refusal or f"{asked}: works"))
    return table
