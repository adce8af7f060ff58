"""One HTML file that asks nothing of the network and runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

# What could end a script element, or begin a comment in one, never stands in the data.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def render_page(
    title: str,
    body: str,
    *,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
) -> str:
    """A whole page in the shared theme.

    Its content security policy allows these styles and scripts by their hashes and nothing
    else: no request, no inline handler, no form.

    Args:
        title: any text.
        body: HTML of our own; texts in it went through `escaped`.
        styles: CSS, after the theme's.
        scripts: JavaScript, run in this order after the body was read.
        data: element id -> plain value, for scripts to read as JSON.
    """
    sheets = [asset("kvkeep.pages", "theme.css"), *styles]
    for name, texts in (("style", sheets), ("script", scripts)):
        assert not any(f"</{name}" in text.lower() for text in texts)
    islands = [
        f'<script type="application/json" id="{escaped(name)}">{_json(value)}</script>'
        for name, value in (data or {}).items()
    ]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(sheets, scripts)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="generator" content="kvkeep">',
        f"<title>{escaped(title)}</title>",
        *(f"<style>{text}</style>" for text in sheets),
        "</head>",
        "<body>",
        body.strip(),
        *islands,
        *(f"<script>{text}</script>" for text in scripts),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def escaped(text: object) -> str:
    """Text for an element's content or a quoted attribute; what UTF-8 lacks becomes "?"."""
    plain = str(text).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    return html.escape(plain, quote=True)


def asset(package: str, name: str) -> str:
    """The text of a file that is shipped in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON in ASCII that cannot leave its element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign, code in _UNSAFE.items():
        text = text.replace(sign, code)
    return text


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    allowed = {"style-src": styles, "script-src": scripts}
    rules = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    rules += [
        f"{name} {' '.join(map(_hash, texts)) or chr(39) + 'none' + chr(39)}"
        for name, texts in allowed.items()
    ]
    return "; ".join(rules)


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
