"""From mlx-lm's prompt flags to token ids, step by step as `mlx_lm.generate` does it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from jinja2.exceptions import TemplateError

from kvkeep.cli.loading import LoadedModel
from kvkeep.errors import ConfigError

# Stands for the message when the prompt's end is wanted and its beginning lies in a saved cache.
_PLACEHOLDER = "<query>"
# Keywords of the chat template that the other flags decide.
_OWN_OPTIONS = {"tokenize", "add_generation_prompt", "continue_final_message"}


@dataclass(frozen=True)
class Prompt:
    """What the model is given.

    Attributes:
        tokens: T token ids.
        embeddings: [T, hidden], in place of the tokens' own where there are images, else None.
    """

    tokens: list[int]
    embeddings: mx.array | None = None


def build_prompt(args: argparse.Namespace, loaded: LoadedModel, *, is_suffix: bool) -> Prompt:
    """The prompt of `--prompt` ("-": stdin) in the chat template, unless that is off.

    Args:
        args: the parsed arguments of mlx-lm's generate parser.
        loaded: the model.
        is_suffix: a saved cache holds the conversation up to this message.

    Raises:
        ConfigError: the template refuses the messages, or the model takes no images.
    """
    tokenizer: Any = loaded.tokenizer
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if text == "-" else text
    templated = not args.ignore_chat_template and tokenizer.has_chat_template
    if templated:
        text = _in_template(args, tokenizer, text, is_suffix)
    if not args.image:
        return Prompt(tokenizer.encode(text, add_special_tokens=not templated))
    text, pixels = _with_images(loaded, text, args.image)
    tokens = tokenizer.encode(text, add_special_tokens=not templated)
    embeddings = loaded.model.embed_inputs(mx.array(tokens), pixel_values=pixels)
    mx.eval(embeddings)  # the prefill runs on a stream of its own
    return Prompt(tokens, embeddings)


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `--chat-template-config`.

    Raises:
        ConfigError: it is no JSON object.
    """
    if args.chat_template_config is None:
        return {}
    try:
        options = json.loads(args.chat_template_config)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "--chat-template-config is no JSON", expected="a JSON object", received=str(error)
        ) from error
    if not isinstance(options, dict) or _OWN_OPTIONS & set(options):
        raise ConfigError(
            "bad value for --chat-template-config",
            expected=f"a JSON object without {', '.join(sorted(_OWN_OPTIONS))}",
            received=args.chat_template_config,
        )
    return options


def _in_template(args: argparse.Namespace, tokenizer: Any, text: str, is_suffix: bool) -> str:
    options = template_options(args)
    messages = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    message = {"role": "user", "content": text}
    messages.append(message)
    prefilled = args.prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": args.prefill_response})

    def rendered() -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=prefilled,
            add_generation_prompt=not prefilled,
            **options,
        )

    try:
        whole = rendered()
        if not is_suffix:
            return whole
        message["content"] = _PLACEHOLDER
        return whole[rendered().index(_PLACEHOLDER) :]
    except TemplateError as error:
        raise ConfigError(
            "the chat template refuses the messages",
            received=str(error),
            remedy="See --system-prompt, --chat-template-config and --ignore-chat-template.",
        ) from error


def _with_images(loaded: LoadedModel, text: str, files: list[str]) -> tuple[str, Any]:
    from mlx_lm.processors import load_processor

    processor = load_processor(loaded.model, loaded.config)
    if processor is None:
        raise ConfigError(f"the model {loaded.name} does not take images (--image)")
    try:
        from PIL import Image  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise ConfigError(
            "--image needs the package Pillow", remedy="pip install pillow"
        ) from error
    try:
        images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    except OSError as error:
        raise ConfigError("an --image file cannot be read", received=str(error)) from error
    return processor(text, images=images)
