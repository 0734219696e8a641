"""What OpenSSL reports, as what somebody has to change, and on which side."""

from __future__ import annotations

import errno
import ssl
from typing import Final

from kvwire.errors import AuthenticationFailed


def explained(error: ssl.SSLError, *, opened: bool) -> OSError | AuthenticationFailed:
    """Explain an error of OpenSSL to whoever has to do something about it."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message.removesuffix(".")
        return AuthenticationFailed(
            f"the peer's certificate is not accepted: {said}"
            f"{_VERIFY_HINTS.get(error.verify_code, '')}",
            fields=("tls_ca_file",),
        )
    for part, text, name in _REASONS:
        # Afterwards only the peer can still refuse, a client's certificate.
        if part in reason and (not opened or "ALERT" in reason):
            return AuthenticationFailed(f"{text} ({reason})", fields=(name,))
    if opened:
        return OSError(errno.EBADMSG, f"damaged or changed on the way ({reason})")
    return AuthenticationFailed(f"the TLS handshake failed: {reason}", fields=())


_ANCHOR_HINT = (
    ": no CA in tls_ca_file has signed it; both sides need a CA that has signed the "
    "other's tls_cert_file"
)
# Of X509_verify_cert; OpenSSL's words alone do not say what to do.
_VERIFY_HINTS: Final = {
    7: _ANCHOR_HINT,  # one of the same name, with another key
    9: ": or a clock is wrong",
    10: ": renew its tls_cert_file, or a clock is wrong",
    18: _ANCHOR_HINT,
    19: _ANCHOR_HINT,
    20: _ANCHOR_HINT,
    21: _ANCHOR_HINT,
    26: ": its extended key usage must have clientAuth and serverAuth, or be absent",
}
_OURS = "the peer does not accept our tls_cert_file: "
_LOG = f"{_OURS}its log says why"
_IS_IT_MTLS = "is its trust mtls?"
# What is in the reason, what it means, and which key of the configuration it is about.
# The alerts are those of RFC 8446 6.2; OpenSSL has several prefixes for them.
_REASONS: Final = (
    ("ALERT_UNKNOWN_CA", f"{_OURS}no CA in its tls_ca_file signed it", "tls_ca_file"),
    (
        "ALERT_DECRYPT_ERROR",
        f"{_OURS}no CA in its tls_ca_file signed it",
        "tls_ca_file",
    ),
    ("CERTIFICATE_EXPIRED", f"{_OURS}expired, or a clock is wrong", "tls_cert_file"),
    ("ALERT_CERTIFICATE", _LOG, "tls_cert_file"),
    ("ALERT_BAD_CERTIFICATE", _LOG, "tls_cert_file"),
    ("ALERT_UNSUPPORTED_CERTIFICATE", _LOG, "tls_cert_file"),
    (
        "NOT_RETURN_A_CERTIFICATE",
        f"the peer shows no certificate: {_IS_IT_MTLS}",
        "trust",
    ),
    ("PROTOCOL", f"the peer speaks no TLS 1.3: {_IS_IT_MTLS}", "trust"),
    ("VERSION", f"the peer speaks no TLS: {_IS_IT_MTLS}", "trust"),
)
