"""`kvkeep serve`: mlx_lm.server with eviction under continuous batching."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from kvkeep.cli.flags import EVICTION_OFF, add_eviction_flags, eviction_config
from kvkeep.cli.loading import is_path, mention_demo
from kvkeep.demo_model import resolve_model
from kvkeep.errors import ConfigError
from kvkeep.generation import SERVED
from kvkeep.server import ServerSettings, memory_bytes, serve

_KEY = "KVKEEP_API_KEY"
_PROTECT_SYSTEM = "system"
_REUSE = ("exact", "compact")
_SCARCE = ("refuse", "shrink")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve`: our flags; those that it does not know go to mlx_lm.server's parser."""
    parser = subparsers.add_parser(
        "serve",
        help="answer OpenAI-style requests over compact caches",
        description="An OpenAI-compatible server. Every flag of mlx_lm.server is taken and means"
        " what it means there (see mlx_lm.server --help).",
        allow_abbrev=False,  # what is no flag of ours is mlx-lm's
    )
    parser.add_argument("--model", help="the model folder or repository to serve.")
    add_eviction_flags(parser, default=EVICTION_OFF)
    group = parser.add_argument_group("prompt cache")
    group.add_argument(
        "--kv-reuse",
        choices=_REUSE,
        default=_REUSE[0],
        help="which caches serve prompts that begin alike: exact ones only, so that each prompt's"
        " rows are chosen from all of it; or compact ones, too, which cost a fraction of the"
        " memory and need no choosing again (default: %(default)s)",
    )
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="what the caches of live requests and the prompt cache may take together: bytes"
        " (8GB, 512MiB) or a share of the machine's memory (40%%). A request waits until there"
        " is room, or is refused with 503; one that can never fit is refused with 413"
        " (default: no bound)",
    )
    group.add_argument(
        "--kv-memory-policy",
        choices=_SCARCE,
        default=_SCARCE[0],
        help="before a request is refused for want of memory: refuse it, or shrink its budget"
        " and say so in usage.kv (default: %(default)s)",
    )
    group.add_argument(
        "--kv-queue-seconds",
        type=float,
        default=ServerSettings.kv_queue_seconds,
        metavar="S",
        help="how long a request waits for memory (default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=ServerSettings.drain_seconds,
        metavar="S",
        help="how long live requests may go on after SIGTERM (default: %(default)s)",
    )
    group = parser.add_argument_group("doors")
    group.add_argument(
        "--api-key",
        default=os.environ.get(_KEY),
        help=f"what clients must send as their key (default: ${_KEY}, or no key)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=ServerSettings.max_body_bytes,
        metavar="N",
        help="longest request body (default: %(default)s)",
    )
    group.add_argument(
        "--allow-model-paths",
        action="store_true",
        help="let requests name any model or adapter, which is then loaded or downloaded",
    )
    parser.add_argument(
        "--log-json",
        action="store_true",
        help="write every line of the log as a JSON object",
    )
    mention_demo(parser)
    parser.set_defaults(run=run, mlx_flags=[])


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; exit status 0.

    Raises:
        KvkeepError: a flag or the model is at fault.
    """
    if args.max_body_bytes < 1:
        raise ConfigError(
            "bad value for --max-body-bytes", expected="at least 1", received=args.max_body_bytes
        )
    for flag in ("kv_queue_seconds", "drain_seconds"):
        if not 0 <= (seconds := getattr(args, flag)) < threading.TIMEOUT_MAX:
            raise ConfigError(
                f"bad value for --{flag.replace('_', '-')}",
                expected="seconds, 0 or more",
                received=seconds,
            )
    settings = settings_of(args)
    flags = list(args.mlx_flags)
    if args.model is not None:
        place = resolve_model(args.model)
        if is_path(place) and not Path(place).is_dir():
            raise ConfigError(f"--model {args.model}: there is no such folder")
        flags += ["--model", place]
    serve(flags, settings)
    return 0


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """What our flags ask for.

    Raises:
        ConfigError: a value is out of range, or a name is unknown.
    """
    system = args.kv_protect == _PROTECT_SYSTEM
    named = {**vars(args)}
    if system:
        named["kv_protect"] = None
    evicting = args.kv_eviction != EVICTION_OFF
    if not evicting:  # what requests that switch it on start from
        named["kv_eviction"] = SERVED.policy
    config = eviction_config(argparse.Namespace(**named))
    assert config is not None
    return ServerSettings(
        config=config,
        evicting=evicting,
        protect_system=system,
        model=args.model,
        allow_model_paths=args.allow_model_paths,
        api_key=args.api_key or None,
        max_body_bytes=args.max_body_bytes,
        keep_compact=args.kv_reuse == _REUSE[1],
        kv_memory=None if args.kv_memory is None else memory_bytes(args.kv_memory),
        kv_memory_shrink=args.kv_memory_policy == _SCARCE[1],
        kv_queue_seconds=args.kv_queue_seconds,
        drain_seconds=args.drain_seconds,
        log_json=args.log_json,
    )
