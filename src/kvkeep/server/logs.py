"""One log line for each request that has ended, as key=value or as JSON. No text of a prompt."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from kvkeep.server.monitor import Monitor, RequestView

_log = logging.getLogger("kvkeep.server")
_FIELDS = "kvkeep_fields"  # where a record carries them


def log_requests(monitor: Monitor) -> None:
    """Write a line for each request from now on."""
    monitor.listeners.append(_write)


def write_json() -> None:
    """Turn every line of the process's log on stderr into a JSON object."""
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:  # what logging.basicConfig made
            handler.setFormatter(JsonFormatter())


def fields_of(view: RequestView) -> dict[str, Any]:
    """What the line of a request says, in its order. None is not known."""
    return {
        "id": view.id,
        "endpoint": view.endpoint,
        "status": view.status,
        "reason": view.reason,
        "policy": view.policy,
        "budget": view.budget,
        "prompt_tokens": view.prompt_tokens,
        "reused": view.reused_tokens,
        "retained": view.retained_tokens,
        "exact_bytes": view.exact_bytes,
        "compact_bytes": view.compact_bytes,
        "queue_ms": _ms(view.queue_s),
        "prefill_ms": _ms(view.prefill_s),
        "compact_ms": _ms(view.compact_s),
        "generated": view.generated,
        "tok_s": None if view.tokens_per_s is None else round(view.tokens_per_s, 2),
        "ms": _ms(view.age_s),
    }


def logfmt(fields: dict[str, Any]) -> str:
    """Fields as key=value, those that are None left out; quoted like JSON where it must be."""
    pairs = ((name, value) for name, value in fields.items() if value is not None)
    return " ".join(f"{name}={_spelled(value)}" for name, value in pairs)


class JsonFormatter(logging.Formatter):
    """A record as a JSON object on one line; the fields of a request stand beside its time."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, _FIELDS, None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _write(view: RequestView) -> None:
    fields = fields_of(view)
    _log.info("%s", logfmt(fields), extra={_FIELDS: fields})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _spelled(value: object) -> str:
    text = str(value)
    plain = text and all(c.isascii() and c.isprintable() and c not in ' ="\\' for c in text)
    return text if plain else json.dumps(text)
