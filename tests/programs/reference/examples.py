"""The example below each name of the reference: the body of a function here.

A test runs each one. Arguments are what most examples need; INTRODUCTION explains them.
"""

from __future__ import annotations

import asyncio
import inspect
import textwrap
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

import kvwire
import kvwire_store
from kvwire import Communicator, Connection, PagedCache
from kvwire.directory import ChangeKind, Selector, open_directory
from kvwire.memory import LayerCounter
from kvwire.migration import (
    Arrival,
    MigrationTarget,
    Written,
    migrate,
)
from kvwire.observe.opentelemetry import TransferTracer
from kvwire.observe.prometheus import CommunicatorCollector
from kvwire.testing.harness import loopback
from kvwire.types import TrustMode
from kvwire_certify.conformance.runner import check_backend, check_lanes
from kvwire_certify.tiers import check_tier
from kvwire_store.prometheus import StoreCollector
from kvwire_store.spi import TierAddress

Example: TypeAlias = Callable[..., Awaitable[None]]
MakeCache: TypeAlias = Callable[[], PagedCache]
EXAMPLES: Final[dict[str, Example]] = {}
INTRODUCTION: Final = """\
Examples run within `async def main()`. In them, `a` and `b` are two open communicators
and `ab` and `ba` the two ends of a connection between them, as
[`kvwire.testing.loopback`](testing.md) makes them. `cache()` returns a
[`PagedCache`](cache.md#kvwire.PagedCache) of 2 layers and 8 blocks, `folder` is an
empty folder, `np` is NumPy."""


def shows(*names: str) -> Callable[[Example], Example]:
    """Put the function's body below these names."""

    def keep(example: Example) -> Example:
        for name in names:
            assert name not in EXAMPLES, f"{name} has an example"
            EXAMPLES[name] = example
        return example

    return keep


_TIER: Final = "examples/third_party_tier/kvwire_sqlite/__init__.py"
ELSEWHERE: Final = {
    f"kvwire_store.spi.{name}": _TIER
    for name in ("Tier", "KeyValueTier", "ValueIO", "Batch", "BlockResult")
}
"""Names whose example is a program of the tree, which has tests of its own."""


def block(name: str, pages: Mapping[str, str]) -> str:
    """The example of a name as Markdown; ``pages`` has the place of each name."""
    if name in ELSEWHERE:
        return f"Example: [{ELSEWHERE[name]}](../../../{ELSEWHERE[name]})."
    first = next(one for one in EXAMPLES if EXAMPLES[one] is EXAMPLES[name])
    if first != name:
        return f"Example: below [`{first.rpartition('.')[2]}`]({pages[first]})."
    source = inspect.getsource(EXAMPLES[name])
    body = source.partition(") -> None:\n")[2]
    code = textwrap.dedent(body).strip()
    return f"<!-- fragment -->\n```python\n{code}\n```"


def cache() -> PagedCache:
    return PagedCache.of([np.zeros((8, 2, 4, 2, 8), np.float16) for _ in range(2)])


async def expect_runs(name: str, folder: Path) -> None:
    """Run an example with the arguments that it takes."""
    example = EXAMPLES[name]
    async with loopback() as pair:
        offered = {
            "a": pair.a,
            "b": pair.b,
            "ab": pair.ab,
            "ba": pair.ba,
            "cache": cache,
            "folder": folder,
        }
        wanted = inspect.signature(example).parameters
        await example(**{one: offered[one] for one in wanted})


# --- connect --------------------------------------------------------------------------


@shows("kvwire.open")
async def _() -> None:
    async with kvwire.open(name="decode-0", lanes=2) as comm:
        assert comm.name == "decode-0"


@shows("kvwire.Communicator", "kvwire.Address")
async def _(a: Communicator, b: Communicator) -> None:
    address = await b.listen("127.0.0.1:0")  # any free port
    outbound = await a.connect(address)  # or "127.0.0.1:7400"
    inbound = await b.accept()
    await outbound.send(1, b"hello")
    assert await inbound.recv(1) == b"hello"


@shows("kvwire.Connection", "kvwire.Request")
async def _(ab: Connection, ba: Connection) -> None:
    reply = ba.recv(7)  # begins now
    await ab.send(7, b"hello", deadline=5.0)
    assert await reply == b"hello"


