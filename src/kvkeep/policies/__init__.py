"""Which rows matter: pure scores, one policy a file."""

from kvkeep.policies.accumulate import Accumulator, Chunk, Replayed
from kvkeep.policies.base import Policy, check_options
from kvkeep.policies.cake import Cake
from kvkeep.policies.chunkkv import ChunkKV
from kvkeep.policies.registry import POLICIES, POLICY_OPTIONS, get_policy, policy_of
from kvkeep.policies.rkv import RKV
from kvkeep.policies.snapkv import SnapKV
from kvkeep.policies.snapkv_d import SnapKVD
from kvkeep.policies.window import (
    pooled,
    window_attention,
    window_cubes,
    window_mass,
    window_moments,
    window_shape,
)

__all__ = [
    "POLICIES",
    "POLICY_OPTIONS",
    "RKV",
    "Accumulator",
    "Cake",
    "Chunk",
    "ChunkKV",
    "Policy",
    "Replayed",
    "SnapKV",
    "SnapKVD",
    "check_options",
    "get_policy",
    "policy_of",
    "pooled",
    "window_attention",
    "window_cubes",
    "window_mass",
    "window_moments",
    "window_shape",
]
