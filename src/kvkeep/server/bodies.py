"""What a request's body must be before mlx-lm reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from kvkeep.server.faults import RequestError

_LIMIT = 2**63  # of every number in a body: what lies beyond fits no array and no float
_SEEDS = 2**32


def read_body(raw: bytes) -> dict[str, Any]:
    """A body as the JSON object that it must be.

    Raises:
        RequestError: it is no JSON, no object, or holds a number without a meaning.
    """
    try:
        body = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        detail = str(error) or "nested too deeply"
        raise RequestError(f"the body is not JSON: {detail}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(
            "bad body", expected="a JSON object", received=type(body).__name__, code="invalid_json"
        )
    return body


def check_body(body: Mapping[str, Any]) -> None:
    """Refuse what mlx-lm would only notice in its generation thread, where it ends all requests.

    Raises:
        RequestError: `param` names the field.
    """
    for name, value in body.items():
        _check_numbers(name, value)
    stop = body.get("stop")
    words = [stop] if isinstance(stop, str) else stop
    if words is not None:
        texts = isinstance(words, list) and all(isinstance(w, str) and w for w in words)
        _require(texts, "stop", "a text or a list of texts, none empty")
    options = body.get("stream_options")
    _require(options is None or isinstance(options, dict), "stream_options", "an object")
    _require(isinstance(body.get("prompt", ""), str), "prompt", "a text")
    messages = body.get("messages", [])
    listed = isinstance(messages, list) and all(_is_message(m) for m in messages)
    _require(listed, "messages", "a list of objects, each with a role")
    tools = body.get("tools")
    listed = tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools))
    _require(listed, "tools", "a list of objects")
    seed = body.get("seed")
    if isinstance(seed, int):
        _require(0 <= seed < _SEEDS, "seed", f"a whole number from 0 to {_SEEDS - 1}")
    for name in ("model", "adapters", "draft_model"):
        value = body.get(name)
        _require(value is None or isinstance(value, str), name, "a text")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _check_numbers(name: str, value: Any) -> None:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, int | float):
            _require(abs(one) < _LIMIT, name, "numbers below 2**63")


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is no JSON", code="invalid_json")


def _require(holds: bool, name: str, expected: str) -> None:
    if not holds:
        raise RequestError(f"bad value for {name}", param=name, expected=expected)
