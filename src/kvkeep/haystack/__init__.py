"""Synthetic long prompts, the same ones for a seed: needles to find, passkeys to recall."""

from kvkeep.haystack.filling import CountTokens, Hidden, filled, spread_depths
from kvkeep.haystack.needles import Needle, NeedlePrompt, needle_prompt, needle_prompts
from kvkeep.haystack.passkeys import PasskeyPrompt, passkey_prompt
from kvkeep.haystack.text import (
    Haystack,
    filler,
    library_prose,
    paragraphs_of,
    prose_from_files,
    prose_of,
)
from kvkeep.haystack.values import KINDS

__all__ = [
    "KINDS",
    "CountTokens",
    "Haystack",
    "Hidden",
    "Needle",
    "NeedlePrompt",
    "PasskeyPrompt",
    "filled",
    "filler",
    "library_prose",
    "needle_prompt",
    "needle_prompts",
    "paragraphs_of",
    "passkey_prompt",
    "prose_from_files",
    "prose_of",
    "spread_depths",
]
