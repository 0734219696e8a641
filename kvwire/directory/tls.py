"""TLS to the server of a directory, whose CA is often a private one."""

from __future__ import annotations

import ssl


def client_context(ca_file: str = "") -> ssl.SSLContext:
    """Return a context that trusts the CAs of a file, or the system's.

    From Python 3.13 on, the usual context refuses certificates without extensions that
    many private CAs leave out, those of Kubernetes among them. The chain, the name and
    the times of a certificate are verified in any case.

    Raises:
        OSError: The file cannot be read, or has no certificate.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
