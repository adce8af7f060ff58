"""`kvkeep eval`: what eviction costs, by tasks and against the exact cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvkeep.cli.loading import load_model, mention_demo
from kvkeep.evaluation import TASKS, Questions, export_examples, parse_length, split_names
from kvkeep.evaluation.asking import listed, prose_digest
from kvkeep.haystack import Haystack, prose_from_files


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `eval`; `run` is left in the parsed arguments as `run`."""
    parser = subparsers.add_parser(
        "eval",
        help="measure what eviction costs: retrieval tasks, and divergence from the exact cache",
        description="Ask a model seeded questions about long texts over the exact cache and over"
        " evicted ones. Each prompt is read once and every setting answers over a copy of its"
        " cache. An interrupted run goes on where it stopped when the same command is given again.",
    )
    parser.add_argument("--model", required=True, help="The model: a folder or a hub repository.")
    mention_demo(parser)
    plain = Questions()
    names = "; ".join(f"{task.name}: {task.summary}" for task in TASKS.values())
    parser.add_argument("--tasks", metavar="A,B", help=f"{names} (default: all)")
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        default=listed(plain.lengths),
        help='tokens of a prompt, template included; "4k" is 4,000 (default: %(default)s)',
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=plain.limit,
        help="examples per task and length (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=plain.seed, help="of all prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--prose",
        nargs="+",
        metavar="FILE",
        help="text files to hide needles in (default: texts of the Python library)",
    )
    parser.add_argument(
        "--export", metavar="FILE.jsonl", help="write the prompts for other programs, and stop"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="as in mlx_lm")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit status 0.

    Raises:
        ConfigError: a flag is out of range.
        EvaluationError: a file cannot be read or written, or is of another run.
    """
    questions = Questions(
        tasks=tuple(TASKS) if args.tasks is None else split_names(args.tasks),
        lengths=tuple(map(parse_length, split_names(args.lengths))),
        limit=args.limit,
        seed=args.seed,
    )
    prose = None if args.prose is None else prose_from_files(args.prose)
    loaded = load_model(args.model, trust_remote_code=args.trust_remote_code)
    return _export(args, loaded.tokenizer, questions, prose)


def _export(
    args: argparse.Namespace, tokenizer: Any, questions: Questions, prose: Haystack | None
) -> int:
    about = {"model": args.model, "seed": questions.seed, "prose": prose_digest(prose)}
    examples = questions.examples(tokenizer, prose)
    count = export_examples(Path(args.export), tokenizer, examples, about)
    print(f"{count} prompts in {args.export}")
    return 0