@shows("kvwire.Peer")
async def _(a: Communicator, b: Communicator) -> None:
    address = await b.listen("127.0.0.1:0")
    peer = a.peer(str(address))  # not dialled yet
    await peer.send(7, b"hello")
    assert await (await b.accept()).recv(7) == b"hello"


@shows("kvwire.PeerInfo")
async def _(ab: Connection) -> None:
    assert ab.peer.name == "b"
    assert ab.peer.trust is TrustMode.LOOPBACK


@shows("kvwire.TransportReport", "kvwire.types.Candidate")
async def _(ab: Connection) -> None:
    for candidate in ab.transport_report.candidates:
        print(candidate.name, candidate.taken, candidate.reason)


# --- messages -------------------------------------------------------------------------


@shows("kvwire.Region", "kvwire.Grant", "kvwire.Access")
async def _(a: Communicator, ab: Connection, ba: Connection) -> None:
    memory = bytearray(1024)
    region = a.register(memory, access="write")
    grant = region.grant(ab, nbytes=16)
    await ab.send(1, grant.to_bytes())

    received = kvwire.Grant.from_bytes(await ba.recv(1))
    await ba.put(b"0123", received[:4])
    assert memory[:4] == b"0123"
    await region.close()  # from here on the memory is the application's alone


@shows("kvwire.Window", "kvwire.RemoteWindow")
async def _(a: Communicator, ab: Connection, ba: Connection, cache: MakeCache) -> None:
    window = a.expose("kv", cache())
    await ab.send(1, window.offer([3, 4]))  # the ticket

    ticket = bytes(await ba.recv(1))
    remote = await ba.window("kv")
    outcome = await remote.get(ticket, into=cache(), blocks=[0, 1])
    assert outcome.complete
    await remote.close()
    await window.close()


@shows("kvwire.Instant")
async def _(ab: Connection, ba: Connection) -> None:
    loop = asyncio.get_running_loop()
    until = kvwire.Instant(loop.time() + 5)  # one budget for both calls
    await ab.send(1, b"question", deadline=until)
    assert await ba.recv(1, deadline=until) == b"question"


# --- KV -------------------------------------------------------------------------------


@shows("kvwire.KVSpec")
async def _() -> None:
    spec = kvwire.KVSpec(
        layers=32,
        kv_heads=8,
        head_dim=128,
        block_tokens=16,
        dtype="bfloat16",
        fingerprint="llama-3.1-8b@4f1c",
    )
    assert spec.block_bytes == 32 * 2 * 16 * 8 * 128 * 2


@shows("kvwire.PagedCache")
async def _() -> None:
    shape = (64, 2, 16, 8, 128)  # blocks, keys and values, tokens, heads, dim
    layers = [np.zeros(shape, np.float16) for _ in range(4)]
    cache = kvwire.PagedCache.of(layers, fingerprint="llama-3.1-8b@4f1c")
    assert cache.num_blocks == 64
    assert cache.spec.block_tokens == 16


@shows("kvwire.BlockPool")
async def _() -> None:
    pool = kvwire.BlockPool(num_blocks=64, block_tokens=16)
    blocks = pool.allocate(pool.blocks_for(40))
    pool.cache(blocks[:2], [b"hash 0", b"hash 1"])  # two are full
    pool.free(blocks)
    assert pool.lookup([b"hash 0", b"hash 1", b"hash 2"]) == blocks[:2]


@shows("kvwire.Outgoing", "kvwire.Incoming", "kvwire.Outcome", "kvwire.Timings")
async def _(a: Communicator, ba: Connection, cache: MakeCache) -> None:
    out = a.publish("request-1", cache(), [5, 6])
    inc = ba.pull("request-1", cache(), [0, 1])
    for layer in range(2):
        out.ready(layers=layer)  # computed: sent at once
        await inc.layer(layer)  # landed: may be read
    out.finish()
    outcome = await inc
    assert outcome.complete
    print(outcome.timings.wire_s)
    await out.drained()  # blocks 5 and 6 may be written again


@shows("kvwire.join", "kvwire.Joined")
async def _(a: Communicator, ba: Connection, cache: MakeCache) -> None:
    here = cache()
    # Each rank of a producer sends its own heads; in this example both send all.
    ranks = [ba.pull(f"request-1/{rank}", here, [0]) for rank in range(2)]
    for rank in range(2):
        out = a.publish(f"request-1/{rank}", cache(), [5])
        out.ready()
        out.finish()
    outcome = await kvwire.join(*ranks)
    assert outcome.complete


