"""`kvkeep heads profile` and `kvkeep heads show`: which heads retrieve, which stream."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep import heads
from kvkeep.cli.loading import load_model, mention_demo
from kvkeep.cli.progress import step_progress
from kvkeep.cli.report import print_table
from kvkeep.errors import ConfigError
from kvkeep.spec import HeadProfile, load_head_profile

_SHADES = " ·░▒▓█"
_LISTED = 12


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `heads` with its subcommands; `run` is left in the parsed arguments as `run`."""
    parser = subparsers.add_parser(
        "heads", help="find out which KV heads retrieve and which stream (DuoAttention)"
    )
    commands = parser.add_subparsers(dest="heads_command", required=True, metavar="COMMAND")
    profile = commands.add_parser(
        "profile",
        help="profile a model's heads once, into a small file",
        description="Score every KV head by how much it reads beyond the first and the latest rows"
        " while passkeys that are hidden in a text are recalled. The model is not changed."
        " An interrupted run goes on where it stopped when the same command is given again.",
    )
    _add_profile_flags(profile)
    show = commands.add_parser("show", help="show what a profile file says")
    show.add_argument("file", metavar="FILE", help="file that `kvkeep heads profile` wrote")
    for command in (profile, show):
        command.add_argument(
            "--picture",
            metavar="FILE.png",
            help="draw the scores, layers by KV heads (needs the extra 'eval')",
        )
    parser.set_defaults(run=run)


def _add_profile_flags(parser: argparse.ArgumentParser) -> None:
    plain = heads.ProfileSettings()
    steps = ", ".join(f"{count} for {name}" for name, count in heads.DEFAULT_STEPS.items())
    methods = "; ".join(f"{name}: {text}" for name, text in heads.METHODS.items())
    parser.add_argument("--model", required=True, help="The model: a folder or a hub repository.")
    mention_demo(parser)
    parser.add_argument(
        "--output", required=True, metavar="FILE.json", help="where the profile goes"
    )
    parser.add_argument(
        "--method",
        choices=list(heads.METHODS),
        default=plain.method,
        help=f"{methods} (default: {plain.method})",
    )
    parser.add_argument("--steps", type=int, help=f"steps, one sample each (default: {steps})")
    for name, kind, text in (
        (
            "texts",
            int,
            "different samples, gone through in turn and held in memory; 0: a new one for each"
            " step, which costs several times as much (optimise)",
        ),
        ("length", int, "tokens per sample, at most"),
        ("passkeys", int, "passkeys per sample"),
        ("words", int, "words or digits per passkey"),
        ("sinks", int, "rows at the start that a streaming head keeps"),
        ("recent", int, "latest rows that a streaming head keeps"),
        ("seed", int, "seed of the samples"),
        ("lr", float, "peak learning rate of the gates (optimise)"),
        ("reg", float, "weight of the mean gate in the loss (optimise)"),
    ):
        default = getattr(plain, name)
        parser.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--kind",
        choices=heads.KINDS,
        default=plain.kind,
        help=f"what passkeys are made of (default: {plain.kind}, in turn)",
    )
    parser.add_argument(
        "--streaming-from",
        choices=heads.STREAMING_FROM,
        default=plain.streaming_from,
        help="gate what comes after the text, as eviction after the prefill does, or every token,"
        " as the paper does, at several times the cost (optimise; default:"
        f" {plain.streaming_from})",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="as in mlx_lm")


def run(args: argparse.Namespace) -> int:
    """Run the parsed subcommand; exit status 0.

    Raises:
        ConfigError: a flag is out of range, or matplotlib is missing where a picture is asked for.
        HeadProfileError: the heads cannot be profiled, or a file cannot be read or written.
    """
    if args.picture is not None:
        heads.require_png(Path(args.picture))
        heads.require_matplotlib()
    profile = _profile(args) if args.heads_command == "profile" else load_head_profile(args.file)
    if args.picture is not None:
        heads.save_picture(profile, args.picture)
    print_table(summary_table(profile))
    Console(highlight=False).print(heat_map(profile))
    return 0


def _profile(args: argparse.Namespace) -> HeadProfile:
    names = heads.ProfileSettings.__dataclass_fields__
    settings = heads.ProfileSettings(**{name: getattr(args, name) for name in names})
    if Path(args.output).is_dir():
        raise ConfigError(
            "--output is a folder", expected="the name of a file", received=args.output
        )
    loaded = load_model(args.model, trust_remote_code=args.trust_remote_code)
    with step_progress("profiling heads", "steps") as report:
        return heads.profile_heads(
            loaded.model,
            loaded.tokenizer,
            settings,
            output=args.output,
            name=args.model,
            progress=report,
        )


def summary_table(profile: HeadProfile) -> Table:
    """What a profile was made of and with, and its highest scores."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    options = ", ".join(f"{name}={value}" for name, value in profile.options.items())
    versions = ", ".join(f"{name} {value}" for name, value in profile.versions.items())
    ranked = sorted(
        (
            (score, layer, head)
            for layer, row in profile.scores.items()
            for head, score in enumerate(row)
        ),
        key=lambda entry: (-entry[0], *entry[1:]),
    )
    shown = ", ".join(f"{layer}.{head} {score:.2f}" for score, layer, head in ranked[:_LISTED])
    for name, value in (
        ("model", f"{profile.model_name} ({profile.model})"),
        ("method", f"{profile.method}, {profile.steps:,} steps, seed {profile.seed}"),
        ("options", options),
        ("streaming heads keep", f"{profile.sinks} sinks + {profile.recent} recent rows"),
        ("heads", f"{len(profile.scores)} layers x {profile.kv_heads} KV heads"),
        ("highest (layer.head)", shown),
        ("made with", versions),
    ):
        table.add_row(name, Text(value))
    return table


def heat_map(profile: HeadProfile) -> Text:
    """One line per KV head, one shade per layer, the darkest for the highest score."""
    scores = heads.score_table(profile)
    top = max(float(scores.max()), 1e-12)
    width = 2 if 2 * len(scores) <= 68 else 1
    marks = "".join(f"{layer:<{5 * width}}" for layer in list(profile.scores)[::5])
    lines = [f"layer   {marks[: width * len(scores) + 4].rstrip()}"]
    for head in range(profile.kv_heads):
        levels = [round(max(float(s), 0.0) / top * (len(_SHADES) - 1)) for s in scores[:, head]]
        lines.append(f"head {head:<3}" + "".join(_SHADES[level] * width for level in levels))
    lines.append(f"scale   {_SHADES!r} = 0 … {top:.2f}")
    return Text("\n".join(lines), no_wrap=True)
