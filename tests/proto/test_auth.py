"""Keys: RFC 5869 step by step, one for each purpose and direction, shown to nobody."""

from __future__ import annotations

import hashlib
import hmac
import itertools

from kvwire.limits import LANES_MAX
from kvwire.proto.auth import Keys
from kvwire.wire.handshake_messages import key_id

PSK = bytes(range(32))
NONCES = (b"c" * 32, b"s" * 32)


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with SHA-256, as its section 2 has it."""
    extracted = hmac.new(salt, secret, hashlib.sha256).digest()
    out, block = b"", b""
    for counter in itertools.count(1):
        if len(out) >= length:
            return out[:length]
        block = hmac.new(
            extracted, block + info + bytes([counter]), hashlib.sha256
        ).digest()
        out += block
    raise AssertionError


def all_keys(keys: Keys) -> list[bytes]:
    return [
        *(keys.accept, keys.confirm, *keys.seal.values(), *keys.grant.values()),
        keys.lane,
    ]


def test_keys_are_derived_as_documented() -> None:
    """From the pre-shared key and both nonces, under a label for each purpose."""
    keys = Keys.derive(PSK, *NONCES)
    labels = [
        "server proof",
        "client proof",
        *("seal client", "seal server", "grant client", "grant server"),
        "lane",
    ]
    assert all_keys(keys) == [
        hkdf(PSK, b"".join(NONCES), f"kvwire {label}".encode(), 32) for label in labels
    ]


def test_each_lane_has_a_secret_of_its_own() -> None:
    """Which both sides can make, and nobody who has another lane's."""
    keys = Keys.derive(PSK, *NONCES)
    secrets = [keys.lane_secret(number) for number in range(1, LANES_MAX + 1)]
    assert len(set(secrets)) == LANES_MAX
    assert {len(secret) for secret in secrets} == {32}
    assert secrets[2] == hmac.digest(keys.lane, b"\3\0\0\0", "sha256")
    assert Keys.derive(PSK, *reversed(NONCES)).lane_secret(1) not in secrets


def test_a_key_id_names_and_does_not_show() -> None:
    """16 bytes, of one key only, and none of the key's."""
    assert len(key_id(PSK)) == 16
    assert key_id(PSK) == key_id(bytes(PSK)) != key_id(PSK[::-1])
    assert key_id(PSK) not in PSK
