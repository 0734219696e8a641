"""Explains OpenSSL's errors: the side at fault and the remedy."""

from __future__ import annotations

import errno
import ssl
from typing import Final

from kvwire.errors import AuthenticationFailed
from kvwire.types import Role


def explained(
    error: ssl.SSLError, role: Role, *, opened: bool
) -> OSError | AuthenticationFailed:
    """Return an OpenSSL error as an error that names the side at fault and the remedy.

    Args:
        error: The error of OpenSSL.
        role: This side's role.
        opened: Whether the handshake was over.
    """
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        cause = error.verify_message.removesuffix(".")
        hint = _VERIFY_HINTS.get(error.verify_code, "").format(_USAGES[role.other])
        return AuthenticationFailed(
            f"the peer's certificate is not accepted: {cause}{hint}",
            fields=("tls_ca_file",),
        )
    for part, text, name in _REASONS:
        text = text.format(_USAGES[role])  # noqa: PLW2901 - the same, filled in
        # After the handshake only the peer can still refuse: a server may reject the
        # client's certificate.
        if part in reason and (not opened or "ALERT" in reason):
            return AuthenticationFailed(f"{text} ({reason})", fields=(name,))
    if opened:
        return OSError(
            errno.EBADMSG, f"the data was damaged or changed in transit ({reason})"
        )
    return AuthenticationFailed(f"the TLS handshake failed: {reason}", fields=())


_ANCHOR_HINT = (
    ": no CA in tls_ca_file has signed it; both sides need a CA that has signed the "
    "other's tls_cert_file"
)
_WEAK: Final = (
    ": replace it by one with a key of P-256 or RSA of 2,048 bits, and SHA-256"
)
# The extended key usage that each side's certificate needs (RFC 5280 4.2.1.12).
_USAGES: Final = {
    Role.CLIENT: "clientAuth, since it connects",
    Role.SERVER: "serverAuth, since it listens",
}
# By the codes of X509_verify_cert; OpenSSL's texts do not name a remedy.
_VERIFY_HINTS: Final = {
    7: _ANCHOR_HINT,  # another CA with the same name
    9: (
        ": its tls_cert_file or its CA in tls_ca_file is not valid yet, or a clock "
        "is wrong"
    ),
    10: ": renew its tls_cert_file, or its CA in tls_ca_file, or a clock is wrong",
    18: _ANCHOR_HINT,
    19: _ANCHOR_HINT,
    20: _ANCHOR_HINT,
    21: _ANCHOR_HINT,
    26: ": its extended key usage must have {}, or be absent",
    66: _WEAK,
    67: _WEAK,
    68: _WEAK,
}
_OURS = "the peer does not accept our tls_cert_file: "
_LOG = f"{_OURS}its log says why"
_NOT_LISTED = (
    f"{_OURS}its tls_peers does not name us, or its tls_ca_file lacks the very CA that "
    f"signed it; its log says which"
)
_IS_IT_MTLS = "is its trust mtls?"
# A part of OpenSSL's reason, its meaning, and the configuration key to look at. The
# alerts are those of RFC 8446 6.2, to which OpenSSL adds various prefixes.
_REASONS: Final = (
    ("ALERT_UNKNOWN_CA", f"{_OURS}no CA in its tls_ca_file signed it", "tls_ca_file"),
    (
        "ALERT_DECRYPT_ERROR",
        f"{_OURS}no CA in its tls_ca_file signed it",
        "tls_ca_file",
    ),
    ("CERTIFICATE_EXPIRED", f"{_OURS}expired, or a clock is wrong", "tls_cert_file"),
    (
        "ALERT_UNSUPPORTED_CERTIFICATE",
        f"{_OURS}its extended key usage must have {{}}, or be absent",
        "tls_cert_file",
    ),
    ("ALERT_ACCESS_DENIED", _NOT_LISTED, "tls_cert_file"),
    ("ALERT_CERTIFICATE", _LOG, "tls_cert_file"),
    ("ALERT_BAD_CERTIFICATE", f"{_OURS}not valid yet, or damaged", "tls_cert_file"),
    (
        "NOT_RETURN_A_CERTIFICATE",
        f"the peer shows no certificate: {_IS_IT_MTLS}",
        "trust",
    ),
    ("PROTOCOL", f"the peer speaks no TLS 1.3: {_IS_IT_MTLS}", "trust"),
    ("VERSION", f"the peer speaks no TLS: {_IS_IT_MTLS}", "trust"),
)
