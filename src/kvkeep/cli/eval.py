"""`kvkeep eval`: what eviction costs, by tasks and against the exact cache."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from kvkeep.cli.eval_tables import tables
from kvkeep.cli.loading import LoadedModel, load_model, mention_demo
from kvkeep.cli.progress import step_progress
from kvkeep.cli.report import print_table
from kvkeep.cli.reporting import add_report_flags, require_reports, write_reports
from kvkeep.errors import ConfigError
from kvkeep.evaluation import (
    PROTOCOLS,
    TASKS,
    Plan,
    Questions,
    Record,
    Results,
    ResultsFile,
    TextPlan,
    Variant,
    export_examples,
    header_of,
    listed,
    parse_length,
    prose_digest,
    read_results,
    read_text,
    require_lm_eval,
    run_harness,
    run_tasks,
    run_text,
    split_names,
    summarise,
    variants_of,
)
from kvkeep.haystack import Haystack, prose_from_files
from kvkeep.reports import eval_markdown, eval_page, eval_picture

_POLICIES = ("lookahead", "span", "snapkv", "sink_recent")
_BUDGETS = ("25%", "50%")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `eval`; `run` is left in the parsed arguments as `run`."""
    parser = subparsers.add_parser(
        "eval",
        help="measure what eviction costs: retrieval tasks, and divergence from the exact cache",
        description="Ask a model seeded questions about long texts over the exact cache and over"
        " evicted ones, or compare what it predicts of a text of your own. Each prompt is read"
        " once and every setting answers over a copy of its cache. An interrupted run goes on"
        " where it stopped when the same command is given again.",
    )
    parser.add_argument("--model", help="The model: a folder or a hub repository.")
    mention_demo(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="as in mlx_lm")
    _add_prompt_flags(parser)
    _add_setting_flags(parser)
    _add_result_flags(parser)
    parser.set_defaults(run=run)


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    plain, text = Questions(), TextPlan("", "", ())
    names = "; ".join(f"{task.name}: {task.summary}" for task in TASKS.values())
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--tasks",
        metavar="A,B",
        help=f"{names} (default: all, or none where --text or --lm-eval is given)",
    )
    group.add_argument(
        "--text",
        metavar="FILE",
        help="a text of your own: what the model predicts of it after eviction, against the exact"
        " cache",
    )
    group.add_argument(
        "--lm-eval",
        metavar="A,B",
        help="tasks of lm-evaluation-harness, by its names (needs the extra 'lm-eval')",
    )
    group.add_argument(
        "--lm-eval-include", metavar="FOLDER", help="folder with task files for it of your own"
    )
    group.add_argument(
        "--shots", type=int, metavar="N", help="examples that it shows (default: the task's)"
    )
    group.add_argument(
        "--lengths",
        metavar="N,N",
        default=listed(plain.lengths),
        help="tokens of a prompt, template included, or of a text's part before eviction;"
        ' "4k" is 4,000 (default: %(default)s)',
    )
    group.add_argument(
        "--limit",
        type=int,
        default=plain.limit,
        help="examples per task and length, stretches of a text, and examples of a harness task,"
        " at most"
        " (default: %(default)s)",
    )
    group.add_argument(
        "--continuation",
        type=int,
        metavar="N",
        default=text.continuation,
        help="tokens of a text that are predicted after eviction (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=plain.seed, help="of all prompts (default: %(default)s)"
    )
    group.add_argument(
        "--prose",
        nargs="+",
        metavar="FILE",
        help="text files to hide needles in (default: texts of the Python library)",
    )


