"""Requests that need no KV transfer and go to one engine unchanged.

An engine has paths that no client should reach: they put it to sleep, load adapters,
clear its caches or run code. So only listed paths are passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec

from kvwire.wire.control import DECODE_ERRORS
from kvwire_vllm.proxy.exchange import Refused

_READ: Final = ("GET", "HEAD")
_WRITE: Final = ("POST",)
PASSED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("/v1/models", "/version", "/tokenizer_info"), _READ),
    **dict.fromkeys(
        (
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/chat/completions/batch",
            "/cohere/v2/chat",
            "/generative_scoring",
            "/tokenize",
            "/detokenize",
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
        ),
        _WRITE,
    ),
}
"""Regular expressions of paths, each with its methods."""

# The path of an answer that an engine stores. Ids consist of characters that have no
# special meaning in URLs.
_KEPT_ANSWER: Final = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,128}(/cancel)?")

# Headers that concern one connection or that each hop writes anew; and cookies, which
# belong to the host that set them.
_OF_A_HOP: Final = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "upgrade",
        "transfer-encoding",
        "proxy-authenticate",
        "proxy-authorization",
        "cookie",
        "set-cookie",
    )
)
_OF_A_REQUEST: Final = _OF_A_HOP | {
    "host",
    "content-length",
    "expect",
    "accept-encoding",
    "http2-settings",
}
_OF_AN_ANSWER: Final = _OF_A_HOP | {"date", "server"}
# Control characters: some HTTP servers and clients accept them, others do not.
CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_QUERY: Final = re.compile(r"[!-~]*")


def methods_of(path: str) -> tuple[str, ...]:
    """Return the HTTP methods with which a path is passed on; () if it is not."""
    if (kept := _KEPT_ANSWER.fullmatch(path)) is not None:
        return _WRITE if kept[1] else _READ
    return PASSED.get(path, ())


def for_engine(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a client's headers for its engine."""
    passed = _passed(headers.items(), _OF_A_REQUEST, headers.get("connection", ""))
    for name, value in passed.items():
        if CONTROLS.search(value):
            why = f"the header {name} has a control character"
            raise Refused(HTTPStatus.BAD_REQUEST, why)
    return passed


def for_client(headers: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's headers for its client."""
    named = headers.get("connection", "")
    passed = _passed(headers.items(), _OF_AN_ANSWER, named)
    return {n: value for n, value in passed.items() if not CONTROLS.search(value)}


def query_of(query: str) -> str:
    """Return a query in its URL form, with the question mark."""
    if not _QUERY.fullmatch(query):
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            "the query has a character that is not allowed in URLs",
        )
    return f"?{query}" if query else ""


def is_form(headers: Mapping[str, str]) -> bool:
    """Return whether a body is a form, such as an upload of audio."""
    kind = headers.get("content-type", "").lower()
    return kind.startswith("multipart/form-data")


def body_of(content: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the body without references to engines, which only the proxy sets."""
    if not content or is_form(headers):
        return content
    # Engines would also accept UTF-16 and NaN. A body that cannot be parsed here is not
    # passed on.
    try:
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except DECODE_ERRORS as exc:
        why = f"the body is not the expected JSON: {exc}"
        raise Refused(HTTPStatus.BAD_REQUEST, why) from None
    if "kv_transfer_params" not in fields:
        return content
    del fields["kv_transfer_params"]
    return msgspec.json.encode(fields)


def _passed(
    headers: Iterable[tuple[str, str]], dropped: frozenset[str], connection: str
) -> dict[str, str]:
    out = dropped | {name.strip().lower() for name in connection.split(",")}
    passed: dict[str, str] = {}
    for name, value in headers:
        key = name.lower()
        if key not in out:
            passed[key] = f"{passed[key]}, {value}" if key in passed else value
    return passed
