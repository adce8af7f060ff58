"""`kvkeep bench`: speed and memory, exact beside evicted, on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.bench import (
    DTYPES,
    BenchPlan,
    BenchReport,
    Device,
    Report,
    ResultsFile,
    SyntheticShape,
    Workload,
    as_lines,
    combined,
    device_line,
    load_average,
    markdown,
    model_line,
    names,
    parse_lengths,
    read_report,
    require_writable,
    run_bench,
    tables,
    warnings,
)
from kvkeep.cli.flags import refuse_together
from kvkeep.cli.loading import is_path, load_model, mention_demo
from kvkeep.cli.progress import LINE_EVERY
from kvkeep.cli.reporting import add_report_flags, require_reports, write_reports
from kvkeep.demo_model import DEMO_NAME
from kvkeep.errors import ConfigError
from kvkeep.generation import RECOMMENDED
from kvkeep.reports import bench_page, bench_picture
from kvkeep.spec import EvictionConfig

FORMATS = ("table", "md", "json")
#: Columns where there is no terminal that says how wide it is.
_WIDTH = 150


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench`; `run` is left in the parsed arguments as `run`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and memory on this machine, exact beside evicted",
        description="Measure decode speed, what eviction adds to the prefill, scoring and"
        " compaction time, and memory, for every combination of the lists below. The exact cache,"
        " the evicted ones and the bound (a stock cache of as many rows as are kept) run in one"
        " process, interleaved; figures are medians with an interval, ratios are taken within a"
        " round. Lists are separated by commas.",
    )
    _add_what(parser)
    _add_how(parser)
    _add_where(parser)
    parser.set_defaults(run=run)


def _add_what(parser: argparse.ArgumentParser) -> None:
    text = f"The model: a folder or a hub repository (default: {DEMO_NAME})."
    parser.add_argument("--model", help=text)
    mention_demo(parser)
    parser.add_argument(
        "--synthetic",
        metavar="SIZES",
        help="a random llama over random rows instead, so that long caches need no prefill:"
        " name=number pairs of layers, heads, kv_heads, dim, hidden, mlp, vocab"
        f" (those left out: {SyntheticShape()})",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of a synthetic model (default: float32)")
    parser.add_argument("--trust-remote-code", action="store_true", help="as in mlx_lm")
    parser.add_argument(
        "--lengths", default="1k", metavar="N,…", help="prompt tokens; k is 1024 (default: 1k)"
    )
    parser.add_argument(
        "--budgets",
        default=str(RECOMMENDED.limit),
        metavar="BUDGET,…",
        help="rows per KV head (512), shares of the prompt (10%%) or bytes of the whole cache"
        f" (64MB) (default: {RECOMMENDED.limit}%)",
    )
    for flag, default, text in (
        ("policies", RECOMMENDED.policy, "which rows stay"),
        ("allocations", RECOMMENDED.allocation, "how rows are dealt out"),
        ("stores", RECOMMENDED.store, "how they are stored: shared, per-head, ragged, union, auto"),
    ):
        parser.add_argument(
            f"--{flag}", default=default, metavar="NAME,…", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--batch", default="1", metavar="N,…", help="requests that decode together (default: 1)"
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    plain = BenchPlan((1,), (RECOMMENDED,))
    for flag, name, text in (
        ("tokens", "tokens", "decode steps per round"),
        ("rounds", "rounds", "rounds of decoding"),
        ("prompt-rounds", "prompt_rounds", "rounds of the prefill, of scoring and compaction"),
        ("prefill-step-size", "prefill_step", "prompt tokens per chunk"),
        ("seed", "seed", "of the order in a round, the prompt and the random model"),
    ):
        parser.add_argument(
            f"--{flag}",
            dest=name,
            type=int,
            default=getattr(plain, name),
            metavar="N",
            help=f"{text} (default: {getattr(plain, name)})",
        )


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="FILE.jsonl",
        help="write every figure of every round; results that the file holds already are not"
        " measured again, and a file of another device or model is refused",
    )
    parser.add_argument(
        "--show", metavar="FILE.jsonl", help="measure nothing: show what a file holds"
    )
    add_report_flags(parser, "decode speed and bytes over the prompt's length")
    parser.add_argument(
        "--format", choices=FORMATS, default="table", help="on stdout (default: table)"
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", help="--format json"
    )


def run(args: argparse.Namespace) -> int:
    """Run the parsed subcommand; exit status 0.

    Raises:
        ConfigError: a flag is out of range, two exclude each other, or nothing is evicted.
        BenchFileError: a file is of another device or model, damaged, or cannot be written.
        UnsupportedModelError: the model cannot be evicted.
    """
    require_reports(args)
    load = load_average()
    console = Console(stderr=True)
    report = _shown(args) if args.show is not None else _measured(args, load, console)
    write_reports(
        args,
        lambda origin: bench_page(report, origin),
        lambda: markdown(report),
        lambda: bench_picture(report),
    )
    print_report(report, args.format)
    return 0


def _shown(args: argparse.Namespace) -> BenchReport:
    for flag in ("out", "model", "synthetic"):
        if getattr(args, flag) is not None:
            refuse_together("--show", f"--{flag}", "--show measures nothing.")
    return read_report(args.show)


def _measured(args: argparse.Namespace, load: float, console: Console) -> BenchReport:
    """Everything in the file after this run, or this run's results where there is none."""
    plan, shape = _plan(args, console), _shape(args)
    device = Device.present()
    if shape is None:
        name = args.model or DEMO_NAME
        loaded = load_model(name, trust_remote_code=args.trust_remote_code)
        shown = Path(name).name if is_path(name) else name  # results name no folders
        workload = Workload.real(loaded.model, loaded.tokenizer, shown, plan.seed)
    else:
        workload = Workload.random(shape, args.dtype or DTYPES[0], plan.seed)
    out = Path(args.out) if args.out else None
    file = ResultsFile(out, device, workload.facts, load)
    for line in (device_line(device), model_line(workload.facts)):
        _say(console, line)
    if file.busy:
        _say(
            console,
            f"warning: the machine is busy (load {load:.1f} on {device.cores} cores):"
            " times and ratios will be less certain than they look",
            "yellow",
        )
    try:
        with _progress(console) as report:
            run_bench(workload, plan, file, report)
    except KeyboardInterrupt:
        if out is not None:
            _say(console, f"{out} holds what was finished; the same command goes on.")
        raise
    finally:
        file.end()
    return file.report


