"""Which KV heads retrieve and which stream: an offline pass over synthetic text."""

from kvkeep.attention import model_identity, require_profile_of
from kvkeep.heads.picture import require_matplotlib, require_png, save_picture, score_table
from kvkeep.heads.profiling import Progress, profile_heads
from kvkeep.heads.resuming import state_file_of
from kvkeep.heads.samples import KINDS, MakeSample, Recall, Sample, passkey_samples
from kvkeep.heads.settings import DEFAULT_STEPS, METHODS, STREAMING_FROM, ProfileSettings

__all__ = [
    "DEFAULT_STEPS",
    "KINDS",
    "METHODS",
    "STREAMING_FROM",
    "MakeSample",
    "ProfileSettings",
    "Progress",
    "Recall",
    "Sample",
    "model_identity",
    "passkey_samples",
    "profile_heads",
    "require_matplotlib",
    "require_png",
    "require_profile_of",
    "save_picture",
    "score_table",
    "state_file_of",
]
