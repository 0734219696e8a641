"""A name and its addresses, as a resolver says them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest

from kvwire import UsageError
from kvwire.directory import ChangeKind, open_directory
from tests.directory.records import found_by


class Zone:
    """What the resolver says, in place of the loop's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: list[str] = []
        self.error = 0
        self.asked = 0
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(type(loop), "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **__: Any) -> list[Any]:
        self.asked += 1
        if self.error:
            raise socket.gaierror(self.error, "said so")
        return [
            (socket.AF_INET6 if ":" in h else socket.AF_INET, 0, 0, "", (h, port))
            for h in self.hosts
        ]


@pytest.mark.asyncio(loop_factories=["asyncio"])  # uvloop's methods cannot be replaced
async def test_addresses_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    zone = Zone(monkeypatch)
    zone.hosts = ["10.0.0.1", "10.0.0.3", "10.0.0.1"]
    directory = open_directory(
        "dns://decode.svc:7400?role=decode&model=m&interval_s=0.2"
    )
    found = await directory.members("role=decode,model=m")
    addresses = {record.address for record in found}
    assert addresses == {"tcp://10.0.0.1:7400", "tcp://10.0.0.3:7400"}
    async with aclosing(directory.watch()) as changes:
        joined = {(await anext(changes)).record.name for _ in range(2)}
        assert joined == {"10.0.0.1", "10.0.0.3"}
        zone.hosts = ["10.0.0.1", "10.0.0.2"]
        change = await anext(changes)
        assert (change.kind, change.record.name) == (ChangeKind.JOINED, "10.0.0.2")
        # After three answers without it.
        asked = zone.asked
        change = await anext(changes)
        assert (change.kind, change.record.name) == (ChangeKind.LEFT, "10.0.0.3")
        assert zone.asked - asked <= 3
    await directory.close()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_members_with_two_addresses_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zone = Zone(monkeypatch)
    directory = open_directory("dns://decode.svc:7400?interval_s=0.2")
    zone.hosts = ["::1", "fd00::2", "127.0.0.1", "127.0.0.2"]
    async with aclosing(directory.watch()) as changes:
        joined = {(await anext(changes)).record.name for _ in range(2)}
        assert joined == {"127.0.0.1", "127.0.0.2"}
        # An answer of one family is incomplete; by the third, the addresses are gone.
        asked, zone.hosts = zone.asked, ["::1"]
        change = await anext(changes)
        assert (change.kind, change.record.name) == (ChangeKind.JOINED, "::1")
        assert zone.asked - asked >= 3
    await directory.close()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_nobody_and_no_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    zone, directory = Zone(monkeypatch), open_directory("dns://decode.svc:7400")
    zone.error = socket.EAI_NONAME
    assert await directory.members() == ()
    zone.error = socket.EAI_AGAIN
    with pytest.raises(OSError, match="said so"):
        await directory.members()
    await directory.close()


async def test_a_peer_by_a_name() -> None:
    where = "dns://localhost:{port}?role=decode"
    name, refused = await found_by(where)
    assert name == "far"
    assert "the zone's owner" in refused


@pytest.mark.parametrize(
    "url",
    [
        "dns:",
        "dns://name",
        "dns://:7400",
        "dns://name:7400?interval_s=0.01",
        "dns://name:7400?interval_s=5000",
        "dns://name:7400?role=%0A",
        "k8s:",
        "k8s://service:7400?api=http://a",
        "k8s://service.namespace?api=http://a",
        "k8s://service.namespace:7400?api=ftp://a",
        "k8s://service.namespace:7400?api=http://a&interval_s=0.01",
    ],
)
def test_what_is_no_name_and_no_service(url: str) -> None:
    with pytest.raises(UsageError):
        open_directory(url)