def _add_setting_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "settings", "The full cache is always asked beside them. `kvkeep policies` lists names."
    )
    group.add_argument(
        "--policies",
        metavar="A,B",
        default=listed(_POLICIES),
        help="policies, each with options of its own if need be"
        " (snapkv:window=32:allocation=adaptive) (default: %(default)s)",
    )
    group.add_argument(
        "--budgets",
        metavar="B,B",
        default=listed(_BUDGETS),
        help="what may stay: shares, rows or bytes (default: %(default)s)",
    )
    group.add_argument(
        "--allocations", metavar="A,B", default="uniform", help="(default: %(default)s)"
    )
    group.add_argument("--stores", metavar="A,B", default="auto", help="(default: %(default)s)")
    group.add_argument(
        "--protocols",
        metavar="A,B",
        default="aware",
        help=f"{' and '.join(PROTOCOLS)}: whether the question is compressed with the document or"
        " comes after it was (default: %(default)s)",
    )


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="results, a line each; what is in it already is not computed again"
        " (default: eval-MODEL-seedN.jsonl)",
    )
    group.add_argument("--json", action="store_true", help="print the summary as JSON")
    group.add_argument(
        "--show",
        metavar="FILE.jsonl",
        help="compute nothing: show what a results file holds, also of an interrupted run",
    )
    add_report_flags(group, "score over budget")
    group.add_argument(
        "--export",
        metavar="FILE.jsonl",
        help="only write the tasks' prompts, for other programs",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit status 0.

    Raises:
        ConfigError: a flag is out of range.
        EvaluationError: a file cannot be read or written, or is of another run.
    """
    require_reports(args)
    if args.show is not None:
        _present(args, read_results(args.show))
        return 0
    if args.model is None:
        raise ConfigError("--model is missing", expected="--model, or --show with a results file")
    questions, text = _prompts(args)
    variants = variants_of(
        split_names(args.policies),
        split_names(args.budgets),
        split_names(args.allocations),
        split_names(args.stores),
    )
    if args.lm_eval is not None:
        require_lm_eval()
    plan = None if questions is None else Plan(questions, variants, split_names(args.protocols))
    prose = None if args.prose is None else prose_from_files(args.prose)
    texts = None if text is None else _text_plan(args, text, variants)
    loaded = load_model(args.model, trust_remote_code=args.trust_remote_code)
    if args.export is not None:
        return _export(args, loaded.tokenizer, questions or Questions(), prose)
    _present(args, _evaluated(args, loaded, variants, plan, texts, prose))
    return 0


def _prompts(args: argparse.Namespace) -> tuple[Questions | None, str | None]:
    """The tasks' prompts, and the file to predict."""
    lengths = tuple(map(parse_length, split_names(args.lengths)))
    if args.tasks is None and args.export is None and (args.text or args.lm_eval):
        return None, args.text
    names = tuple(TASKS) if args.tasks is None else split_names(args.tasks)
    return Questions(names, lengths, args.limit, args.seed), args.text


def _text_plan(args: argparse.Namespace, path: str, variants: tuple[Variant, ...]) -> TextPlan:
    return TextPlan(
        name=Path(path).name,
        text=read_text(path),
        variants=variants,
        lengths=tuple(map(parse_length, split_names(args.lengths))),
        continuation=args.continuation,
        limit=args.limit,
    )


def _evaluated(
    args: argparse.Namespace,
    loaded: LoadedModel,
    variants: tuple[Variant, ...],
    plan: Plan | None,
    texts: TextPlan | None,
    prose: Haystack | None,
) -> Results:
    header = header_of(loaded.model, name=args.model, seed=args.seed, prose=prose_digest(prose))
    stem = Path(args.model).name or args.model
    output = args.output or f"eval-{stem}-seed{args.seed}.jsonl"
    model, tokenizer = loaded.model, loaded.tokenizer
    records: tuple[Record, ...] = ()
    with ResultsFile(output, header) as file:
        try:
            if plan is not None:
                with step_progress("evaluating", "results") as report:
                    records += run_tasks(model, tokenizer, plan, file, prose=prose, progress=report)
            if texts is not None:
                with step_progress("predicting", "results") as report:
                    records += run_text(model, tokenizer, texts, file, progress=report)
            if args.lm_eval is not None:
                records += _harness(args, loaded, variants, file)
        except KeyboardInterrupt:
            line = f"interrupted; the same command goes on from {output}"
            Console(stderr=True).print(line, highlight=False, soft_wrap=True)
            raise
    return Results(header, records)


def _harness(
    args: argparse.Namespace,
    loaded: LoadedModel,
    variants: tuple[Variant, ...],
    file: ResultsFile,
) -> tuple[Record, ...]:
    with step_progress("lm_eval", "results") as report:
        return run_harness(
            loaded.model,
            loaded.tokenizer,
            split_names(args.lm_eval),
            variants,
            file,
            limit=args.limit,
            shots=args.shots,
            include=args.lm_eval_include,
            progress=report,
        )


def _present(args: argparse.Namespace, results: Results) -> None:
    """Print the summary, and write the files that were asked for."""
    write_reports(
        args,
        lambda origin: eval_page(results, origin),
        lambda: eval_markdown(results),
        lambda: eval_picture(results),
    )
    summary = summarise(results.records)
    if args.json:
        json.dump(dataclasses.asdict(summary), sys.stdout, indent=1)
        print()
        return
    console = Console(highlight=False)
    for title, table, caption in tables(summary):
        console.print(title, style="bold")
        print_table(table)
        console.print(caption, style="dim")
        console.print()


def _export(
    args: argparse.Namespace, tokenizer: Any, questions: Questions, prose: Haystack | None
) -> int:
    about = {"model": args.model, "seed": questions.seed, "prose": prose_digest(prose)}
    examples = questions.examples(tokenizer, prose)
    count = export_examples(Path(args.export), tokenizer, examples, about)
    print(f"{count} prompts in {args.export}")
    return 0
