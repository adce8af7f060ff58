"""Prompt caches on disk: mlx-lm's own format, with kvkeep's caches in it."""

from kvkeep.reuse.files import load_prompt_cache, save_prompt_cache
from kvkeep.reuse.register import register_caches

__all__ = ["load_prompt_cache", "register_caches", "save_prompt_cache"]
