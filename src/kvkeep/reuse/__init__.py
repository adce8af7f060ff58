"""Prompt caches that are kept: on disk in mlx-lm's own format, and in memory by prefix."""

from kvkeep.reuse.files import load_prompt_cache, save_prompt_cache
from kvkeep.reuse.register import register_caches
from kvkeep.reuse.store import Hit, PromptStore, StoredPrompt

__all__ = [
    "Hit",
    "PromptStore",
    "StoredPrompt",
    "load_prompt_cache",
    "register_caches",
    "save_prompt_cache",
]
