"""The only room that touches mlx-lm's models: seam, observers, capture, prefill, replay."""

from kvkeep.attention.body import Body, body_of
from kvkeep.attention.capture import SnapKVAttentionCapture
from kvkeep.attention.draft import DraftStart, drafted
from kvkeep.attention.facts import ALONG, FAST, OTHER, OWN, SEAM, UNKNOWN, LeafFacts, ModelFacts
from kvkeep.attention.gathering import query_heads
from kvkeep.attention.identity import model_identity, require_profile_of
from kvkeep.attention.latent import latent_group
from kvkeep.attention.looking import batch_fault, facts_of, stand_in_fault
from kvkeep.attention.observe import WindowObserver, model_name, observing, require_visible
from kvkeep.attention.parts import LayerParts, find_parts
from kvkeep.attention.prefill import Observation, ProgressCallback, observed_prefill
from kvkeep.attention.reading import observed_reading
from kvkeep.attention.repeat import RepeatPrompt, repeated, require_repeatable
from kvkeep.attention.replay import replay_queries
from kvkeep.attention.rotary import Rotary
from kvkeep.attention.seam import install, installed, remove
from kvkeep.attention.undo import unchanged_on_error

__all__ = [
    "ALONG",
    "FAST",
    "OTHER",
    "OWN",
    "SEAM",
    "UNKNOWN",
    "Body",
    "DraftStart",
    "LayerParts",
    "LeafFacts",
    "ModelFacts",
    "Observation",
    "ProgressCallback",
    "RepeatPrompt",
    "Rotary",
    "SnapKVAttentionCapture",
    "WindowObserver",
    "batch_fault",
    "body_of",
    "drafted",
    "facts_of",
    "find_parts",
    "install",
    "installed",
    "latent_group",
    "model_identity",
    "model_name",
    "observed_prefill",
    "observed_reading",
    "observing",
    "query_heads",
    "remove",
    "repeated",
    "replay_queries",
    "require_profile_of",
    "require_repeatable",
    "require_visible",
    "stand_in_fault",
    "unchanged_on_error",
]
