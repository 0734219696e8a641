"""A CA for tests, and what it signs: files as ``trust="mtls"`` reads them."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID, ObjectIdentifier

NEAR: Final = "spiffe://kvwire.test/near"
FAR: Final = "spiffe://kvwire.test/far"
_NUMBERS = itertools.count()
_DAY = dt.timedelta(days=1)
_SIGNS: Final = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, its key, and the files they are in."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    cert_file: Path
    key_file: Path

    @property
    def config(self) -> dict[str, Any]:
        """As keys of Config."""
        return {
            "tls_cert_file": str(self.cert_file),
            "tls_key_file": str(self.key_file),
        }


class Authority:
    """A CA whose files lie in a folder."""

    def __init__(self, folder: Path, name: str = "kvwire test CA") -> None:
        self.folder = folder
        self.root = issue(folder, name, ca=True, days=(-400, 400))

    def config(self, name: str, *peers: str, **wanted: Any) -> dict[str, Any]:
        """Keys of Config for whoever is called ``name`` and accepts ``peers``."""
        return {
            "trust": "mtls",
            "tls_ca_file": str(self.root.cert_file),
            "tls_peers": peers or ("*",),
            **self.issue(name, **wanted).config,
        }

    def issue(self, *names: str, **wanted: Any) -> Issued:
        """Sign a certificate for URIs and DNS names; see :func:`issue`."""
        return issue(self.folder, *names, by=self.root, **wanted)


def issue(
    folder: Path,
    *names: str,
    by: Issued | None = None,
    ca: bool = False,
    days: tuple[float, float] = (-1, 1),
    usages: tuple[ObjectIdentifier, ...] = (),
) -> Issued:
    """Make a key and a certificate for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    title = names[0] if ca and names else f"subject {next(_NUMBERS)}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * _DAY)
        .not_valid_after(now + days[1] * _DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    # Without them, Python 3.13's own contexts refuse both.
    signer = (by.key if by else key).public_key()
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    ).add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False
    )
    if ca:
        builder = builder.add_extension(_SIGNS, critical=True)
    if names and not ca:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general(name) for name in names]),
            critical=False,
        )
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    certificate = builder.sign(by.key if by else key, hashes.SHA256())
    return _written(folder, certificate, key)


def chained(folder: Path, leaf: Issued, *chain: Issued) -> Issued:
    """The same certificate, shown together with those that signed it."""
    return _written(folder, leaf.certificate, leaf.key, *chain)


def locked(folder: Path, leaf: Issued, password: bytes) -> Issued:
    """The same, with the key encrypted."""
    return _written(folder, leaf.certificate, leaf.key, password=password)


def _written(
    folder: Path,
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    *chain: Issued,
    password: bytes = b"",
) -> Issued:
    """Write both files, with more certificates behind the first if there are any."""
    number, pem = next(_NUMBERS), serialization.Encoding.PEM
    cert_file, key_file = folder / f"{number}.pem", folder / f"{number}.key"
    shown = (certificate, *(issued.certificate for issued in chain))
    cert_file.write_bytes(b"".join(one.public_bytes(pem) for one in shown))
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    key_file.touch(mode=0o600)
    key_file.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
    )
    return Issued(certificate, key, cert_file, key_file)


def _general(name: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(name) if ":" in name else x509.DNSName(name)
