"""Policies by name. Adding one: its file, and its class in `POLICIES`."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvkeep.policies.base import Policy
from kvkeep.policies.cake import Cake
from kvkeep.policies.chunkkv import ChunkKV
from kvkeep.policies.compactor import Compactor
from kvkeep.policies.criticalkv import CriticalKV
from kvkeep.policies.cur import Cur
from kvkeep.policies.expected_attention import ExpectedAttention
from kvkeep.policies.keydiff import KeyDiff
from kvkeep.policies.knorm import Knorm
from kvkeep.policies.kvzip import KVzip
from kvkeep.policies.lagkv import LagKV
from kvkeep.policies.leverage import Leverage
from kvkeep.policies.lookahead import Lookahead
from kvkeep.policies.non_causal_attn import NonCausalAttention
from kvkeep.policies.observed_attention import ObservedAttention
from kvkeep.policies.random import Random
from kvkeep.policies.rkv import RKV
from kvkeep.policies.sink_recent import SinkRecent
from kvkeep.policies.snapkv import SnapKV
from kvkeep.policies.snapkv_d import SnapKVD
from kvkeep.policies.span import Span
from kvkeep.policies.tova import Tova
from kvkeep.spec import EvictionConfig, named, with_options

_CLASSES: tuple[type[Policy], ...] = (
    SnapKVD,
    SnapKV,
    Span,
    Lookahead,
    ChunkKV,
    Cake,
    CriticalKV,
    RKV,
    Tova,
    KVzip,
    ExpectedAttention,
    ObservedAttention,
    Compactor,
    Leverage,
    NonCausalAttention,
    LagKV,
    KeyDiff,
    Knorm,
    Cur,
    SinkRecent,
    Random,
)
POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in _CLASSES}

#: Settings of an EvictionConfig that are options of some policies: None leaves the policy's
#: default, and a policy without the option refuses what is set.
POLICY_OPTIONS = (
    "group",
    "window",
    "pool_kernel",
    "pooling",
    "chunk_size",
    "lag",
    "cross",
    "gamma",
    "mix",
    "n_future",
    "covariance",
    "value_norm",
    "epsilon",
    "stage_share",
    "draft_tokens",
)
# Settings that every config has: they reach the policies that have them as options.
_COMMON = ("seed", "sink_tokens")


def get_policy(name: str, **options: Any) -> Policy:
    """The policy of that name; an option of None keeps the policy's default.

    Raises:
        ConfigError: the name or an option is unknown to it.
    """
    return with_options("policy", named("eviction policy", name, POLICIES), name, options)


def policy_of(config: EvictionConfig) -> Policy:
    """The policy that a config names, with the options that it sets.

    Raises:
        ConfigError: the name or an option is unknown.
    """
    options = {name: getattr(config, name) for name in POLICY_OPTIONS}
    if (policy := POLICIES.get(config.policy)) is not None:
        own = {field.name for field in dataclasses.fields(policy)}
        options |= {name: getattr(config, name) for name in _COMMON if name in own}
    return get_policy(config.policy, **options)
