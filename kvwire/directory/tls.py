"""TLS to a directory's server, which often uses a private CA."""

from __future__ import annotations

import ssl


def client_context(ca_file: str = "") -> ssl.SSLContext:
    """Return a context that trusts the CAs in a file, or the system's.

    From Python 3.13 on, the default context requires certificate extensions that many
    private CAs omit, including those of Kubernetes. This context does not, but it
    verifies a certificate's chain, name and validity period.

    Raises:
        OSError: The file cannot be read, or contains no certificate.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
