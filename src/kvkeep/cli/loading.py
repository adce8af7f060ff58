"""From --model to a loaded model, with one clear line where that fails."""

from __future__ import annotations

import argparse
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_lm
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvkeep.demo_model import DEMO_NAME, resolve_model
from kvkeep.errors import ConfigError, KvkeepError

_EXPECTED = f'a model folder, a Hugging Face repository, or "{DEMO_NAME}"'


@dataclass(frozen=True)
class LoadedModel:
    """A model as `mlx_lm.load` gives it.

    Attributes:
        name: as the user spelled it.
        config: the model's config.json.
    """

    name: str
    model: Any
    tokenizer: TokenizerWrapper
    config: dict[str, Any]


def load_model(
    name: str,
    *,
    flag: str = "--model",
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
) -> LoadedModel:
    """Load a model folder, a hub repository or the demo model.

    Args:
        name: what the user gave.
        flag: where; named in errors.
        adapter_path, trust_remote_code, tokenizer_config, model_config: as in `mlx_lm.load`.

    Raises:
        ConfigError: there is no such model, the hub cannot be reached, or it does not load.
        DemoModelError: the demo model cannot be fetched.
    """
    place = resolve_model(name)
    if is_path(place) and not Path(place).is_dir():
        raise ConfigError(
            f"{flag} {name}: there is no such folder", expected=_EXPECTED, received=name
        )
    if adapter_path is not None and not Path(adapter_path).exists():
        raise ConfigError(
            f"--adapter-path {adapter_path}: there is no such folder",
            expected="a folder with adapters.safetensors and adapter_config.json",
        )
    try:
        loaded = mlx_lm.load(
            place,
            adapter_path=adapter_path,
            tokenizer_config={**(tokenizer_config or {}), "trust_remote_code": trust_remote_code},
            model_config=model_config,
            return_config=True,
            trust_remote_code=trust_remote_code,
        )
    except KvkeepError:
        raise
    except Exception as error:  # whatever mlx-lm, transformers or the hub object to
        raise _explained(flag, name, place, error) from error
    model, tokenizer, config = loaded  # type: ignore[misc]  # three, as return_config asks
    return LoadedModel(name, model, tokenizer, config)


def mention_demo(parser: argparse.ArgumentParser) -> None:
    """Say in the help of mlx-lm's --model that there is a demo model."""
    action = next(a for a in parser._actions if a.dest == "model")
    action.help = f'{action.help} "{DEMO_NAME}" is a small real model, fetched on first use.'


def is_path(place: str) -> bool:
    """Whether a name is a path and cannot be a hub repository ("name" or "owner/name")."""
    return place.startswith((".", "~", os.sep)) or place.count("/") > 1 or place.endswith("/")


def _explained(flag: str, name: str, place: str, error: Exception) -> ConfigError:
    detail = textwrap.shorten(str(error).removeprefix("Got: "), 300, placeholder=" …")
    detail = detail or type(error).__name__
    if Path(place).exists():
        return ConfigError(f"{flag} {name} does not load", received=detail)
    if isinstance(error, HFValidationError):
        return ConfigError(f"{flag} {name}: there is no such folder", expected=_EXPECTED)
    hub = f"{flag} {name} is no folder here, and"
    if isinstance(error, GatedRepoError):
        return ConfigError(f"{hub} its Hugging Face repository asks for access", received=detail)
    if isinstance(error, LocalEntryNotFoundError):
        return ConfigError(
            f"{hub} the Hugging Face hub cannot be asked for it",
            received=detail,
            remedy="Check the name and the network, or give the path of a model folder.",
        )
    if isinstance(error, HfHubHTTPError):
        return ConfigError(f"{hub} the Hugging Face hub does not give it", received=detail)
    return ConfigError(f"{hub} loading it from the Hugging Face hub failed", received=detail)