@shows("kvwire.plan_prefill", "kvwire.PrefillRequest", "kvwire.PrefillPlan")
async def _(a: Communicator, ba: Connection, cache: MakeCache) -> None:
    out = a.publish("r", cache(), [5, 6])
    out.ready(blocks=0)
    out.finish(partial=True)  # the second block was never computed
    outcome = await ba.pull("r", cache(), [0, 1])

    request = kvwire.PrefillRequest(id="r", num_tokens=8, blocks=[0, 1], block_tokens=4)
    plan = kvwire.plan_prefill([request], {"r": outcome})
    print(plan.prefill["r"])  # tokens 4 to 8 are left to compute


@shows("kvwire.memory.device.progress.LayerCounter")
async def _(a: Communicator, cache: MakeCache) -> None:
    word = memoryview(bytearray(8))  # on a GPU: pinned memory, written by the graph
    counter = LayerCounter(2, word)
    out = a.publish("r", cache(), [0])
    replay = counter.begin()
    for layer in range(2):
        out.ready(layers=layer, after=replay.layer(layer))
    word.cast("q")[0] = replay.base + 2  # the graph, after its second layer
    out.abort()
    counter.close()


# --- store ----------------------------------------------------------------------------


@shows("kvwire_store.BlockStore", "kvwire_store.StoreRequest")
async def _(cache: MakeCache, folder: Path) -> None:
    tiers = ["memory:4MiB", f"disk:{folder}?size=16MiB"]
    hashes = [b"hash 0", b"hash 1"]
    async with kvwire_store.BlockStore.open(tiers) as store:
        await store.put(hashes, cache(), [0, 1])
        assert await store.match([*hashes, b"hash 2"]) == 2
        assert (await store.get(hashes, cache(), [6, 7])).complete


@shows("kvwire_store.Placement", "kvwire_store.BlockState")
async def _(cache: MakeCache) -> None:
    async with kvwire_store.BlockStore.open(["memory:4MiB"]) as store:
        await store.put([b"hash 0"], cache(), [0])
        placement = await store.pin([b"hash 0", b"hash 1"], ttl_s=60)
        assert placement.states[0] == kvwire_store.BlockState.DONE
        assert placement.counts["missing"] == 1


@shows("kvwire_store.StoreServer")
async def _(cache: MakeCache) -> None:
    async with (
        kvwire_store.BlockStore.open(["memory:64MiB"]) as shared,
        kvwire_store.StoreServer(shared, "127.0.0.1:0") as server,
    ):
        tier = f"kvwire://{server.address.host}:{server.address.port}"
        async with kvwire_store.BlockStore.open(["memory:4MiB", tier]) as store:
            await store.put([b"hash 0"], cache(), [0])


# --- directory ------------------------------------------------------------------------


@shows(
    "kvwire.directory.open_directory",
    "kvwire.directory.Directory",
    "kvwire.directory.Record",
    "kvwire.directory.Selector",
)
async def _(folder: Path) -> None:
    url = f"file:{folder}"
    async with kvwire.open(name="decode-0", directory=url) as comm:
        await comm.listen("127.0.0.1:0")
        comm.announce(role="decode")
        directory = open_directory(url)
        async for change in directory.watch(Selector.parse("role=decode")):
            record = change.record
            assert (record.name, record.load) == ("decode-0", 0)
            break
        assert await directory.members("role=decode") == (record,)
        await directory.close()


@shows("kvwire.directory.Change", "kvwire.directory.ChangeKind")
async def _(folder: Path) -> None:
    url = f"file:{folder}"
    async with kvwire.open(name="decode-0", directory=url) as comm:
        await comm.listen("127.0.0.1:0")
        comm.announce(role="decode")
        directory = open_directory(url)
        async for change in directory.watch():
            assert change.kind is ChangeKind.JOINED
            assert change.record.name == "decode-0"
            break
        await directory.close()


# --- threads --------------------------------------------------------------------------


@shows("kvwire.Engine", "kvwire.EngineOutgoing", "kvwire.EngineIncoming")
async def _(cache: MakeCache) -> None:
    # No await: any thread may make these calls.
    with kvwire.Engine(name="prefill") as prefill, kvwire.Engine() as decode:
        address = prefill.listen("127.0.0.1:0")
        out = prefill.publish("request-1", cache(), [5])
        inc = decode.pull(str(address), "request-1", cache(), [0])
        out.ready()
        out.finish()
        assert inc.wait(timeout=30).complete


