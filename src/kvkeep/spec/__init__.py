"""Frozen values that travel between the rooms."""

from kvkeep.spec.budget import Budget
from kvkeep.spec.checks import checked_count
from kvkeep.spec.config import (
    GROUPINGS,
    HEAD_SCALES,
    POOLINGS,
    STORES,
    EvictionConfig,
    parse_ranges,
)
from kvkeep.spec.head_profile import HeadProfile, load_head_profile
from kvkeep.spec.naming import named, with_options
from kvkeep.spec.results import (
    CompactionTimes,
    HeadPartitionedEvictionResult,
    SnapKVEvictionResult,
)
from kvkeep.spec.view import (
    Drafted,
    LayerSelection,
    LayerView,
    OutputWeights,
    Rope,
    Selection,
    checked_positions,
)

__all__ = [
    "GROUPINGS",
    "HEAD_SCALES",
    "POOLINGS",
    "STORES",
    "Budget",
    "CompactionTimes",
    "Drafted",
    "EvictionConfig",
    "HeadPartitionedEvictionResult",
    "HeadProfile",
    "LayerSelection",
    "LayerView",
    "OutputWeights",
    "Rope",
    "Selection",
    "SnapKVEvictionResult",
    "checked_count",
    "checked_positions",
    "load_head_profile",
    "named",
    "parse_ranges",
    "with_options",
]
