"""A peer's view of this side's certificate: time of validity and role.

OpenSSL gives no information about a certificate that it only loads. So this module
shows it to a peer within this process, in a handshake that accepts only this
certificate and ignores the clock, and records the peer's view; real peers see the same.
An expired certificate is logged but does not prevent a start: a new file is used
without a restart, and another host's clock may be right.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvwire.config import Config
from kvwire.types import Role

State = Literal["", "soon", "early", "expired"]
_INVALID: Final[tuple[State, ...]] = ("expired", "early")
Load = Callable[[ssl.SSLContext], None]
_DAY_S: Final = 86_400.0
# A certificate that expires within this time is reported, so that a person has time to
# issue a new one. A certificate that a program renews may live only for hours: it is
# reported when a fifth of its life is left, since the program has then failed to renew
# it.
_SOON_S: Final = 14 * _DAY_S
_SOON_SHARE: Final = 0.2
# X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not have.
_NO_CHECK_TIME: Final = 0x20_0000
# X509_V_ERR_INVALID_PURPOSE.
_OTHER_PURPOSE: Final = 26
# Round trips of a TLS handshake, and one to spare.
_TURNS: Final = 4


@dataclass(frozen=True, slots=True)
class Validity:
    """The time in which a certificate is valid, in seconds of the wall clock."""

    not_before: float = -math.inf
    not_after: float = math.inf

    @classmethod
    def of(cls, certificate: Mapping[str, Any]) -> Validity:
        """Read the validity from a certificate as :mod:`ssl` returns it."""
        return cls(
            ssl.cert_time_to_seconds(certificate["notBefore"]),
            ssl.cert_time_to_seconds(certificate["notAfter"]),
        )

    def state(self, now: float) -> State:
        """Return the state that needs action; "" if none does."""
        left_s = self.not_after - now
        life_s = self.not_after - self.not_before
        if left_s <= 0:
            return "expired"
        if now < self.not_before:
            return "early"
        return "soon" if left_s < min(_SOON_S, _SOON_SHARE * life_s) else ""

    def described(self, now: float) -> str:
        """Return the state as a text, with the remedy."""
        match self.state(now):
            case "expired":
                return (
                    f"expired on {_day(self.not_after)}, {_time(now - self.not_after)} "
                    f"ago: renew it, or this host's clock is wrong"
                )
            case "early":
                return (
                    f"is not valid before {_day(self.not_before)}, in "
                    f"{_time(self.not_before - now)}: wait, or this host's clock is "
                    f"wrong"
                )
        if self.not_after == math.inf:
            return "is valid"
        left = f"{_day(self.not_after)}, in {_time(self.not_after - now)}"
        return f"expires on {left}" + (": renew it" if self.state(now) else "")


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """The facts that peers read in this side's certificate.

    Attributes:
        validity: The time in which they accept it.
        roles: The roles that its extended key usage allows.
        issuer: The name of the CA that signed it.
    """

    validity: Validity
    roles: frozenset[Role]
    issuer: object = None


def own_certificate(pem: str, load: Load) -> OwnCertificate:
    """Return the facts about the certificate that ``load`` gives to a context.

    Args:
        pem: The same certificate as text.
        load: Loads certificate and key into a context.
    """
    seen = {role: _seen(role, pem, load) for role in Role}
    roles = frozenset(role for role, found in seen.items() if found is not None)
    certificate = next((found for found in seen.values() if found), None)
    if certificate is None:
        return OwnCertificate(Validity(), roles)
    return OwnCertificate(Validity.of(certificate), roles, certificate["issuer"])


def trouble_of(
    own: OwnCertificate, authorities: Sequence[Mapping[str, Any]], config: Config
) -> tuple[State, str]:
    """Return the worst state now of a certificate and the CAs, with a text."""
    now = time.time()
    state = own.validity.state(now)
    text = f"tls_cert_file {config.tls_cert_file} {own.validity.described(now)}"
    if state in _INVALID:
        return state, text
    stale = [ca for ca in authorities if Validity.of(ca).state(now) in _INVALID]
    if stale:
        why = Validity.of(stale[0]).described(now)
        text = f"tls_ca_file {config.tls_ca_file}: the CA {_name(stale[0])} {why}"
        return ("expired" if len(stale) == len(authorities) else "soon"), text
    signer = signer_of(own, authorities)
    if not state and signer is not None:
        state = Validity.of(signer).state(now)
        if state:
            why = Validity.of(signer).described(now)
            text = f"tls_ca_file {config.tls_ca_file}: the CA {_name(signer)} {why}"
    return state, text


def signer_of(
    own: OwnCertificate, authorities: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the CA that has signed our certificate, with the latest end if renewed."""
    signers = [ca for ca in authorities if ca["subject"] == own.issuer]
    return max(signers, key=lambda ca: Validity.of(ca).not_after, default=None)


def _seen(role: Role, pem: str, load: Load) -> dict[str, Any] | None:
    """Return our certificate as a peer of this role reads it.

    None: its extended key usage forbids that role. Empty: the peer cannot read it.
    """
    contexts = {
        Role.CLIENT: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        Role.SERVER: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    }
    for context in contexts.values():
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        load(context)
    peer = contexts[role.other]
    peer.verify_mode = ssl.CERT_REQUIRED
    peer.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    peer.load_verify_locations(cadata=pem)
    there = ssl.MemoryBIO()
    back = ssl.MemoryBIO()
    ends = {
        Role.CLIENT: contexts[Role.CLIENT].wrap_bio(back, there),
        Role.SERVER: contexts[Role.SERVER].wrap_bio(there, back, server_side=True),
    }
    try:
        for _ in range(_TURNS):
            for end in ends.values():
                _go_on(end)
    except ssl.SSLCertVerificationError as exc:
        return None if exc.verify_code == _OTHER_PURPOSE else {}
    except ssl.SSLError:
        return {}
    return ends[role.other].getpeercert() or {}


def _go_on(end: ssl.SSLObject) -> None:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return


def _name(certificate: Mapping[str, Any]) -> str:
    """Return the common name of a CA, or its whole subject if it has none."""
    parts = [part for group in certificate.get("subject", ()) for part in group]
    return repr(dict(parts).get("commonName", parts))


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _time(seconds: float) -> str:
    if seconds >= 2 * _DAY_S:
        return f"{seconds / _DAY_S:.0f} days"
    return f"{seconds / 3600:.1f} hours"
