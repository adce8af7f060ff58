"""`kvkeep inspect`: which rows of one prompt an eviction keeps, as a page and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from kvkeep.cli.flags import EVICTION_OFF, add_eviction_flags, eviction_config
from kvkeep.cli.loading import load_model, mention_demo
from kvkeep.cli.progress import prompt_progress
from kvkeep.cli.prompting import build_prompt, template_options
from kvkeep.cli.report import seconds
from kvkeep.cli.sampling import adapt_prefill_step, check_numbers, prefill_step
from kvkeep.demo_model import DEMO_NAME
from kvkeep.errors import ConfigError
from kvkeep.inspecting import BUDGETS, inspect_prompt, parse_layers, save_html, save_png
from kvkeep.inspecting.page import bytes_words, rows_words, shown_layers
from kvkeep.pages import nbytes, require_matplotlib, require_writable
from kvkeep.spec import Budget

_OUT = "inspect.html"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect`: the prompt flags of `generate`, the eviction flags, the files to write."""
    parser = subparsers.add_parser(
        "inspect",
        help="show which tokens of a prompt are kept",
        description="Read one prompt, score it, and write what is kept of it as an HTML page that"
        " needs no network: the text shaded by score, a switch per layer and head, a map of layers"
        " by positions, a budget slider. Nothing is generated.",
    )
    parser.add_argument(
        "--model", default=DEMO_NAME, help="The model: a folder or a hub repository."
    )
    mention_demo(parser)
    parser.add_argument(
        "--prompt", "-p", required=True, help='the prompt; "-" reads it from standard input'
    )
    parser.add_argument(
        "--out", default=_OUT, metavar="FILE.html", help="the page (default: %(default)s)"
    )
    parser.add_argument(
        "--png",
        metavar="FILE.png",
        help="also draw the map at the asked budget (needs the extra 'eval')",
    )
    parser.add_argument(
        "--layers",
        metavar="LIST",
        help="layers to show, such as 0-5,12 (default: all; large pages show every n-th)",
    )
    shares = " ".join(str(Budget(share, "share")).rstrip("%") for share in BUDGETS)
    parser.add_argument(
        "--budgets",
        metavar="LIST",
        help="budgets of the slider beside the asked one, such as 10%%,25%%,2048 (default:"
        f" {shares} %%)",
    )
    group = parser.add_argument_group("as in mlx_lm.generate")
    group.add_argument("--adapter-path")
    group.add_argument("--trust-remote-code", action="store_true")
    group.add_argument("--system-prompt")
    group.add_argument("--prefill-response")
    group.add_argument("--ignore-chat-template", action="store_true")
    group.add_argument("--chat-template-config", metavar="JSON")
    group.add_argument("--prefill-step-size", type=int, metavar="N")
    adapt_prefill_step(parser)
    add_eviction_flags(parser)
    parser.set_defaults(run=run, image=None)


def run(args: argparse.Namespace) -> int:
    """Inspect the prompt and write the files; exit status 0.

    Raises:
        KvkeepError: a flag, the model or the prompt is at fault, or a file cannot be written.
    """
    config = eviction_config(args)
    if config is None:
        raise ConfigError(
            f"--kv-eviction {EVICTION_OFF} keeps every row: there is nothing to inspect",
            remedy="Name a policy.",
        )
    check_numbers(args)
    template_options(args)
    layers = None if args.layers is None else parse_layers(args.layers)
    budgets = BUDGETS if args.budgets is None else _budgets(args.budgets)
    require_writable(args.out, ".html")
    if args.png is not None:
        require_writable(args.png, ".png")
        require_matplotlib()
    loaded = load_model(
        args.model, adapter_path=args.adapter_path, trust_remote_code=args.trust_remote_code
    )
    prompt = build_prompt(args, loaded, is_suffix=False)
    with prompt_progress() as progress:
        inspection = inspect_prompt(
            loaded.model,
            loaded.tokenizer,
            prompt.tokens,
            config,
            budgets=budgets,
            layers=layers,
            name=loaded.name,
            prefill_step_size=prefill_step(args.prefill_step_size),
            progress=progress,
        )
    save_html(inspection, args.out, layers=layers)
    if args.png is not None:
        save_png(inspection, args.png, layers=layers)
    rung = inspection.rungs[inspection.asked]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    times = f"read in {seconds(inspection.prefill_seconds)}"
    console.print(f"{len(inspection.tokens):,} prompt tokens, {times}", markup=False)
    console.print(f"rows kept: {rows_words(inspection, rung)}", markup=False)
    console.print(f"KV cache: {bytes_words(inspection, rung)}", markup=False)
    shown, there = shown_layers(inspection, layers), len(inspection.layers)
    if layers is None and len(shown) < there:
        console.print(f"the page shows {len(shown)} of {there} layers; --layers chooses others")
    console.print(f"page: {nbytes(Path(args.out).stat().st_size)}", markup=False)
    for name in filter(None, (args.out, args.png)):
        print(name)  # stdout has the files alone: scripts read it
    return 0


def _budgets(text: str) -> list[Budget]:
    """The budgets of a list.

    Raises:
        BudgetError: one of them is unreadable.
    """
    return [Budget.parse(part) for part in text.split(",") if part.strip()]
