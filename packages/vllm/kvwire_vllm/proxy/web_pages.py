"""Requests that a web page makes a browser send to a server on its host.

A server that trusts its host must not trust every web page that a user of the host
opens.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def why_foreign(headers: Mapping[str, str], remedy: str) -> str:
    """Return why a page of another host may have sent a request; "" if none has.

    Args:
        headers: The request's headers, with names in small letters.
        remedy: The operator's remedy if the server has a public name.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    try:
        of_this_server = origin is None or urlsplit(origin).netloc == host
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        of_this_server = False
        name = ""
    if not of_this_server:
        return f"origin {origin}: no page of another host may ask for this"
    # The owner of a public name can point it to 127.0.0.1; public names contain a dot.
    if "." in name and not (name.endswith(".localhost") or _is_address(name)):
        return f"host {host}: ask 127.0.0.1, or {remedy}"
    return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
