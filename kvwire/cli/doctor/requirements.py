"""What the configuration asks for, and whether it is here: the exit status.

A transport of ``require`` has to run, or one of them if there are several, and so have
the key files of the trust mode. ``prefer`` and ``forbid`` ask for nothing, but a name
that nobody offers is refused wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvwire.backend import Finding
from kvwire.backend.selection import check_transports
from kvwire.cli.doctor.transports import Transport
from kvwire.config import Config
from kvwire.errors import KVWireError, UsageError
from kvwire.security.keys import load_keys
from kvwire.security.tls import Credentials


def asked(config: Config, transports: Sequence[Transport]) -> tuple[Finding, ...]:
    """A finding for each thing that a configuration asks for."""
    return (*_transports(config, transports), _settings(config), _trust(config))


def _transports(config: Config, transports: Sequence[Transport]) -> Iterator[Finding]:
    runs = {t.name: t.available for t in transports if t.name not in config.forbid}
    wanted = config.require or tuple(runs)
    usable = [name for name in wanted if runs.get(name)]
    name = "require" if config.require else "transports"
    if usable:
        yield Finding(name=name, state="ok", text=f"can run: {', '.join(usable)}")
    else:
        remedies = [t.remedy for t in transports if t.name in wanted and t.remedy]
        yield Finding(
            name=name,
            state="missing",
            text=f"cannot run here: {', '.join(wanted) or 'there is none'}",
            remedy="; ".join(remedies),
        )
    for named in config.prefer:
        if runs.get(named) is False and named not in config.require:
            text = f"{named} cannot run here: what comes after it is used"
            yield Finding(name="prefer", state="warn", text=text)


def _settings(config: Config) -> Finding:
    try:
        check_transports(config)
    except KVWireError as exc:
        return Finding(name="names", state="missing", text=str(exc))
    return Finding(name="names", state="ok", text="every transport and setting exists")


def _trust(config: Config) -> Finding:
    try:
        load_keys(config)
        if config.trust == "mtls":
            Credentials(config)
    except UsageError as exc:
        return Finding(name="trust", state="missing", text=str(exc))
    found = {
        "loopback": "this host only",
        "psk": "the key can be read",
        "mtls": "the certificate, its key and the CAs can be used",
    }
    return Finding(
        name="trust", state="ok", text=f"{config.trust}: {found[config.trust]}"
    )
