"""What the configuration asks for, and whether it is here: the exit status.

A transport of ``require`` has to run, or one of them if there are several, and so have
the key files of the trust mode. ``prefer`` and ``forbid`` ask for nothing: a name in
them that nobody offers is a warning.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from kvwire.backend import Finding
from kvwire.cli.doctor.transports import Transport
from kvwire.config import Config
from kvwire.errors import UsageError
from kvwire.security.keys import load_keys
from kvwire.security.tls import Credentials


def asked(config: Config, transports: Sequence[Transport]) -> tuple[Finding, ...]:
    """A finding for each thing that a configuration asks for."""
    return (*_transports(config, transports), _trust(config))


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
    known = [t.name for t in transports]
    for key in ("prefer", "require", "forbid"):
        for named in getattr(config, key):
            if named not in known:
                yield _unknown(key, named, known)
    for named in config.prefer:
        if runs.get(named) is False and named not in config.require:
            text = f"{named} cannot run here: what comes after it is used"
            yield Finding(name="prefer", state="warn", text=text)


def _unknown(key: str, name: str, known: Sequence[str]) -> Finding:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(known)}"
    return Finding(
        name=key,
        state="warn",
        text=f"no installed package offers a transport named {name!r}",
        remedy=hint,
    )


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
