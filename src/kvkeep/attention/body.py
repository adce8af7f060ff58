"""A model without its LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from kvkeep.attention.observe import model_name
from kvkeep.errors import UnsupportedModelError

#: (tokens [1, n], cache=list) -> last hidden states [1, n, hidden], what the LM head is given.
Body = Callable[..., mx.array]


def body_of(model: Any) -> Body:
    """The part of an mlx-lm model that ends before the LM head.

    Raises:
        UnsupportedModelError: the model keeps it elsewhere than in `model`.
    """
    language = getattr(model, "language_model", model)  # models that also see images
    body = getattr(language, "model", None)
    if not callable(body):
        raise UnsupportedModelError(
            f"model {model_name(model)!r} does not show its last hidden states",
            expected="a model that holds the part before its LM head as `model`",
            received=f"none in {type(language).__name__}",
            remedy="Use a profile method that does not need them, such as 'recall'.",
        )
    return cast(Body, body)
