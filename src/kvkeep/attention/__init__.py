"""The only room that touches mlx-lm's models: seam, observers, capture, prefill, replay."""

from kvkeep.attention.capture import SnapKVAttentionCapture
from kvkeep.attention.observe import WindowObserver, model_name, observing, require_visible
from kvkeep.attention.prefill import Observation, ProgressCallback, observed_prefill
from kvkeep.attention.replay import replay_queries
from kvkeep.attention.seam import install, installed, remove
from kvkeep.attention.undo import unchanged_on_error

__all__ = [
    "Observation",
    "ProgressCallback",
    "SnapKVAttentionCapture",
    "WindowObserver",
    "install",
    "installed",
    "model_name",
    "observed_prefill",
    "observing",
    "remove",
    "replay_queries",
    "require_visible",
    "unchanged_on_error",
]
