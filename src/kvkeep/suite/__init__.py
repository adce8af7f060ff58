"""Compare what policies keep, on real caches and without a decode loop."""

from kvkeep.suite.reading import copy_cache, dense_kv, exact_layers
from kvkeep.suite.scoring import attention_window_scores
from kvkeep.suite.selecting import SelectionInfo, select_cache, select_positions

__all__ = [
    "SelectionInfo",
    "attention_window_scores",
    "copy_cache",
    "dense_kv",
    "exact_layers",
    "select_cache",
    "select_positions",
]
