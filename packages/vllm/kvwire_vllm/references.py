"""Checks of the engines that a request names: any client can send such a request.

An engine dials an address from a request only if its operator has listed the address in
``peers``, or if it is signed with the engines' key. An engine signs the references in
its answers, and the proxy signs those that it makes. With trust ``loopback`` no peer
proves anything, so any address on this host is accepted.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvwire.config import Config
from kvwire.directory.dialable import check_dialable
from kvwire.errors import UsageError
from kvwire.security.keys import load_keys
from kvwire.types import Address, is_loopback

SIGNATURE: Final = "signature"
_LABEL: Final = b"kvwire vllm reference"


class References:
    """Signs references to transfers, and checks references in requests."""

    def __init__(
        self,
        keys: Sequence[bytes] = (),
        peers: Iterable[str] = (),
        *,
        this_host: bool = False,
    ) -> None:
        self._keys = [hmac.digest(key, _LABEL, "sha256") for key in keys]
        self._peers = frozenset(str(Address.parse(peer)) for peer in peers)
        self._this_host = this_host

    @classmethod
    def of(cls, config: Config, peers: Sequence[str]) -> References:
        """Return the references for an engine's configuration."""
        if config.trust == "mtls" and not peers:
            raise UsageError(
                'kv_connector_extra_config: trust="mtls" needs "peers", the '
                "addresses of the other engines' ranks: requests name addresses, and "
                "a certificate does not sign them"
            )
        _, mine, accepted = load_keys(config)
        keys = [mine, *accepted.values()] if mine else []
        return cls(keys, peers, this_host=config.trust == "loopback" and not peers)

    def signed(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return a reference with its signature; unchanged without a key."""
        if not self._keys:
            return params
        message = _message(params["transfer_id"], params["remote"])
        signature = hmac.digest(self._keys[0], message, "sha256").hex()
        return {**params, SIGNATURE: signature}

    def check(self, transfer_id: str, remote: Sequence[str], signature: str) -> None:
        """Refuse a reference that may be forged."""
        addresses = [Address.parse(one) for one in remote]
        for address in addresses:
            check_dialable(address)
        # Bytes, since a client may send any text.
        shown = signature.encode("utf-8", "replace")
        for key in self._keys:
            message = _message(transfer_id, remote)
            right = hmac.digest(key, message, "sha256").hex().encode()
            if hmac.compare_digest(right, shown):
                return
        for address in addresses:
            if not self._may_dial(address):
                raise UsageError(
                    f"kv_transfer_params: {str(address)!r} is not in `peers`, and it "
                    "is not signed with this engine's key"
                )

    def _may_dial(self, address: Address) -> bool:
        if str(address) in self._peers:
            return True
        host = "127.0.0.1" if address.host == "localhost" else address.host
        return self._this_host and address.scheme == "tcp" and is_loopback(host)


UNSIGNED: Final = References()
"""The references for an engine without a key."""


def _message(transfer_id: str, remote: Sequence[str]) -> bytes:
    addresses = [str(Address.parse(one)) for one in remote]
    return json.dumps([transfer_id, addresses]).encode()
