"""The page of ``kvwire top`` for browsers, for any HTTP server.

The files are the same for everybody and contain nothing about the process. They display
a :class:`~kvwire.observe.view.TopView`, which the page fetches from :data:`DATA`. The
server that serves it decides who may read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec

from kvwire.observe.view import TopView

PAGE: Final = "/top"
"""The path of the page."""
DATA: Final = "/top.json"
"""The path of the data that it displays."""

_FILES: Final = {
    PAGE: ("top.html", "text/html"),
    "/top.css": ("top.css", "text/css"),
    "/top.js": ("top.js", "text/javascript"),
}
PATHS: Final = (*_FILES, DATA)
"""All paths of the page."""

_POLICY: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # A browser that supports this never parses a text as markup.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_SAFE: Final = {
    "content-security-policy": "; ".join(_POLICY),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@cache
def page_file(path: str) -> tuple[Mapping[str, str], bytes] | None:
    """Return the headers and the content of one of the page's files, or None."""
    if path not in _FILES:
        return None
    name, kind = _FILES[path]
    headers = {"content-type": f"{kind}; charset=utf-8", **_SAFE}
    return headers, (files(__name__) / name).read_bytes()


def page_data(view: TopView | Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
    """Return the headers and the content of the page's data, or of an error."""
    headers = {"content-type": "application/json", **_SAFE}
    return headers, msgspec.json.encode(view)
