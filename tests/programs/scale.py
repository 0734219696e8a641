"""The arithmetic of a large fleet, from what one of each thing costs on this machine.

    python -m tests.programs.scale --engines 10000 --proxies 40

Measures an idle connection, a ping, a record of a directory and the choice of an
engine, multiplies them with the limits and intervals of the code, and says which bound
is reached first. It takes half a minute. See docs/topics/scale.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kvwire
from kvwire.directory.base import Batch
from kvwire.directory.limits import MEMBER_LEASE_S, MEMBERS_MAX
from kvwire.directory.members import Members
from kvwire.directory.record import Record
from kvwire.directory.redis import RedisDirectory
from kvwire.directory.selector import Selector
from kvwire.integrations.vllm.announce import DECODE
from kvwire.integrations.vllm.proxy.engines import VllmServer
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.limits import CONNECTIONS_MAX, KIB, MIB, PING_INTERVAL_S
from kvwire.security.keys import write_key_file
from tests.programs.bench.cost import resident_bytes
from tests.support.runs import python
from tests.support.servers import redis_server
from tests.support.tree import ROOT

MODULE: Final = "tests.programs.scale"
# A member writes its record three times in its lease.
RENEWAL_S: Final = MEMBER_LEASE_S / 3
# What a process may be kept busy with by things that move no KV.
BUSY: Final = 0.05


@dataclass(frozen=True, slots=True)
class Units:
    """What one of each costs; bytes, and seconds of a CPU."""

    connection_bytes: float  # an idle connection, one side
    ping_s: float  # one side's ping, and its answer to the peer's
    record_bytes: int
    write_s: float  # one renewal, in the directory's server
    delivery_s: float  # telling one watcher of it, likewise
    renewal_s: float  # one renewal, in the engine
    watched_s: float  # one renewal of another, in a process that watches
    choice_s: float  # one engine more to choose from, in the proxy


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    what: str
    value: str
    how: str


@dataclass(frozen=True, slots=True)
class Bound:
    """A number of engines, above which something gives way."""

    engines: float
    what: str


def table(units: Units, engines: int, proxies: int, rate: float) -> list[Row]:
    """The load of each part of a fleet, half of which prefills."""
    renewals = engines / RENEWAL_S
    peers = engines // 2
    chosen_from = engines / 2
    return [
        Row(
            "renewals that the directory takes, a second",
            f"{renewals:,.0f}",
            f"{engines:,} engines / {RENEWAL_S:.2f} s",
        ),
        Row(
            "deliveries to proxies, a second",
            f"{renewals * proxies:,.0f}",
            f"each renewal to {proxies} proxies",
        ),
        Row(
            "what one watcher reads",
            f"{renewals * units.record_bytes / MIB:.2f} MiB/s",
            f"{units.record_bytes} bytes a renewal",
        ),
        Row(
            "a core of the directory's server",
            f"{renewals * (units.write_s + proxies * units.delivery_s):.0%}",
            f"{units.write_s * 1e6:.0f} us a write, "
            f"{units.delivery_s * 1e6:.1f} us a delivery",
        ),
        Row(
            "a core of each proxy, to watch",
            f"{renewals * units.watched_s:.0%}",
            f"{units.watched_s * 1e6:.0f} us a renewal",
        ),
        Row(
            "a core of each engine, to renew",
            f"{units.renewal_s / RENEWAL_S:.3%}",
            f"{units.renewal_s * 1e6:.0f} us every {RENEWAL_S:.2f} s",
        ),
        Row(
            "a core of each proxy, to choose",
            f"{2 * rate * chosen_from * units.choice_s:.0%}",
            f"2 choices of {chosen_from:,.0f} for {rate:g} requests/s, "
            f"{units.choice_s * 1e6:.2f} us an engine",
        ),
        Row(
            "connections of an engine that has met all of the other role",
            f"{peers:,}",
            f"of at most {CONNECTIONS_MAX:,}",
        ),
        Row(
            "their memory, idle",
            f"{peers * units.connection_bytes / MIB:.0f} MiB",
            f"{units.connection_bytes / KIB:.0f} KiB each",
        ),
        Row(
            "pings that it sends, a second",
            f"{peers / PING_INTERVAL_S:,.0f}",
            f"one each {PING_INTERVAL_S:g} s, and an answer to each of the peer's",
        ),
        Row(
            "a core of that engine, to ping",
            f"{peers / PING_INTERVAL_S * units.ping_s:.0%}",
            f"{units.ping_s * 1e6:.0f} us for one, and for an answer",
        ),
    ]


def bounds(units: Units, proxies: int, rate: float) -> list[Bound]:
    """What gives way first, and at how many engines."""
    per_engine = (units.write_s + proxies * units.delivery_s) / RENEWAL_S
    # Each of n engines writes, and each write goes to all n.
    root = (units.write_s**2 + 4 * units.delivery_s * RENEWAL_S) ** 0.5
    found = [
        Bound(MEMBERS_MAX, "a watcher knows MEMBERS_MAX members, and no more"),
        Bound(2 * CONNECTIONS_MAX, "an engine has CONNECTIONS_MAX connections"),
        Bound(
            1 / per_engine, f"a core of the directory's server, with {proxies} proxies"
        ),
        Bound(
            RENEWAL_S / units.watched_s,
            "a core of each process that watches the directory",
        ),
        Bound(
            1 / (rate * units.choice_s),
            f"a core of a proxy with {rate:g} requests/s, to choose",
        ),
        Bound(
            2 * BUSY * PING_INTERVAL_S / units.ping_s,
            f"{BUSY:.0%} of a core of an engine, to ping all of the other role",
        ),
        Bound(
            (root - units.write_s) / (2 * units.delivery_s),
            "a core of the directory's server, if every engine watches it",
        ),
    ]
    return sorted(found, key=lambda bound: bound.engines)


# --- what one costs -------------------------------------------------------------------


def _record(number: int) -> Record:
    """Much the same as that of an engine of vLLM."""
    return Record(
        name=f"engine-{number}",
        address=f"10.1.{number % 200}.{number // 200 % 200}:7400",
        incarnation=f"{number:032x}",
        role="decode",
        model="llama-3.1-8b@4f1c2d3e5a6b7c8d",
        specs={"0": "9f8e7d6c5b4a3f2e1d0c9b8a7f6e5d4c"},
        transports=("local", "tcp", "ucx"),
        labels={
            "http": f"http://10.1.{number % 200}.7:8100",
            "zone": "a",
            "slots": "256",
        },
    )


async def connections(count: int, seconds: float, folder: Path) -> tuple[float, float]:
    """Bytes of an idle connection, and CPU of a ping and an answer, one side each.

    Both sides are in this process. They have a key, so control frames are sealed.
    """
    key = folder / "key"
    write_key_file(key)
    config = kvwire.Config(trust="psk", psk_file=str(key), forbid=("local",))
    async with kvwire.open(config) as left, kvwire.open(config) as right:
        address = await left.listen("127.0.0.1:0")
        kept = [await right.connect(address) for _ in range(8)]
        gc.collect()
        before = resident_bytes()
        kept += [await right.connect(address) for _ in range(count)]
        memory = (resident_bytes() - before) / (2 * count)
        await asyncio.sleep(PING_INTERVAL_S)
        start_s = time.process_time()
        await asyncio.sleep(seconds)
        busy_s = time.process_time() - start_s
        assert not any(connection.closed for connection in kept)
        return memory, busy_s / (2 * len(kept)) * PING_INTERVAL_S / seconds


def writer(url: str, count: int) -> None:
    """Renew records, as engines do; a process of its own."""

    async def renew() -> None:
        directory = RedisDirectory(url)
        for number in range(count):
            record = _record(number % 100)
            await directory.write(record.key, record.encode(), record.lease_s)
        await directory.close()

    asyncio.run(renew())


async def _in_a_process(url: str, count: int, spent: Callable[[], float]) -> float:
    """What each renewal by another process adds to `spent`."""
    before = spent()
    code = f"from {MODULE} import writer; writer({url!r}, {count})"
    await asyncio.to_thread(python, "-c", code, check=True, cwd=ROOT)
    return (spent() - before) / count


@contextmanager
def _watchers(port: int, count: int) -> Iterator[None]:
    """Connections that subscribe, and whose messages nobody reads for a while."""
    with ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * MIB)
            one.sendall(b"SUBSCRIBE kvwire:members\r\n")
            one.recv(100)
        yield


async def directory(count: int) -> tuple[float, float, float, float]:
    """CPU of a renewal: in the server, for each watcher, in engine and watcher."""
    from redis import Redis

    with redis_server("--save", "", "--maxclients", "1000") as server:
        url = f"redis://127.0.0.1:{server.port}"
        client: Any = Redis(port=server.port)

        def of_server() -> float:
            said = client.info("cpu")
            return float(said["used_cpu_user"] + said["used_cpu_sys"])

        alone_s = await _in_a_process(url, count, of_server)
        many = 64
        with _watchers(server.port, many):
            watched_s = await _in_a_process(url, count, of_server)
        delivery_s = max(watched_s - alone_s, 0.0) / many

        directory = RedisDirectory(url)
        members = Members(Selector.parse("role=decode"))
        batches = directory.follow()
        await anext(batches)
        renewals = asyncio.create_task(_count(batches, members, count))
        follower_s = await _in_a_process(url, count, time.process_time)
        await renewals
        await batches.aclose()

        start_s = time.process_time()
        await asyncio.to_thread(writer, url, count)
        renewal_s = (time.process_time() - start_s) / count
        await directory.close()
        client.close()
    return alone_s, delivery_s, renewal_s, follower_s


async def _count(
    batches: AsyncGenerator[Batch, None], members: Members, count: int
) -> None:
    seen = 0
    while seen < count:
        for key, raw in (await anext(batches)).items():
            if raw is not None:
                members.put(key, raw, time.monotonic())
                seen += 1


def choice(engines: int, times: int = 200) -> float:
    """CPU of a choice, for each engine that is looked at."""
    fleet = EngineFleet(
        decode=[
            VllmServer(f"http://10.1.{n % 200}.{n // 200}:8100", ("10.0.0.1:7400",))
            for n in range(engines)
        ]
    )
    for number, engine in enumerate(fleet.engines):
        engine.running = 1 + number % 3
    body = {"prompt": "One block after the other, said the mouse. " * 20}
    start_s = time.process_time()
    for _ in range(times):
        assert fleet.pick(DECODE, body, ())
    return (time.process_time() - start_s) / times / engines


async def measured(*, peers: int, seconds: float, renewals: int, times: int) -> Units:
    """What one of each costs here."""
    with tempfile.TemporaryDirectory() as folder:
        memory, ping_s = await connections(peers, seconds, Path(folder))
    write_s, delivery_s, renewal_s, watched_s = await directory(renewals)
    return Units(
        connection_bytes=memory,
        ping_s=ping_s,
        record_bytes=len(_record(1).key) + 1 + len(_record(1).encode()),
        write_s=write_s,
        delivery_s=delivery_s,
        renewal_s=renewal_s,
        watched_s=watched_s,
        choice_s=choice(2000, times),
    )


def main() -> None:
    """Print the table, and what gives way first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=10_000)
    parser.add_argument("--proxies", type=int, default=40)
    parser.add_argument("--rate", type=float, default=100, help="requests/s of a proxy")
    options = parser.parse_args()
    units = asyncio.run(measured(peers=200, seconds=8, renewals=3000, times=200))
    print("| | | from |\n|---|---|---|")
    for row in table(units, options.engines, options.proxies, options.rate):
        print(f"| {row.what} | {row.value} | {row.how} |")
    print("\n| engines | what gives way |\n|---|---|")
    for bound in bounds(units, options.proxies, options.rate):
        print(f"| {bound.engines:,.0f} | {bound.what} |")


if __name__ == "__main__":
    main()