def _plan(args: argparse.Namespace, console: Console) -> BenchPlan:
    settings, left_out = _settings(args)
    for reason in left_out:
        _say(console, f"left out: {reason}")
    plan = BenchPlan(
        lengths=parse_lengths(args.lengths, "--lengths"),
        settings=settings,
        batches=parse_lengths(args.batch, "--batch"),
        **{
            name: getattr(args, name)
            for name in ("tokens", "rounds", "prompt_rounds", "prefill_step", "seed")
        },
    )
    plan.require_evicting()
    if args.synthetic is not None:
        plan.require_replayable()
    if args.out is not None:
        require_writable(Path(args.out))
    return plan


def _settings(args: argparse.Namespace) -> tuple[tuple[EvictionConfig, ...], tuple[str, ...]]:
    lists = [names(getattr(args, f)) for f in ("policies", "budgets", "stores", "allocations")]
    return combined(*lists)


def _shape(args: argparse.Namespace) -> SyntheticShape | None:
    if args.synthetic is None:
        if args.dtype is not None:
            raise ConfigError(
                "--dtype is for synthetic models: a real one has its own",
                remedy="Leave it out, or give --synthetic.",
            )
        return None
    if args.model is not None:
        refuse_together("--model", "--synthetic", "Measure one after the other, into two files.")
    return SyntheticShape.parse(args.synthetic)


def print_report(report: BenchReport, form: str) -> None:
    """Print a report on stdout: as tables, as Markdown, or as the JSON lines of its file."""
    if form == "json":
        sys.stdout.write(as_lines(report))
        return
    if form == "md":
        sys.stdout.write(markdown(report))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for line in (device_line(report.device), model_line(report.model)):
        _say(console, line)
    for warning in warnings(report):
        _say(console, warning, "yellow")
    for shown in tables(report):
        table = Table(title=shown.title, title_justify="left", caption=shown.note)
        table.caption_justify = "left"
        for header in shown.headers:
            first = header == shown.headers[0]
            table.add_column(header, justify="left" if first else "right", overflow="fold")
        for row in shown.rows:
            table.add_row(*map(Text, row))
        console.print()
        console.print(table)


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
    """A line that changes on a terminal, a line now and then elsewhere."""
    if console.is_terminal:
        with console.status("measuring") as status:
            yield status.update
        return
    spoke = 0.0

    def report(words: str) -> None:
        nonlocal spoke
        now = time.perf_counter()
        if now - spoke >= LINE_EVERY:
            spoke = now
            _say(console, words)

    yield report


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style=style), soft_wrap=True, highlight=False)
