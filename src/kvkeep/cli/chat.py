"""`kvkeep chat`: mlx_lm.chat with a memory that is compacted as it grows."""

from __future__ import annotations

import argparse
import contextlib
import sys

import mlx.core as mx
from mlx_lm.chat import setup_arg_parser
from rich.console import Console
from rich.markup import escape

from kvkeep.cli.flags import EVICTION_OFF, add_eviction_flags, eviction_config, refuse_together
from kvkeep.cli.loading import load_model, mention_demo
from kvkeep.cli.progress import prompt_progress
from kvkeep.cli.report import before_and_after, nbytes, rows_kept
from kvkeep.cli.sampling import adapt_prefill_step, check_numbers, prefill_step, sampler_of
from kvkeep.conversation import Conversation
from kvkeep.errors import ConfigError, KvkeepError

_HELP = "q: quit   r: reset (forget everything)   s: stats   h: this help   Ctrl-C: stop an answer"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `chat`: mlx-lm's own flags and the eviction flags."""
    parser = subparsers.add_parser(
        "chat",
        help="talk over a cache that is compacted before each answer",
        description="Talk to a model. The flags of mlx_lm.chat mean what they mean there. Where"
        " stdin is no terminal, each line is a message. The rows of an answer are kept whole until"
        " the next message.",
        parents=[setup_arg_parser()],
        add_help=False,  # comes with the parent
    )
    add_eviction_flags(parser)
    adapt_prefill_step(parser)
    mention_demo(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until `q` or the end of stdin; exit status 0.

    Raises:
        KvkeepError: a flag or the model is at fault.
    """
    config = eviction_config(args)
    check_numbers(args)
    if config is not None and args.max_kv_size is not None:
        refuse_together(
            "--max-kv-size",
            f"--kv-eviction {config.policy}",
            f"Use --kv-budget instead. Pass --kv-eviction {EVICTION_OFF} with it.",
        )
    if (size := mx.distributed.init().size()) > 1:
        raise ConfigError("kvkeep chat runs as one process", received=f"{size} of them")
    mx.random.seed(args.seed)
    loaded = load_model(
        args.model, adapter_path=args.adapter_path, trust_remote_code=args.trust_remote_code
    )
    screen = Screen(interactive=sys.stdin.isatty())
    conversation = Conversation(
        loaded.model,
        loaded.tokenizer,
        config=config,
        system_prompt=args.system_prompt,
        max_kv_size=args.max_kv_size,
        on_restart=screen.note,
        max_tokens=args.max_tokens,
        sampler=sampler_of(args, loaded.tokenizer),
        prefill_step_size=prefill_step(args.prefill_step_size),
    )
    if screen.interactive:
        kept = "everything" if config is None else f"{config.policy}, {config.limit}"
        screen.note(f"{args.model}; keeps {kept}")
        screen.note(_HELP)
    _talk(conversation, screen)
    return 0


class Screen:
    """Answers go to stdout, everything else to stderr.

    Args:
        interactive: whether a person types.
    """

    def __init__(self, *, interactive: bool) -> None:
        self.interactive = interactive
        self._notes = Console(stderr=True, highlight=False)

    def ask(self) -> str | None:
        """The next message, or None at the end of stdin."""
        if not self.interactive:
            return sys.stdin.readline() or None
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and history in input()
        try:
            return input("> ")
        except EOFError:
            print()
            return None

    def note(self, text: str) -> None:
        """A dim line."""
        self._notes.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)

    def fault(self, error: KvkeepError) -> None:
        """A red line."""
        self._notes.print(f"[red]{escape(str(error))}[/red]", soft_wrap=True)


def _talk(conversation: Conversation, screen: Screen) -> None:
    while (line := screen.ask()) is not None:
        match line.strip():
            case "":
                continue
            case "q":
                break
            case "r":
                conversation.reset()
                screen.note("reset: everything is forgotten")
            case "h":
                screen.note(_HELP)
            case "s":
                _stats(conversation, screen)
            case message:
                _turn(conversation, screen, message)


def _turn(conversation: Conversation, screen: Screen, message: str) -> None:
    """One message and its answer; Ctrl-C stops the answer, and ends the program in a script."""
    try:
        with prompt_progress(shown=screen.interactive) as progress:
            answer = conversation.add_user(message, prompt_progress_callback=progress)
            with contextlib.closing(answer):
                for response in answer:
                    print(response.text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        if not screen.interactive:
            raise
        print()
        screen.note("stopped")
        return
    except KvkeepError as error:
        if not screen.interactive:
            raise
        screen.fault(error)
        return
    last, stats = conversation.last, conversation.stats
    if last is not None and screen.interactive:
        screen.note(
            f"{last.generation_tokens:,} tokens, {last.generation_tps:,.1f} tok/s; "
            f"{stats.rows:,.0f} rows for {stats.positions:,} tokens, {nbytes(stats.live_nbytes)}; "
            f"peak memory {nbytes(last.peak_memory * 1e9)}"
        )


def _stats(conversation: Conversation, screen: Screen) -> None:
    stats, kv = conversation.stats, conversation.kv
    share = 100 * stats.rows / max(stats.positions, 1)
    screen.note(f"messages      {stats.turns:,}")
    screen.note(f"tokens read   {stats.positions:,}")
    screen.note(f"rows held     {stats.rows:,.0f} per KV head ({share:.1f}%)")
    screen.note(
        f"KV cache      {nbytes(stats.live_nbytes)} live,"
        f" {nbytes(stats.allocated_nbytes)} allocated"
    )
    screen.note(f"compactions   {stats.compactions:,}")
    if kv is not None:
        screen.note(f"the last turn {rows_kept(kv)}; {before_and_after(kv)}")
