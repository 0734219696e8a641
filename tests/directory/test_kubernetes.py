"""Endpoints of a Service, as an API server tells them that is made here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import kvwire
from kvwire import UsageError
from kvwire.aio import Upkeep
from kvwire.directory import Change, Directory, dns, open_directory
from kvwire.directory.kubernetes import KUBERNETES_ANSWER_BYTES_MAX
from tests.directory.records import found_by
from tests.support.pairs import until

pytest.importorskip("httpx", reason="httpx is not installed")

Slice = dict[str, Any]


class ApiServer:
    """Answers lists, and keeps watches open until a test ends them."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.status = 200
        self.asked: list[tuple[str, dict[str, list[str]], str]] = []
        self.watches: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        self.url = ""

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        except asyncio.IncompleteReadError:  # its client was closed before it asked
            writer.close()
            return
        target = urlsplit(head[0].split()[1])
        query = parse_qs(target.query)
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        self.asked.append((target.path, query, fields.get("authorization", "")))
        writer.write(f"HTTP/1.1 {self.status} X\r\nConnection: close\r\n\r\n".encode())
        if "watch" in query and self.status == 200:
            await writer.drain()
            self.watches.put_nowait(writer)
            return
        listed = {"metadata": {"resourceVersion": "7"}, "items": self.slices}
        writer.write(json.dumps(listed).encode())
        writer.close()

    async def watch(self) -> Watch:
        return Watch(await self.watches.get())


class Watch:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def say(self, kind: str, found: dict[str, Any]) -> None:
        line = json.dumps({"type": kind, "object": found}).encode() + b"\n"
        # In two pieces, as the network may cut it.
        self._writer.write(line[:9])
        self._writer.write(line[9:])

    def end(self) -> None:
        self._writer.close()


def pods(name: str, *hosts: str, ready: bool | None = True) -> Slice:
    return {
        "metadata": {"name": name, "resourceVersion": "8"},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [host],
                "conditions": {} if ready is None else {"ready": ready},
                "targetRef": {"kind": "Pod", "name": f"pod-{host}"},
                "nodeName": "node-1",
            }
            for host in hosts
        ],
    }


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
    yield server
    listening.close()
    while not server.watches.empty():
        server.watches.get_nowait().close()


def directory_at(api: ApiServer, port: int = 7400, more: str = "") -> Directory:
    where = f"k8s://decode.prod:{port}?role=decode&model=m&api={api.url}{more}"
    return open_directory(where)


def said(change: Change) -> tuple[str, str]:
    return change.kind.name, change.record.name


