"""The command `kvkeep`: subcommands, and faults told in one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from kvkeep import __version__
from kvkeep.cli import bench, chat, eval, generate, heads, inspect_prompt, model, policies, serve
from kvkeep.errors import KvkeepError

#: In the order of `kvkeep --help`.
COMMANDS = (generate, chat, serve, inspect_prompt, eval, bench, policies, heads, model)

USER_FAULT, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """A parser whose faults look like all others; the long usage stays in --help."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        print_fault(f"{message} (see {self.prog} --help)")
        self.exit(USER_FAULT)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each leaves its function in the arguments as `run`."""
    parser = Parser(
        prog="kvkeep",
        description="Evict the KV-cache rows that are hardly read again, decode against the rest.",
        epilog="KVKEEP_DEBUG=1 shows where an error came from.",
    )
    parser.add_argument("--version", action="version", version=f"kvkeep {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 2 for a user's fault, 130 after Ctrl-C.
    """
    parser = build_parser()
    args, others = parser.parse_known_args(argv)
    if others and "mlx_flags" not in args:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    args.mlx_flags = others
    args.argv = list(sys.argv[1:] if argv is None else argv)
    if "run" not in args:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except KvkeepError as error:
        if _debugging():
            traceback.print_exc()
        print_fault(str(error))
        return USER_FAULT
    except KeyboardInterrupt:
        if _debugging():
            traceback.print_exc()
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; the interpreter's last flush must not complain.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def print_fault(message: str) -> None:
    """One line on stderr, red on a terminal."""
    line = " ".join(message.split())
    Console(stderr=True).print(
        Text(f"kvkeep: error: {line}", style="red"), soft_wrap=True, highlight=False
    )


def _debugging() -> bool:
    return os.environ.get("KVKEEP_DEBUG", "") not in ("", "0")
