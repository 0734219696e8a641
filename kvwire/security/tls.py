"""TLS credentials: reading them from files, and identifying the peer.

Both sides show a certificate (TLS 1.3, RFC 8446, never an older version). It is
accepted only if a CA in ``tls_ca_file`` signed it directly. The system's CAs do not
count, and neither does an intermediate CA that the peer sends: otherwise any holder of
a certificate with the right to sign could give itself any name. The peer's *identity*
is a name in its certificate that ``tls_peers`` lists: a URI or a DNS name of the
subject's alternative names (RFC 5280 4.2.1.6), compared as a whole. The host name is
not compared, since an address does not identify a process; the common name is not
looked at (RFC 9525).

When the files change they are read again for the next connection. So certificates that
live for an hour can be replaced under a process that lives for a month. Each file is
read once for all its uses: the handshake is bound to the digest of exactly the
certificate that is shown, even if somebody writes to the files meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import ssl
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from kvwire.config import ANYBODY, Config
from kvwire.errors import AuthenticationFailed, UsageError, shown
from kvwire.security.keys import read_file
from kvwire.security.validity import (
    OwnCertificate,
    State,
    Validity,
    own_certificate,
    signer_of,
    trouble_of,
)
from kvwire.types import PeerIdentity, Role

# How many names of one certificate an error message lists.
_NAMES_SHOWN: Final = 4
# No certificate or set of CAs is larger; a wrong path may name anything.
_FILE_BYTES_MAX: Final = 1024 * 1024
_BEGIN_CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----"
_END_CERTIFICATE: Final = "-----END CERTIFICATE-----"

logger: logging.Logger = logging.getLogger("kvwire.connections")


class Credentials:
    """This side's certificate and accepted peers, read from the files at one time.

    Raises:
        UsageError: A file cannot be used; the message names it and the reason.

    Attributes:
        own: The facts that peers read in our certificate.
        contexts: What TLS requires and shows in each role.
    """

    def __init__(self, config: Config) -> None:
        self._peers = frozenset(map(folded, config.tls_peers))
        self._config = config
        certificate = read_file("tls_cert_file", config.tls_cert_file, _FILE_BYTES_MAX)
        authorities = read_file("tls_ca_file", config.tls_ca_file, _FILE_BYTES_MAX)
        key = read_file(
            "tls_key_file", config.tls_key_file, _FILE_BYTES_MAX, private=True
        )
        self._digest = _digest(config.tls_cert_file, certificate)
        self.contexts: dict[Role, ssl.SSLContext] = {
            Role.CLIENT: _context(ssl.PROTOCOL_TLS_CLIENT, config, authorities),
            Role.SERVER: _context(ssl.PROTOCOL_TLS_SERVER, config, authorities),
        }
        with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
            for context in self.contexts.values():
                _load_own(context, config, certificate_file, key_file)
            self.own: OwnCertificate = own_certificate(
                certificate.decode("ascii", "ignore"),
                lambda one: _load_own(one, config, certificate_file, key_file),
            )
        if not self.own.roles:
            raise UsageError(
                f"tls_cert_file {config.tls_cert_file}: its extended key usage has "
                "neither serverAuth nor clientAuth, so no peer accepts it"
            )
        self._authorities = self.contexts[Role.CLIENT].get_ca_certs()
        self._anchors = [ca["subject"] for ca in self._authorities]

    @property
    def validity(self) -> Validity:
        """The time in which peers accept our certificate, at most that of its CA."""
        own = self.own.validity
        signer = signer_of(self.own, self._authorities)
        end = math.inf if signer is None else Validity.of(signer).not_after
        return replace(own, not_after=min(own.not_after, end))

    def trouble(self) -> tuple[State, str]:
        """Return the certificates' worst state, and a text even if no state is bad."""
        return trouble_of(self.own, self._authorities, self._config)

    @property
    def is_signed_by_ours(self) -> bool:
        """Return whether a CA of ``tls_ca_file`` has signed our own certificate."""
        return self.own.issuer in (None, *self._anchors)

    def wrap(
        self,
        role: Role,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        name: str = "",
    ) -> ssl.SSLObject:
        """Make one end of a TLS connection, before its handshake.

        The first message of a client has the dialled ``name`` in clear (RFC 6066, 3):
        routers that pass TLS through go by it. It decides nothing here.
        """
        return self.contexts[role].wrap_bio(
            incoming,
            outgoing,
            server_side=role is Role.SERVER,
            server_hostname=name.rstrip(".") or None,
        )

    def proven(self, tls: ssl.SSLObject | ssl.SSLSocket, role: Role) -> PeerIdentity:
        """Return the peer's identity, once the handshake is over.

        Raises:
            AuthenticationFailed: This side does not accept the peer.
        """
        binary = tls.getpeercert(binary_form=True)
        certificate: dict[str, Any] | None = tls.getpeercert()
        assert binary is not None, "a certificate is required"
        assert certificate is not None
        if certificate["issuer"] not in self._anchors:
            raise AuthenticationFailed(
                "the peer's certificate was signed by a CA that it brought along; "
                f"only those in tls_ca_file {self._config.tls_ca_file} count: add "
                "that CA if you trust it to issue any name",
                fields=("tls_ca_file",),
            )
        theirs = hashlib.sha256(binary).digest()
        ends = (self._digest, theirs) if role is Role.CLIENT else (theirs, self._digest)
        return PeerIdentity(self._identity(certificate), b"".join(ends))

    def _identity(self, certificate: dict[str, Any]) -> str:
        names = [
            folded(value)
            for kind, value in certificate.get("subjectAltName", ())
            # A URI has a colon and a DNS name has none, so neither can pass for the
            # other.
            if kind in ("URI", "DNS") and (kind == "URI") == (":" in value)
        ]
        accepted = [n for n in names if n in self._peers or ANYBODY in self._peers]
        if accepted:
            return str(accepted[0])
        listed = ", ".join(shown(name) for name in names[:_NAMES_SHOWN])
        raise AuthenticationFailed(
            f"the peer is {listed or 'nobody: its certificate has no URI or DNS name'}"
            f", and tls_peers does not list that",
            fields=("tls_peers",),
        )


