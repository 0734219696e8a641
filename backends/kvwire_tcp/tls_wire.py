"""TLS between memory and a socket: an SSLObject, two memory BIOs, two buffers.

::

    sending     payload --write--> outgoing BIO --read--> `_unsent` --send--> kernel
    receiving   kernel --recv_into--> shared buffer --write--> incoming BIO
                                              --read--> destination

Payload is encrypted directly from its memory and decrypted directly into its
destination; only fragment lists go through a buffer. All wires of a backend share that
buffer and the one for received bytes, since both are used within one call only.

The two BIOs have these consequences:

* *Memory is free once it is encrypted*, before the kernel has the data. Encrypted bytes
  that the kernel has not accepted are ``unsent``, less than two pieces: nothing more is
  encrypted before they are gone.
* *The socket does not show the bytes that we hold.* While received bytes are unread,
  ``more`` is true. The kernel is asked for more only when OpenSSL has consumed its
  input, so the incoming BIO holds at most one piece.
* *Reading may write*, because a peer that changes its keys gets an answer. A peer that
  requests such answers without reading them is disconnected, because they would fill
  the outgoing BIO.
* *The end is announced inside TLS* (``close_notify``). A stream that ends without it
  was cut off, and never counts as a clean end. To announce the end,
  ``SSLObject.unwrap`` also reads and drops unread data, so that data is read ahead
  first.

The handshake uses the same calls, within the first receives: a server's handshake is
under the protocol's limits for unauthenticated connections.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Final, NoReturn, cast, final

from kvwire.backend import TlsCredentials
from kvwire.errors import AuthenticationFailed
from kvwire.limits import KIB
from kvwire.memory.iovec import Iovecs
from kvwire.types import PeerIdentity, Role
from kvwire_tcp.tls_errors import explained
from kvwire_tcp.wire import Bytes

# The bytes encrypted or decrypted in one call: 8 TLS records, some 50 us of processor
# time.
PIECE_BYTES: Final = 128 * KIB
# The most bytes received at once before the handshake has ended: a whole flight,
# without pinning more memory.
STRANGER_BYTES: Final = 16 * KIB
# If more bytes are unsent, a peer that requests new keys and does not read is
# disconnected.
UNSENT_BYTES_MAX: Final = 2 * PIECE_BYTES
# The length of the longest record, decrypted (RFC 8446 5.1).
_RECORD_BYTES: Final = 16 * KIB
# The types of a handshake's records: handshake, and alert (RFC 8446 5.1).
_HANDSHAKE = 0x16
_ALERT = 0x15
# A fatal alert, "protocol_version", for a peer that does not speak TLS (RFC 8446 6).
_NO_TLS_HERE: Final = bytes((_ALERT, 3, 3, 0, 2, 2, 70))
# A fatal alert, "access_denied": the certificate is valid, but its owner is not
# accepted.
_NOT_YOU: Final = bytes((_ALERT, 3, 3, 0, 2, 2, 49))


class Buffers:
    """Memory for all wires of one backend, used by each within one call."""

    def __init__(self) -> None:
        self.received = memoryview(bytearray(PIECE_BYTES))
        self.payload = memoryview(bytearray(PIECE_BYTES))


@final
class TlsWire:
    """Moves the bytes of one socket inside TLS."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: TlsCredentials,
        role: Role,
        buffers: Buffers,
        name: str = "",
    ) -> None:
        self.sock = sock
        self.opened = False
        self._credentials = credentials
        self._role = role
        self._buffers = buffers
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = credentials.wrap(role, self._incoming, self._outgoing, name)
        self._peer_identity: PeerIdentity | None = None
        self._refused: AuthenticationFailed | None = None
        # Encrypted bytes that the kernel has not accepted yet.
        self._unsent = memoryview(b"")
        # Bytes that were decrypted before they were requested.
        self._ahead = memoryview(b"")
        self._failure: ssl.SSLError | None = None
        # The kernel returned as many bytes as requested, so it may have more.
        self._kernel_has_more = False
        self._nothing_came = True
        self._end_sent = False
        self._end_received = False

    @property
    def unsent(self) -> int:
        return len(self._unsent) + self._outgoing.pending

    @property
    def more(self) -> bool:
        return (
            self._kernel_has_more
            or self._end_received
            or bool(self._ahead)
            or self._failure is not None
            or self._incoming.pending > 0
            or self._tls.pending() > 0
        )

    def proven(self) -> PeerIdentity | None:
        refused = self._refused
        if refused is not None:
            raise AuthenticationFailed(str(refused), fields=refused.fields)
        return self._peer_identity

    # --- the handshake ----------------------------------------------------------------

    def shake_hands(self) -> None:
        """Continue the handshake until it has ended.

        Raises:
            BlockingIOError: It is the peer's turn.
            OSError: The connection is broken. If the peer ended it without sending
                anything, this counts as the end of the stream instead.
            AuthenticationFailed: The peer does not speak TLS, or is not accepted.
        """
        while not (self.opened or self._end_received or self._failure is not None):
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                # Data that the kernel does not accept waits, since a peer that reads
                # nothing may still send something.
                with contextlib.suppress(BlockingIOError):
                    self.flush()
                self._receive(STRANGER_BYTES)
            except ssl.SSLError as exc:
                self._failure = exc.with_traceback(None)
            else:
                self._meet_peer()
                self.opened = True
                with contextlib.suppress(BlockingIOError):
                    self.flush()
        if self._failure is not None:
            self._fail(self._failure)

    def _meet_peer(self) -> None:
        """Check the peer's certificate.

        A client that does not accept its server disconnects before it has shown its own
        certificate, with an alert that may be unencrypted until then (RFC 8446 6.2). A
        server continues, so that the protocol above can send the reason.
        """
        try:
            self._peer_identity = self._credentials.proven(self._tls, self._role)
        except AuthenticationFailed as exc:
            if self._role is Role.CLIENT:
                with contextlib.suppress(OSError):
                    self.sock.send(_NOT_YOU)
                raise
            # Its traceback would keep this object alive.
            self._refused = exc.with_traceback(None)

    # --- sending ----------------------------------------------------------------------

    def send(self, data: Bytes, /) -> int:
        self.flush()
        count = self._tls.write(memoryview(data)[:PIECE_BYTES])
        with contextlib.suppress(BlockingIOError):
            self.flush()
        return count

    def sendmsg(self, views: Sequence[Bytes], /) -> int:
        """Encrypt views; small ones form one record together."""
        if len(views[0]) >= PIECE_BYTES:
            return self.send(views[0])
        payload = self._buffers.payload
        filled = 0
        for view in views:
            part = memoryview(view)[: PIECE_BYTES - filled]
            payload[filled : filled + len(part)] = part
            filled += len(part)
            if filled == PIECE_BYTES:
                break
        return self.send(payload[:filled])

    def send_list(self, part: Iovecs) -> int:
        self.flush()  # first, or the fragments might be gathered in vain
        payload = self._buffers.payload
        return self.send(payload[: part.gather(payload)])

    def flush(self) -> None:
        while True:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
            if not self._outgoing.pending:
                return
            self._unsent = memoryview(self._outgoing.read())

    def send_end(self) -> None:
        if self._end_sent or not self.opened:
            return
        self._end_sent = True
        self._read_ahead()
        # It also waits for the peer's end of stream, which may come later.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()

    # --- receiving --------------------------------------------------------------------

    def recv_into(self, target: memoryview, /) -> int:
        if not self.opened:
            self.shake_hands()
        if self._ahead:
            count = min(len(target), len(self._ahead))
            target[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            return count
        target = target[:PIECE_BYTES]
        while not (count := self._decrypt(target)) and not self._end_received:
            self._receive(PIECE_BYTES)
        if self.unsent > UNSENT_BYTES_MAX:
            raise ConnectionAbortedError(
                errno.ECONNABORTED,
                "the peer requests new TLS keys faster than it reads",
            )
        return count

    def recv_two(self, target: memoryview, behind: memoryview) -> int:
        """Receive into ``target``; data that follows it stays for the next call."""
        return self.recv_into(target)

    def recv_list(self, part: Iovecs, behind: tuple[int, int] | None = None) -> int:
        payload = self._buffers.payload[: part.rest]
        part.asked = len(payload)
        count = self.recv_into(payload)
        if count:
            part.scatter(payload[:count])
        return count

    def look(self) -> bool:
        if not self._ahead:
            byte = memoryview(bytearray(1))
            self._ahead = byte[: self.recv_into(byte)]
        return bool(self._ahead)

    def _decrypt(self, target: memoryview) -> int:
        """Fill ``target`` from OpenSSL's data; return the count, or 0 without data."""
        filled = 0
        while filled < len(target) and not self._end_received and self._failure is None:
            rest = target[filled:]
            try:
                # With a buffer as argument it returns a count, contrary to typeshed's
                # declaration.
                count = cast("int", self._tls.read(len(rest), rest))
                self._end_received = count == 0
                filled += count
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                self._end_received = True
            except ssl.SSLError as exc:
                # Its traceback would keep the memory alive.
                self._failure = exc.with_traceback(None)
        if not filled and self._failure is not None:
            self._fail(self._failure)
        return filled

    def _fail(self, error: ssl.SSLError) -> NoReturn:
        """Send the alert to the peer, if possible, and raise the error."""
        with contextlib.suppress(OSError):
            self.flush()
        raise explained(error, self._role, opened=self.opened)

    def _read_ahead(self) -> None:
        """Decrypt all held bytes, which are at most one piece and one record."""
        filled = len(self._ahead)
        held = self._incoming.pending + self._tls.pending() + _RECORD_BYTES
        ahead = bytearray(filled + held)
        ahead[:filled] = self._ahead
        with contextlib.suppress(OSError, AuthenticationFailed):
            while count := self._decrypt(memoryview(ahead)[filled:]):
                filled += count
        self._ahead = memoryview(ahead)[:filled]

    def _receive(self, count_max: int) -> None:
        """Pass the kernel's data to OpenSSL."""
        received = self._buffers.received[:count_max]
        self._kernel_has_more = False
        try:
            count = self.sock.recv_into(received)
        except ConnectionError as exc:
            raise exc if self.opened else _unshaken(exc.errno) from None
        if count == 0 and self._nothing_came:
            self._end_received = True  # a peer that sent nothing at all was not cut off
            return
        if count == 0:
            if not self.opened:
                raise _unshaken(errno.ECONNRESET)
            raise ConnectionResetError(
                errno.ECONNRESET,
                "the stream was cut off: it ended without TLS's close message",
            )
        if self._nothing_came:
            self._nothing_came = False
            self._check_first(received[0])
        self._kernel_has_more = count == count_max
        self._incoming.write(received[:count])

    def _check_first(self, byte: int) -> None:
        """Check by its first byte whether the peer speaks TLS.

        Raises:
            AuthenticationFailed: It does not.
        """
        if byte in (_HANDSHAKE, _ALERT):
            return
        if self._role is Role.SERVER:
            with contextlib.suppress(OSError):
                self.sock.send(_NO_TLS_HERE)
        raise AuthenticationFailed(
            'the peer speaks no TLS, and trust is "mtls" here: set the same `trust` on '
            "both sides",
            fields=("trust",),
        )


def _unshaken(code: int | None) -> ConnectionResetError:
    """Return the error of a broken handshake; a peer without TLS may just leave."""
    return ConnectionResetError(
        code, "it ended during the TLS handshake; is the peer's trust mtls as well?"
    )
