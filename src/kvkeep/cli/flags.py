"""The eviction flags, spelled the same in every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from kvkeep.allocation import ALLOCATIONS, allocation_of
from kvkeep.choosing import require_compatible
from kvkeep.errors import ConfigError
from kvkeep.generation import RECOMMENDED
from kvkeep.policies import POLICIES, policy_of
from kvkeep.spec import GROUPINGS, HEAD_SCALES, POOLINGS, STORES, EvictionConfig

EVICTION_OFF = "none"


def true_or_false(text: str) -> bool:
    """A flag's value that is `true` or `false`."""
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise ValueError(text) from None


# Flag without "--kv-", the setting it fills, its type and its help. %% is argparse's percent sign.
_FLAGS: tuple[tuple[str, str, Callable[[str], object], str], ...] = (
    (
        "budget",
        "budget",
        str,
        "what may stay: rows per KV head (2048), a share of the prompt (25%%) or bytes of the"
        " whole cache (512MB; KB and GB are decimal, KiB, MiB and GiB binary)",
    ),
    ("window", "window", int, "how many of the prompt's last tokens score the others"),
    ("sink-tokens", "sink_tokens", int, "first tokens of the prompt that always stay"),
    ("recent-tokens", "recent_tokens", int, "last tokens of the prompt that always stay"),
    ("min-tokens", "min_tokens", int, "prompts of at most this many tokens are kept whole"),
    ("allocation", "allocation", str, "how rows are dealt out to layers and heads"),
    ("store", "store", str, "how kept rows are stored; auto is what the policy scores"),
    ("pooling", "pooling", str, "how scores are pooled over neighbouring tokens"),
    ("pool-kernel", "pool_kernel", int, "odd width of that pooling, in tokens"),
    ("group", "group", str, "how the query heads that share a KV head are put together"),
    ("chunk-size", "chunk_size", int, "how many neighbouring tokens are scored as one"),
    ("lag", "lag", int, "how many tokens a partition of lagkv has"),
    ("cross", "cross", true_or_false, "whether lagkv compares values across partitions"),
    ("gamma", "gamma", float, "what cake multiplies the variance of attention by"),
    ("mix", "mix", float, "share of attention in rkv's score, between 0 and 1"),
    ("alpha", "alpha", float, "share of a head's even part that adaptive and global guarantee it"),
    ("head-scale", "head_scale", str, "what heads' scores are divided by before they compete"),
    ("beta", "beta", int, "how steep the pyramid is"),
    ("tau1", "tau1", float, "how little entropy counts in allocation cake"),
    ("tau2", "tau2", float, "how little variance counts in allocation cake"),
    ("heads", "head_profile", str, "head profile that allocation duo deals rows out by"),
    ("retrieval-share", "retrieval_share", float, "share of the heads that retrieve in duo"),
    ("max-groups", "max_groups", int, "lengths that heads of a ragged layer may have, at most"),
    ("n-future", "n_future", int, "how many positions ahead expected_attention looks"),
    ("covariance", "covariance", true_or_false, "whether it counts how queries spread"),
    ("value-norm", "value_norm", true_or_false, "whether it multiplies by the value's length"),
    ("epsilon", "epsilon", float, "what it and criticalkv add to attention before they multiply"),
    ("stage-share", "stage_share", float, "share that criticalkv fills by attention alone"),
    ("draft-tokens", "draft_tokens", int, "tokens of its answer that lookahead drafts"),
    ("seed", "seed", int, "of the policies that draw"),
    (
        "protect",
        "protect",
        str,
        'positions that are never evicted, as start:stop ranges ("0:512,900:910")',
    ),
)
_NAMES = {
    "allocation": sorted(ALLOCATIONS),
    "store": list(STORES),
    "pooling": list(POOLINGS),
    "group": list(GROUPINGS),
    "head_scale": list(HEAD_SCALES),
}
_METAVARS = {
    "budget": "BUDGET",
    "protect": "RANGES",
    "head_profile": "FILE",
    **dict.fromkeys(("cross", "covariance", "value_norm"), "true|false"),
    **dict.fromkeys(_NAMES, "NAME"),
}
_POLICYS_OWN = (
    "window", "pooling", "pool_kernel", "group", "chunk_size", "lag", "cross", "gamma", "mix",
    "n_future", "covariance", "value_norm", "epsilon", "stage_share", "draft_tokens",
)  # fmt: skip
_UNSET = {
    **dict.fromkeys(_POLICYS_OWN, "the policy's own"),
    "recent_tokens": "what the policy counts inside the budget",
    **dict.fromkeys(("alpha", "head_scale", "beta", "tau1", "tau2"), "the allocation's own"),
    "head_profile": "none",
    "retrieval_share": "as many heads as fit with all their rows",
    "protect": "none",
}


def add_eviction_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the --kv-* flags; one that is not given stays None in the arguments.

    Args:
        default: of --kv-eviction, where it is not the recommended policy.
    """
    policy = default or RECOMMENDED.policy
    group = parser.add_argument_group(
        "eviction", "Rows of the prompt's KV cache are evicted once, after the prompt was read."
    )
    group.add_argument(
        "--kv-eviction",
        metavar="POLICY",
        default=default,
        help=f"which rows matter: {', '.join(sorted(POLICIES))}; {EVICTION_OFF} keeps every row,"
        f" and the other flags of this group then do nothing (default: {policy})",
    )
    for flag, setting, kind, text in _FLAGS:
        value = getattr(RECOMMENDED, setting)
        shown = _UNSET.get(setting) if value in (None, ()) else str(value).replace("%", "%%")
        names = f": {', '.join(_NAMES[setting])}" if setting in _NAMES else ""
        group.add_argument(
            f"--kv-{flag}",
            dest=f"kv_{setting}",
            type=kind,
            metavar=_METAVARS.get(setting, "N"),
            help=f"{text}{names} (default: {shown})",
        )


def eviction_config(args: argparse.Namespace) -> EvictionConfig | None:
    """What the --kv-* flags ask for, over `kvkeep.generation.RECOMMENDED`; None is exact.

    Raises:
        ConfigError: a value is out of range, or a name is unknown (before a model is loaded).
    """
    if args.kv_eviction == EVICTION_OFF:
        return None
    settings = {setting: getattr(args, f"kv_{setting}") for _, setting, _, _ in _FLAGS}
    config = EvictionConfig.parse({"policy": args.kv_eviction, **settings}, RECOMMENDED)
    require_compatible(config, policy_of(config), allocation_of(config))
    return config


def refuse_together(first: str, second: str, remedy: str) -> NoReturn:
    """Refuse two flags that exclude each other.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"{first} and {second} exclude each other", remedy=remedy)
