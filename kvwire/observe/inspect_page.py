"""The page of ``kvwire top`` for this user's processes, protected by its own key.

These processes' sockets are only for their user, but every user of the host can connect
to a port. So the page needs its link, which contains a random key.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from kvwire import UsageError
from kvwire.errors import KVWireError
from kvwire.observe.inspect import snapshots, sockets
from kvwire.observe.listening import HttpReply
from kvwire.observe.page import DATA, PAGE, page_data, page_file
from kvwire.observe.view import RateMemory, process_view
from kvwire.types import Address, is_loopback

_KEY_BYTES = 32


class InspectPage:
    """Serves a browser the state of the processes whose sockets are in a folder.

    Attributes:
        key: The key that a reader must present, in hexadecimal; new for each object.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._rates = RateMemory()
        self.key: str = secrets.token_hex(_KEY_BYTES)

    @staticmethod
    def checked(address: str) -> Address:
        """Return the address to listen on, which must be on this host.

        Raises:
            UsageError: It is on another host, to which the key would travel
                unencrypted.
        """
        where = Address.parse(address)
        if not (is_loopback(where.host) or where.host == "localhost"):
            raise UsageError(
                f"--serve {address}: HTTP does not encrypt, so use 127.0.0.1; from "
                f"another host, forward that port with ssh -L"
            )
        return where

    def get(self, path: str, headers: Mapping[str, str]) -> HttpReply:
        """Return the answer to a GET."""
        if (file := page_file(path)) is not None:
            return HttpReply(HTTPStatus.OK, *file)
        if path != DATA:
            text = f"the path is {PAGE}\n".encode()
            return HttpReply.of(HTTPStatus.NOT_FOUND, "text/plain", text)
        shown = headers.get("authorization", "").encode()
        if not hmac.compare_digest(f"Bearer {self.key}".encode(), shown):
            why = "open the link that kvwire top has printed, or enter its key"
            return HttpReply(HTTPStatus.UNAUTHORIZED, *page_data({"error": why}))
        try:
            found, silent = snapshots(sockets(self._folder))
        except KVWireError as exc:  # the folder is gone
            found = []
            silent = [str(exc)]
        view = process_view(found, self._rates.before(found), silent)
        return HttpReply(HTTPStatus.OK, *page_data(view))
