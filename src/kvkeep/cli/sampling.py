"""From mlx-lm's numbers to its sampler, checked before a model is run."""

from __future__ import annotations

import argparse
import math
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_PREFILL_STEP_SIZE
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvkeep.errors import ConfigError

#: Tokens read at a time on a CPU, unless --prefill-step-size says else.
CPU_PREFILL_STEP = 256

# mlx-lm checks these while it samples, long after the prompt was read.
_RANGES: dict[str, tuple[float, float, str]] = {
    "temp": (0, math.inf, "a temperature >= 0"),
    "top_p": (0, 1, "a probability"),
    "min_p": (0, 1, "a probability"),
    "top_k": (0, math.inf, "a whole number >= 0"),
    "xtc_probability": (0, 1, "a probability"),
    "xtc_threshold": (0, 0.5, "a probability up to 0.5"),
    "min_tokens_to_keep": (1, math.inf, "a whole number >= 1"),
    "seed": (0, 2**64 - 1, "a whole number >= 0"),
    "prefill_step_size": (1, math.inf, "a number of tokens >= 1"),
    "max_kv_size": (1, math.inf, "a number of rows >= 1"),
    "num_draft_tokens": (1, math.inf, "a number of tokens >= 1"),
    "quantized_kv_start": (0, math.inf, "a number of tokens >= 0"),
}
_CHOICES = {"kv_bits": (2, 3, 4, 5, 6, 8), "kv_group_size": (16, 32, 64, 128)}


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that mlx-lm would trip over later; flags a command lacks are left out.

    Raises:
        ConfigError: names the flag.
    """
    values = {name: value for name, value in vars(args).items() if value is not None}
    for name, (least, most, expected) in _RANGES.items():
        if name in values and not least <= values[name] <= most:
            raise _bad(name, expected, values[name])
    for name, choices in _CHOICES.items():
        if name in values and values[name] not in choices:
            raise _bad(name, f"one of {', '.join(map(str, choices))}", values[name])
    if values.get("max_tokens") == 0:
        raise _bad("max_tokens", "at least 1, or -1 for no limit", 0)


def adapt_prefill_step(parser: argparse.ArgumentParser) -> None:
    """Let mlx-lm's --prefill-step-size stay None unless it is given (see `prefill_step`)."""
    action = next(a for a in parser._actions if a.dest == "prefill_step_size")
    action.default = None
    action.help = (
        "Number of prompt tokens to process at a time. Smaller values lower peak memory during"
        f" prefill (default: {DEFAULT_PREFILL_STEP_SIZE}, on a CPU {CPU_PREFILL_STEP})"
    )


def prefill_step(given: int | None) -> int:
    """Tokens read at a time: as asked, else mlx-lm's number, and fewer on a CPU.

    A CPU computes the masked half of a chunk's attention too: shorter chunks are faster
    there, take less memory, and show how far the prompt is read.
    """
    if given is not None:
        return given
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return CPU_PREFILL_STEP if on_cpu else DEFAULT_PREFILL_STEP_SIZE


def sampler_of(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> Any:
    """mlx-lm's sampler for the flags that the command has."""
    given = vars(args)
    names = ("min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")
    text_tokenizer: Any = tokenizer
    return make_sampler(
        args.temp,
        args.top_p,
        xtc_special_tokens=text_tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
        **{name: given[name] for name in names if name in given},
    )


def _bad(name: str, expected: str, received: object) -> ConfigError:
    flag = "--" + name.replace("_", "-")
    return ConfigError(f"bad value for {flag}", expected=expected, received=received)