# --- observe --------------------------------------------------------------------------


@shows(
    "kvwire.Snapshot",
    "kvwire.endpoint.snapshot.ConnectionSnapshot",
    "kvwire.endpoint.snapshot.TransferSnapshot",
    "kvwire.endpoint.snapshot.PartSnapshot",
    "kvwire.endpoint.snapshot.CallSnapshot",
)
async def _(a: Communicator, cache: MakeCache) -> None:
    out = a.publish("request-1", cache(), [0])
    snapshot = a.snapshot()
    print(snapshot.transfers[0].id, snapshot.connections[0].silent_s)
    print(msgspec.json.encode(snapshot))
    out.abort()


@shows("kvwire.observe.prometheus.CommunicatorCollector")
async def _(a: Communicator) -> None:
    registry = CollectorRegistry()  # or the global one
    registry.register(CommunicatorCollector(a))
    text = generate_latest(registry).decode()
    assert 'kvwire_connections_total{communicator="a"}' in text


@shows("kvwire_store.prometheus.StoreCollector")
async def _() -> None:
    async with kvwire_store.BlockStore.open(["memory:4MiB"]) as store:
        registry = CollectorRegistry()
        registry.register(StoreCollector(store, "cache"))
        assert 'store="cache"' in generate_latest(registry).decode()


@shows("kvwire.observe.opentelemetry.TransferTracer")
async def _(a: Communicator, cache: MakeCache) -> None:
    tracer = TransferTracer(a)  # the global provider of OpenTelemetry
    out = a.publish("request-1", cache(), [0])
    print(out.traceparent)  # "" as long as nothing is set up to record spans
    out.abort()
    tracer.close()


# --- migration ------------------------------------------------------------------------


@shows(
    "kvwire.migration.migrate",
    "kvwire.migration.Migration",
    "kvwire.migration.MigrationTarget",
    "kvwire.migration.RunningRequest",
    "kvwire.migration.Written",
    "kvwire.migration.Arrival",
)
async def _(b: Communicator, ab: Connection, ba: Connection, cache: MakeCache) -> None:
    class Running:
        """A request of 7 tokens that is never in a step."""

        name = "request-1"
        cache = PagedCache.of([np.zeros((8, 2, 4, 2, 8), np.float16) for _ in range(2)])

        def written(self) -> Written:
            return Written(blocks=[3, 4], tokens=7)

        async def pause(self) -> None: ...
        def resume(self) -> None: ...
        def state(self) -> bytes:
            return b"sampler"

        def release(self) -> None: ...

    free = [5, 6, 7]
    arrived: list[Arrival] = []
    target = MigrationTarget(
        b,
        cache(),
        take=lambda count: [free.pop() for _ in range(count)],
        give_back=free.extend,
        start=arrived.append,
    )
    serving = asyncio.create_task(target.serve(ba))
    moved = await migrate(ab, Running())
    assert moved.result == "moved"
    assert arrived[0].tokens == 7
    await ab.close()
    await serving


# --- testing --------------------------------------------------------------------------


@shows("kvwire.testing.harness.loopback", "kvwire.testing.harness.Loopback")
async def _() -> None:
    async with loopback() as pair:
        await pair.ab.send(7, b"hello")
        assert await pair.ba.recv(7) == b"hello"


@shows(
    "kvwire_certify.conformance.runner.check_backend",
    "kvwire_certify.conformance.runner.CheckOptions",
)
async def _() -> None:
    # Your backend's class or name; without `only` it is all checks.
    report = await check_backend("inproc", only=["payload.size[0]"])
    assert not report.failed


@shows("kvwire_certify.conformance.runner.check_lanes")
async def _() -> None:
    report = await check_lanes("inproc", only=["join.idle"])
    assert not report.failed


@shows("kvwire_certify.tiers.check_tier")
async def _(folder: Path) -> None:
    report = await check_tier(f"disk:{folder}?size=16MiB", only=["found.landed"])
    assert not report.failed


@shows("kvwire_store.spi.TierAddress")
async def _() -> None:
    address = TierAddress.parse("disk:/var/kv?size=1GiB")
    assert address.scheme == "disk"
    assert address.options == {"size": "1GiB"}
