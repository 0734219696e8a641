"""The Unix socket beside a lane: identity, reports of read payloads, and arenas.

No payload is sent over it. It exists because only the kernel can answer these
questions:

* Which process is the peer? ``SO_PEERCRED`` reports the process at the other end, in
  our own pid namespace, and its user, so neither is ever taken from the peer's data.
* Is the peer still there? The peer shuts down its end of the socket before its lane
  releases any memory, and the kernel closes it when the process dies. We check that
  under the same kernel lock under which it happens: see :meth:`LocalWire.receive`.
* Which file in this process is a descriptor of the peer? (``SCM_RIGHTS``)

Records are a head of 8 bytes and a body::

    READ      u64         payloads of yours that I have read, in all
    PLACED    descriptor  of the next of my payloads whose descriptor was LATER
    ARENA     u32         the arena whose descriptor comes with this record
    UNSHARED  u32         the arena that nothing of mine is in any more: unmap it
    WINDOW    see windows how you read a window of mine
    CONCEALED u32         the window that you may no longer read
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvwire.errors import ConnectionLost, ProtocolError
from kvwire.limits import DESCRIPTOR_BYTES_MAX, KIB, LANE_PAYLOADS_MAX, TIB
from kvwire_local.descriptor import RULE

_HEAD: Final = struct.Struct("<BxxxI")
# The struct `ucred`: pid, uid, gid.
_CREDENTIALS: Final = struct.Struct("iII")
_READ_BYTES: Final = 64 * KIB
# Enough for records of every payload that may be in flight, twice over.
_RECEIVED_MAX: Final = 2 * LANE_PAYLOADS_MAX * (DESCRIPTOR_BYTES_MAX + _HEAD.size)
ARENAS_MAX: Final = 64
"""The most arenas that a lane shares at once; others are read as ordinary memory."""
ARENAS_BYTES_MAX: Final = 8 * TIB
"""The most bytes of these arenas together.

A process maps what its peers share, so a peer could otherwise use up its addresses: 128
TiB on most processors. No host has caches of this size.
"""
WINDOWS_MAX: Final = 256
"""The most windows that one lane exposes at a time."""


class LocalMessageType(enum.IntEnum):
    """The kinds of records."""

    READ = 1
    PLACED = 2
    ARENA = 3
    WINDOW = 4
    CONCEALED = 5
    UNSHARED = 6


_KINDS: Final = {int(kind): kind for kind in LocalMessageType}


@dataclass(frozen=True, slots=True)
class LocalMessage:
    """One record from the peer."""

    kind: LocalMessageType
    body: bytes


class LocalWire:
    """One end of the socket, connected and non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._unsent: deque[tuple[bytes, int]] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether records wait for room; if so, call ``send_rest``."""
        return bool(self._unsent)

    def send(self, kind: LocalMessageType, body: bytes, fd: int = -1) -> None:
        """Send one record, now or when there is room; records keep their order."""
        record = _HEAD.pack(kind, len(body)) + body
        if fd >= 0:
            # A duplicate, since the arena may be closed before there is room.
            fd = os.dup(fd)
        self._unsent.append((record, fd))  # bounded: LANE_PAYLOADS_MAX
        self.send_rest()

    def send_rest(self) -> None:
        """Send waiting records. If the peer has ended, only `receive` reports that."""
        try:
            while self._unsent:
                record, fd = self._unsent[0]
                fds = [fd] if fd >= 0 else []
                sent = socket.send_fds(self._socket, [record], fds, socket.MSG_NOSIGNAL)
                if fds:
                    os.close(fd)
                self._unsent[0] = (record[sent:], -1)
                if sent == len(record):
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._forget_unsent()

    def receive(self, *, all_of_it: bool = True) -> tuple[list[LocalMessage], bool]:
        """Return the peer's records, and whether it is still there.

        "Still there" refers to a moment after everything that this thread has read so
        far. The kernel checks, under the lock of our end of the socket, whether that
        end was shut down; and the peer shuts it down under the same lock before it
        reuses memory. So if the answer is yes, all bytes read before are the bytes that
        were sent.

        A caller that has read no memory needs no such proof, and may clear
        ``all_of_it``: this takes only one system call, and the loop calls again if
        there is more.
        """
        there = self._receive(all_of_it=all_of_it)
        return list(self._records()), there

    def peer_left(self) -> bool:
        """Return whether the other end is closed, and all its records were received."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take_fd(self) -> int:
        """Return the descriptor of an ARENA record, which the caller must close."""
        if not self._fds:
            raise ProtocolError(RULE, "local: an arena arrived without its descriptor")
        return self._fds.popleft()

    def close(self) -> None:
        """Shut the socket down, which the peer sees, and close it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._forget_unsent()
        while self._fds:
            os.close(self._fds.popleft())

    def _receive(self, *, all_of_it: bool) -> bool:
        """Receive available bytes; return False at the end of the stream."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(
                    self._socket, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return True
            except OSError:
                return False
            self._fds.extend(fds)  # bounded: ARENAS_MAX
            self._received += data
            if not data:
                return False
            if len(self._received) > _RECEIVED_MAX or len(self._fds) > ARENAS_MAX:
                raise ProtocolError(
                    RULE, "local: the peer sent more records than a lane may have"
                )
            if not all_of_it:
                return True

    def _records(self) -> Iterator[LocalMessage]:
        """Yield the complete records; keep the beginning of the next one."""
        received = self._received
        begin = 0
        while len(received) >= (body := begin + _HEAD.size):
            number, length = _HEAD.unpack_from(received, begin)
            kind = _KINDS.get(number)
            if kind is None or length > DESCRIPTOR_BYTES_MAX:
                raise ProtocolError(
                    RULE,
                    f"local: record {number} has an invalid length of {length} bytes",
                )
            if len(received) < body + length:
                break
            begin = body + length
            yield LocalMessage(kind, bytes(received[body:begin]))
        del received[:begin]

    def _forget_unsent(self) -> None:
        while self._unsent:
            _, fd = self._unsent.popleft()
            if fd >= 0:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process at the other end of a socket, according to the kernel.

    Attributes:
        pid: Its number in this process's namespace; 0 if it is not visible.
        uid: Its user in this process's user namespace.
    """

    pid: int
    uid: int


def peer_process(sock: socket.socket) -> PeerProcess:
    """Return the process at the other end."""
    try:
        found = sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
    except OSError as exc:
        raise ConnectionLost(f"local: the peer has ended: {exc}") from exc
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return PeerProcess(pid, uid)
