"""Which models a request may name: the server's own, unless it was told to load others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm.server import ModelDescription

from kvkeep.server.faults import RequestError
from kvkeep.server.settings import ServerSettings

#: mlx-lm's name of what --model, --adapter-path and --draft-model gave.
DEFAULT = "default_model"
_ALLOW = "Start the server with --allow-model-paths to let requests name others."


def require_allowed(
    body: Mapping[str, Any], args: argparse.Namespace, settings: ServerSettings
) -> None:
    """Refuse models, adapters and draft models that the server was not started with.

    Raises:
        RequestError: 403 for a path, 404 for any other name; `param` names the field.
    """
    if settings.allow_model_paths:
        return
    allowed = {
        "model": _names(args.model, settings),
        "adapters": {None, args.adapter_path},
        "draft_model": {DEFAULT, args.draft_model},
    }
    for field, names in allowed.items():
        value = body.get(field, DEFAULT if field != "adapters" else None)
        if value not in names:
            _refuse(field, value)


def canonical(
    asked: ModelDescription, args: argparse.Namespace, settings: ServerSettings
) -> ModelDescription:
    """The server's own models under mlx-lm's name for them, so that they share one batch."""
    if asked.model not in _names(args.model, settings):
        return asked
    draft = DEFAULT if asked.draft in (DEFAULT, args.draft_model) else asked.draft
    if asked.adapter not in (None, args.adapter_path):
        return asked  # mlx-lm's own name would stand for the server's adapter
    no_adapter: Any = None
    return ModelDescription(model=DEFAULT, draft=draft, adapter=no_adapter)


def _names(model: str | None, settings: ServerSettings) -> set[str]:
    names = {DEFAULT}
    if model is not None:
        names |= {model, str(Path(model).resolve())}
        names |= {settings.model} if settings.model else set()
    return names


def _refuse(field: str, value: Any) -> None:
    text = str(value)
    if text.startswith((".", "~", "/", "\\")) or ".." in text:
        raise RequestError(
            f"{field} names a path that this server does not load from",
            param=field,
            status=403,
            code="path_not_allowed",
            remedy=_ALLOW,
        )
    raise RequestError(
        f"this server has no {field} of that name",
        param=field,
        status=404,
        code="model_not_found",
        received=text,
        remedy=_ALLOW,
    )
