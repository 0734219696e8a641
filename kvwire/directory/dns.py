"""DNS as a directory: each address of a name, such as a headless service, is a member.

The addresses are maintained by the zone's owner (Kubernetes, for a headless service);
the members' role and other fields are in the URL. A resolver does not report changes,
so it is queried every ``interval_s``. Since a single answer may be incomplete, a member
has left once its address is missing from three answers.

A member of a dual-stack network has an address of each family. Only those of one family
count, so that no member counts twice: IPv4, as long as there is a route to it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import ClassVar, Final

from kvwire.aio import look_up
from kvwire.directory.base import Batch, Directory
from kvwire.directory.record import Record
from kvwire.errors import UsageError, not_looked_up
from kvwire.types import Address

# How often the resolver is asked.
DNS_INTERVAL_S: Final = 5.0
# A resolver's own limit is often 5 s for each server that it asks.
_LOOK_UP_S: Final = 10.0
# An address is forgotten once so many answers lack it.
_ABSENCES: Final = 3

# The errors for a name that does not exist or has no address: there are no members.
_NOBODY: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class DnsDirectory(Directory):
    """Finds members by a name: ``dns://decode.default.svc:7400?role=decode``."""

    options: ClassVar[Mapping[str, str]] = {
        "interval_s": str(DNS_INTERVAL_S),
        "role": "",
        "model": "",
        "scheme": "tcp",
    }
    read_only = "the zone's owner"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        where = Address.parse(f"{self.url.scheme}://{self.url.netloc}")
        if not where.host or not where.port:
            raise UsageError(f'directory {self}: write "{self.url.scheme}://name:port"')
        self._host = where.host
        self._port = where.port
        self._interval_s = self.seconds("interval_s")
        try:
            self._host.encode("idna")  # the form in which a resolver gets it
        except UnicodeError as exc:
            raise UsageError(f"directory {self}: {self._host!r}: {exc}") from None
        self._record("::1")  # checks the URL's values

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        """Do nothing: members cannot announce themselves here."""

    async def erase(self, key: str) -> None:
        """Do nothing: nothing was written."""

    async def follow(self) -> AsyncGenerator[Batch, None]:
        six = False
        absences = _ABSENCES
        while True:
            try:
                async with asyncio.timeout(_LOOK_UP_S):
                    found = await look_up(self._host, self._port)
            except TimeoutError:
                late = not_looked_up(self._host, _LOOK_UP_S)
                raise TimeoutError(late) from None
            except socket.gaierror as exc:
                if exc.errno not in _NOBODY:
                    raise
                found = []
            hosts = dict.fromkeys(str(address[0]) for *_, address in found)
            # An incomplete answer may have one family's addresses alone.
            absences = 0 if any(is_six(h) is six for h in hosts) else absences + 1
            if absences >= _ABSENCES:
                six = prefers_six(hosts)
                absences = 0
            records = [self._record(host) for host in hosts if is_six(host) is six]
            yield {record.key: record.encode() for record in records}
            await asyncio.sleep(self._interval_s)

    def _record(
        self, host: str, name: str = "", labels: Mapping[str, str] | None = None
    ) -> Record:
        record = Record(
            name=name or host,
            address=str(Address(self.given["scheme"], host, self._port)),
            role=self.given["role"],
            model=self.given["model"],
            labels=dict(labels or {}),
            lease_s=3 * self._interval_s,
        )
        record.encode()
        return record


def is_six(host: str) -> bool:
    """Return whether an address is one of IPv6."""
    return ":" in host


def prefers_six(hosts: Iterable[str]) -> bool:
    """Return whether members with these addresses are reached by IPv6, not by IPv4."""
    one_of_each = {is_six(host): host for host in hosts}
    if len(one_of_each) < len((False, True)):
        return True in one_of_each
    return not _has_route(one_of_each[False]) and _has_route(one_of_each[True])


def _has_route(host: str) -> bool:
    family = socket.AF_INET6 if is_six(host) else socket.AF_INET
    try:
        socket.inet_pton(family, host)  # a name would be looked up, and block
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing
    except OSError:
        return False
    return True