class CredentialFiles:
    """Reads credentials from files, and again when these have changed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stamps = self._look()
        self._credentials = Credentials(config)
        # The last logged reason why changed files are not in use.
        self._refusal = ""
        # The state that was logged last.
        self._logged: State = ""
        self._warn()

    def check_may_listen(self) -> None:
        """Refuse to listen with a certificate that no client accepts.

        Raises:
            UsageError: Its extended key usage is for clients only.
        """
        if Role.SERVER not in self.current().own.roles:
            raise UsageError(
                f"tls_cert_file {self._config.tls_cert_file}: its extended key usage "
                "has only clientAuth, so no peer could connect; listening also needs "
                "serverAuth, or no extended key usage at all"
            )

    def current(self) -> Credentials:
        """Return the credentials in the files, or the last usable ones."""
        stamps = self._look()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._credentials = Credentials(self._config)
            except (UsageError, OSError) as exc:
                # Try again next time: the cause may be a file's mode or a missing
                # descriptor, neither of which changes a file.
                self._stamps = ()
                refusal = self._refusal
                self._refusal = str(exc)
                if refusal != self._refusal:
                    logger.warning("the changed certificates cannot be used: %s", exc)
            else:
                self._refusal = ""
                logger.info("certificates have changed; new connections use them")
        self._warn()
        return self._credentials

    def _warn(self) -> None:
        """Log expired or soon expiring certificates, and again if it gets worse."""
        state, text = self._credentials.trouble()
        if state and state != self._logged:
            logger.warning(
                "%s; peers refuse a certificate that is not valid; kvwire loads new "
                "files without a restart",
                text,
            )
        self._logged = state

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        config = self._config
        files = (config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
        return tuple(map(_stamp, files))


def _context(protocol: int, config: Config, authorities: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names are compared with tls_peers instead
    context.verify_mode = ssl.CERT_REQUIRED
    # Each CA in the file is trusted, whether or not another CA has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection authenticates again
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as exc:
        raise UsageError(
            f"tls_ca_file {config.tls_ca_file} holds no certificate in PEM: {exc}"
        ) from None
    if not context.get_ca_certs():
        raise UsageError(
            f"tls_ca_file {config.tls_ca_file} holds no certificate of a CA "
            f"(basicConstraints CA:TRUE)"
        )
    return context


def _load_own(
    context: ssl.SSLContext, config: Config, certificate_file: str, key_file: str
) -> None:
    def password() -> str:
        raise UsageError(
            f"tls_key_file {config.tls_key_file} is encrypted, and kvwire cannot ask "
            "for a passphrase: decrypt it (openssl pkey) and make it readable only "
            "by its owner"
        )

    try:
        context.load_cert_chain(certificate_file, key_file, password)
    except (ssl.SSLError, OSError) as exc:
        if "KEY_VALUES_MISMATCH" in str(exc) or "KEY_TYPE_MISMATCH" in str(exc):
            raise UsageError(
                f"tls_key_file {config.tls_key_file} does not belong to tls_cert_file "
                f"{config.tls_cert_file}"
            ) from None
        raise UsageError(
            f"tls_cert_file {config.tls_cert_file} or tls_key_file "
            f"{config.tls_key_file} cannot be used: {exc}"
        ) from None


def _unlinked_file() -> int | None:
    """Return the descriptor of a file in memory; None where there can be none."""
    if sys.platform != "linux":
        return None
    try:
        return os.memfd_create("kvwire-tls")
    except OSError:  # a sandbox without memfd_create
        return None


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield the path of a private file with this content.

    OpenSSL reads certificates and keys only from paths.
    """
    descriptor = _unlinked_file()
    if descriptor is not None:
        # It is never on a disk, and exists as long as the descriptor is open.
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            yield file.name


def _digest(path: str, content: bytes) -> bytes:
    """Return the SHA-256 of a file's first certificate, which peers receive.

    Raises:
        UsageError: The file holds no certificate.
    """
    text = content.decode("ascii", "replace")
    begin = text.find(_BEGIN_CERTIFICATE)
    end = text.find(_END_CERTIFICATE, begin)
    if begin < 0 or end < 0:
        raise UsageError(f"tls_cert_file {path} holds no certificate in PEM")
    pem = text[begin : end + len(_END_CERTIFICATE)]
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).digest()
    except ValueError as exc:
        raise UsageError(f"tls_cert_file {path}: {exc}") from None


def folded(name: str) -> str:
    """Lower the case of a DNS name, which ignores case (RFC 4343), unlike a URI.

    Names are compared and looked up only in this form.
    """
    return name if ":" in name else name.lower()


def _stamp(path: str) -> tuple[int, int, int]:
    """Return numbers that change when a file is replaced; zeros if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - the path is text from the configuration
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size
