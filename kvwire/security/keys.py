"""Files with secrets, and the addresses that may be used without a key.

A file is read once, up to a size limit; a secret one only if nobody else can read it.

Without a key, an address that other hosts can reach is refused, not merely warned about
(Redis calls this protected mode).
"""

from __future__ import annotations

import codecs
import ipaddress
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from kvwire.aio import look_up
from kvwire.config import Config, local_path
from kvwire.errors import UsageError
from kvwire.types import Address, TrustMode, is_loopback, numeric_host
from kvwire.wire.handshake_messages import key_id

# Of a key file.
PSK_BYTES_MIN: Final = 32
PSK_BYTES_MAX: Final = 1024

# A key file holds the key in hexadecimal: two digits per byte, a line end, and perhaps
# a mark of its encoding.
_KEY_FILE_BYTES_MAX = 2 * PSK_BYTES_MAX + 2 + len(codecs.BOM_UTF8)


def write_key_file(path: Path) -> None:
    """Write a new random key of 32 bytes to a new file that only its owner can read.

    Raises:
        UsageError: The file exists, or cannot be written.
    """
    key = secrets.token_hex(PSK_BYTES_MIN)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(key + "\n")
    except FileExistsError:
        raise UsageError(
            f"{path} exists, and keygen never overwrites a key; choose another path"
        ) from None
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None


def read_key_file(path: str) -> bytes:
    """Read a key that ``kvwire keygen`` has made.

    Raises:
        UsageError: It cannot be read, others can read it, or it holds no key.
    """
    path = local_path(path)
    text = read_file("psk_file", path, _KEY_FILE_BYTES_MAX + 1, private=True)
    try:
        # Editors of Windows begin a text with a mark of its encoding.
        key = bytes.fromhex(text.decode("utf-8-sig").strip())
    except ValueError:
        if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UsageError(
                f"psk_file {path} is in UTF-16; save it as ASCII or UTF-8, or copy the "
                "file itself and not its text"
            ) from None
        raise UsageError(
            f"psk_file {path} does not contain a hexadecimal key; make one with "
            "`kvwire keygen`"
        ) from None
    if not PSK_BYTES_MIN <= len(key) <= PSK_BYTES_MAX:
        raise UsageError(
            f"psk_file {path}: the key has {len(key)} bytes; it needs {PSK_BYTES_MIN} "
            f"to {PSK_BYTES_MAX} random bytes: make one with `kvwire keygen FILE`"
        )
    return key


def read_file(
    option: str, path: str, bytes_max: int, *, private: bool = False
) -> bytes:
    """Read at most ``bytes_max`` bytes of the file that an option names.

    Raises:
        UsageError: It cannot be read, or it is ``private`` and others can read it.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - fstat the file that is read
            status = os.fstat(file.fileno())
            content = file.read(bytes_max)
    except OSError as exc:
        raise UsageError(f"{option} {path}: {exc.strerror}") from None
    if private and not is_private(status, os.geteuid()):
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(
            f"{option} {path} has mode {mode:04o} and other users can read it: chmod "
            "600 it"
        )
    return content


def is_private(status: os.stat_result, user: int) -> bool:
    """Return whether only a user, who has this process's groups, can reach a file.

    Kubernetes gives a pod that does not run as root its Secrets as files of root that
    the pod's group (``fsGroup``) may read. That counts as private, since there is no
    other way.
    """
    others = status.st_mode & 0o077
    is_lent = others == stat.S_IRGRP and status.st_uid == 0 and user != 0
    return not others or (is_lent and status.st_gid in {os.getegid(), *os.getgroups()})


def load_keys(config: Config) -> tuple[TrustMode, bytes, dict[bytes, bytes]]:
    """Return the trust mode, our key, and all accepted keys by key id."""
    if config.trust == "loopback":
        return TrustMode.LOOPBACK, b"", {}
    if config.trust == "mtls":
        return TrustMode.MTLS, b"", {}
    mine = read_key_file(config.psk_file)
    accepted = [mine, *map(read_key_file, config.psk_accept_files)]
    return TrustMode.PSK, mine, {key_id(key): key for key in accepted}


async def resolve(address: Address, trust: TrustMode) -> list[Address]:
    """Return a host name's numeric addresses, after checking that all may be used.

    Raises:
        UsageError: The name is malformed, or the address needs another trust mode.
        OSError: The name cannot be resolved, permanently or at the moment.

    Cancel safety: safe.
    """
    host = address.host
    if host in ("", "*"):  # the system would interpret it as this host
        raise UsageError(
            f"address {str(address)!r} has no host; write 127.0.0.1 for this host, or "
            "0.0.0.0 for every interface (with a key)"
        )
    numeric = await _numeric(address)
    reachable = [text for text in numeric if not is_loopback(text)]
    if trust is TrustMode.LOOPBACK and reachable:
        raise UsageError(
            f"{str(address)!r} means {reachable[0]}, which other hosts can reach, but "
            'trust is "loopback": use 127.0.0.1, or set trust="psk" and a psk_file '
            '(`kvwire keygen FILE`), or trust="mtls", on both sides'
        )
    name = "" if address.host in numeric else address.host
    return [Address(address.scheme, text, address.port, name) for text in numeric]


async def _numeric(address: Address) -> list[str]:
    """Return every address of a host; a numeric host needs no thread for that."""
    try:
        return [str(ipaddress.ip_address(address.host))]
    except ValueError:
        pass
    try:
        found = await look_up(address.host, address.port)
    except UnicodeError as exc:
        raise UsageError(f"address {str(address)!r}: {exc}") from None
    return list(dict.fromkeys(numeric_host(sockaddr) for *_, sockaddr in found))
