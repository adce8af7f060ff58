"""What the server shows of itself: /v1/kv for programs, /metrics for Prometheus, /kv for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata, resources
from typing import Any

from kvkeep.server.metrics import Metrics
from kvkeep.server.monitor import Monitor, RequestView, Snapshot

STATUS, METRICS, PAGE = "/v1/kv", "/metrics", "/kv"
#: Files of the page, by path. They hold no data, and need no key.
_FILES = {
    PAGE: ("page.html", "text/html; charset=utf-8"),
    f"{PAGE}/page.js": ("page.js", "text/javascript; charset=utf-8"),
    f"{PAGE}/page.css": ("page.css", "text/css; charset=utf-8"),
    f"{PAGE}/icon.svg": ("icon.svg", "image/svg+xml"),
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_GUARDS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


@dataclass(frozen=True)
class Sight:
    """An answer to a GET."""

    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def is_seen(path: str) -> bool:
    """Whether a path (no query) is one of ours."""
    return path in (STATUS, METRICS) or path in _FILES


def is_open(path: str) -> bool:
    """Whether it is shown without the key."""
    return path in _FILES


def sight_of(path: str, accept: str, monitor: Monitor, metrics: Metrics) -> Sight:
    """The answer to one of our paths.

    Args:
        accept: the Accept header.
    """
    fresh = {**_GUARDS, "Cache-Control": "no-store"}
    if path == STATUS:
        body = json.dumps(status_of(monitor.snapshot())).encode()
        return Sight("application/json", body, fresh)
    if path == METRICS:
        body, content_type = metrics.page(accept)
        return Sight(content_type, body, fresh)
    name, content_type = _FILES[path]
    body = resources.files("kvkeep.server").joinpath("pages", name).read_bytes()
    headers = {**_GUARDS, "Cache-Control": "no-cache", "Content-Security-Policy": _POLICY}
    return Sight(content_type, body, headers)


def status_of(now: Snapshot) -> dict[str, Any]:
    """A snapshot as `GET /v1/kv` gives it: bytes, seconds and tokens, null for not known."""
    return {
        "object": "kv",
        "version": metadata.version("kvkeep"),
        "uptime_s": round(now.uptime_s, 3),
        "requests": {
            "live": [_request(view) for view in now.live],
            "recent": [_request(view) for view in now.recent],
            "states": dict(now.states),
        },
        "in_flight": dict(now.in_flight),
        "prompt_cache": {kind: asdict(stored) for kind, stored in now.prompt_cache.items()},
        "limits": dict(now.limits),
        "totals": asdict(now.totals),
    }


def _request(view: RequestView) -> dict[str, Any]:
    fields = asdict(view)
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