async def test_pods_come_and_go(api: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    api.slices = [
        pods("a", "10.0.0.1"),
        pods("b", "10.0.0.2", ready=None),
        pods("c", "10.0.0.9", ready=False),
    ]
    directory = directory_at(api, more=f"&account={tmp_path}")
    async with aclosing(directory.watch("role=decode,model=m,host=node-1")) as changes:
        joined = [await anext(changes), await anext(changes)]
        assert {said(change) for change in joined} == {
            ("JOINED", "pod-10.0.0.1"),
            ("JOINED", "pod-10.0.0.2"),
        }
        assert joined[0].record.address == "tcp://10.0.0.1:7400"
        following = asyncio.ensure_future(anext(changes))
        watch = await api.watch()
        watch.say("BOOKMARK", pods(""))
        watch.say("MODIFIED", pods("c", "10.0.0.9"))
        assert said(await following) == ("JOINED", "pod-10.0.0.9")
        watch.say("DELETED", pods("c", "10.0.0.9"))
        assert said(await anext(changes)) == ("LEFT", "pod-10.0.0.9")
        # It moves to another slice: that is no change.
        watch.say("MODIFIED", pods("b", "10.0.0.2", "10.0.0.1"))
        watch.say("DELETED", pods("a", "10.0.0.1"))
        watch.say("MODIFIED", pods("b", "10.0.0.1", "10.0.0.2", ready=False))
        left = {said(await anext(changes)), said(await anext(changes))}
        assert left == {("LEFT", "pod-10.0.0.1"), ("LEFT", "pod-10.0.0.2")}
        watch.end()
    (path, query, token), (_, second, _), *_ = api.asked
    assert path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    assert query == {"labelSelector": ["kubernetes.io/service-name=decode"]}
    assert second == query | {
        "watch": ["1"],
        "resourceVersion": ["7"],
        "timeoutSeconds": ["30"],
    }
    assert token == "bearer secret"
    await directory.close()


async def test_pods_of_one_host_are_told_apart(api: ApiServer) -> None:
    api.slices = [pods("a", "10.0.0.1", "10.0.0.2")]
    directory = directory_at(api)
    found = await directory.members("host=node-1")
    assert {r.labels["node"] for r in found} == {"pod-10.0.0.1", "pod-10.0.0.2"}
    await directory.close()


async def test_a_pod_with_two_addresses_is_one_member(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def addressed(name: str, *hosts: str) -> Slice:
        found = pods(name, *hosts)
        for number, endpoint in enumerate(found["endpoints"]):
            endpoint["targetRef"]["name"] = f"pod-{number}"
        return found

    async def addresses(*slices: Slice) -> list[str]:
        api.slices = list(slices)
        directory = directory_at(api)
        found = await directory.members("role=decode")
        await directory.close()
        return sorted(record.address for record in found)

    four = addressed("four", "127.0.0.1", "127.0.0.2")
    six = addressed("six", "::1", "fd00::2")
    fours = ["tcp://127.0.0.1:7400", "tcp://127.0.0.2:7400"]
    assert await addresses(six, four) == fours
    assert await addresses(four, addressed("six", "::1")) == fours
    sixes = ["tcp://[::1]:7400", "tcp://[fd00::2]:7400"]
    assert await addresses(six) == sixes
    # A host without a route by IPv4 takes the other addresses.
    monkeypatch.setattr(dns, "_has_route", lambda host: ":" in host)
    assert await addresses(six, four) == sixes


async def test_what_a_watch_missed_is_in_the_next_list(api: ApiServer) -> None:
    api.slices = [pods("a", "10.0.0.1")]
    directory = directory_at(api)
    async with aclosing(directory.watch()) as changes:
        assert said(await anext(changes)) == ("JOINED", "pod-10.0.0.1")
        following = asyncio.ensure_future(anext(changes))
        watch = await api.watch()
        api.slices = [pods("a", "10.0.0.2")]
        watch.say("ERROR", {"kind": "Status", "code": 410})
        watch.end()
        both = {said(await following), said(await anext(changes))}
        assert both == {("LEFT", "pod-10.0.0.1"), ("JOINED", "pod-10.0.0.2")}
    await directory.close()


async def test_a_watch_that_ends_at_once_is_begun_ever_more_seldom(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    drawn = Upkeep.pause_s

    def noted(upkeep: Upkeep) -> float:
        pauses.append(drawn(upkeep))
        return 0.0

    monkeypatch.setattr(Upkeep, "pause_s", noted)
    directory = directory_at(api)
    async with aclosing(directory.follow()) as batches:
        await anext(batches)
        for _ in range(9):
            following = asyncio.ensure_future(anext(batches))
            (await api.watch()).end()
            await following
    # Each is drawn from the upper half of a limit that doubles, up to `interval_s`.
    limits = [min(0.1 * 2**n, 30.0) for n in range(len(pauses))]
    assert len(pauses) == 9
    assert all(b / 2 <= pause <= b for pause, b in zip(pauses, limits, strict=True))
    await directory.close()


@pytest.mark.parametrize(
    ("status", "slices", "says"),
    [
        (403, [], "the API server answered with status 403"),
        (200, [{"metadata": 5}], "Expected"),
        (
            200,
            ["x" * KUBERNETES_ANSWER_BYTES_MAX],
            "the API server's answer has more than",
        ),
    ],
)
async def test_what_is_no_list(
    status: int, slices: list[Any], says: str, api: ApiServer
) -> None:
    api.status, api.slices = status, slices
    directory = directory_at(api)
    with pytest.raises(kvwire.ConnectError, match=says):
        await directory.members()
    await directory.close()
    # httpx leaves iterators of an answer that is not read to its end to the collector,
    # which has the loop close them.
    await until(lambda: len(asyncio.all_tasks()) == 1)


@pytest.mark.parametrize("host", ["bad\nname", "10.0.0.1" * 4096])
async def test_an_endpoint_that_cannot_be_is_counted(host: str, api: ApiServer) -> None:
    api.slices = [pods("a", host, "10.0.0.2")]
    directory = directory_at(api)
    assert [r.name for r in await directory.members()] == ["pod-10.0.0.2"]
    assert directory.ignored == 1
    await directory.close()


async def test_a_peer_by_a_service(api: ApiServer) -> None:
    api.slices = [pods("a", "127.0.0.1")]
    where = f"k8s://decode.prod:{{port}}?role=decode&api={api.url}"
    name, refused = await found_by(where)
    assert name == "far"
    assert "Kubernetes" in refused


def test_a_pod_knows_its_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "k8s://service.namespace:7400"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="outside a pod"):
        open_directory(where)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert str(open_directory(where)) == where
