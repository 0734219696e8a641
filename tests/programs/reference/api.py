"""docs/reference/api.md and the pages below it: every public name, by topic."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from inspect import getattr_static
from typing import Final

import kvwire
from tests.programs.reference.docstrings import (
    Links,
    defined,
    described,
    found,
    members,
)
from tests.programs.reference.examples import INTRODUCTION, block
from tests.programs.reference.words import purpose, table

_INTRODUCTION: Final = """\
# The Python API

Written from the code by `make reference`: every public name by topic, with its
members. Elsewhere: [configuration](configuration.md), [errors](errors.md),
[metrics](metrics.md), and a table of [which call belongs to which](verbs.md) on the
other side.
"""


@dataclasses.dataclass(frozen=True)
class Topic:
    """A page of names.

    Attributes:
        page: The page's name, without its suffix.
        title: Its heading.
        text: A paragraph below that.
        names: The names, with their modules.
    """

    page: str
    title: str
    text: str
    names: tuple[str, ...]


TOPICS: Final = (
    Topic(
        "connect",
        "Connect",
        "`kvwire.open` returns a communicator; its `listen`, `connect` and `peer` make "
        "connections. Keyword arguments of `open` are keys of the "
        "[configuration](../configuration.md).",
        (
            "kvwire.open",
            "kvwire.Communicator",
            "kvwire.Address",
            "kvwire.TransportReport",
            "kvwire.types.Candidate",
        ),
    ),
    Topic(
        "connection",
        "Use a connection or a peer",
        "A peer dials a connection when it is first used, and has the same verbs.",
        (
            "kvwire.Connection",
            "kvwire.Peer",
            "kvwire.PeerInfo",
        ),
    ),
    Topic(
        "messages",
        "Send messages, lend memory",
        "`send`, `recv`, `put` and `get` of a [connection](connection.md) return a "
        "`Request`, which is awaited when its result is needed.",
        (
            "kvwire.Request",
            "kvwire.Region",
            "kvwire.Grant",
            "kvwire.Access",
            "kvwire.Window",
            "kvwire.RemoteWindow",
            "kvwire.Instant",
        ),
    ),
    Topic(
        "cache",
        "Describe a KV cache",
        "A cache is your own memory; kvwire reads and writes its blocks in place.",
        (
            "kvwire.KVSpec",
            "kvwire.PagedCache",
            "kvwire.BlockPool",
        ),
    ),
    Topic(
        "kv",
        "Move KV",
        "`publish` and `expect` of a [communicator](connect.md), `pull` and `push` of "
        "a [connection](connection.md) return one end of a transfer, which is awaited "
        "for its outcome.",
        (
            "kvwire.Outgoing",
            "kvwire.Incoming",
            "kvwire.join",
            "kvwire.Joined",
            "kvwire.Outcome",
            "kvwire.Timings",
            "kvwire.plan_prefill",
            "kvwire.PrefillRequest",
            "kvwire.PrefillPlan",
            "kvwire.memory.device.progress.LayerCounter",
        ),
    ),
    Topic(
        "store",
        "Keep KV in a store",
        "[How to use one](../../howto/store.md).",
        (
            "kvwire_store.BlockStore",
            "kvwire_store.StoreRequest",
            "kvwire_store.Placement",
            "kvwire_store.BlockState",
            "kvwire_store.StoreServer",
        ),
    ),
    Topic(
        "directory",
        "Find peers in a directory",
        "A communicator does this by itself: [announce, peer and members](connect.md). "
        "These names are for programs that only look, and for directories of your own "
        "([how-to](../../howto/directory.md)).",
        (
            "kvwire.directory.open_directory",
            "kvwire.directory.Directory",
            "kvwire.directory.Record",
            "kvwire.directory.Selector",
            "kvwire.directory.Change",
            "kvwire.directory.ChangeKind",
        ),
    ),
    Topic(
        "engine",
        "Use it from threads",
        "[How to use an engine](../../howto/use-from-a-sync-engine.md).",
        (
            "kvwire.Engine",
            "kvwire.EngineOutgoing",
            "kvwire.EngineIncoming",
        ),
    ),
    Topic(
        "observe",
        "Look inside",
        "What is open now, metrics and traces ([how-to](../../howto/observe.md)).",
        (
            "kvwire.Snapshot",
            "kvwire.endpoint.snapshot.ConnectionSnapshot",
            "kvwire.endpoint.snapshot.TransferSnapshot",
            "kvwire.endpoint.snapshot.PartSnapshot",
            "kvwire.endpoint.snapshot.CallSnapshot",
            "kvwire.observe.prometheus.CommunicatorCollector",
            "kvwire_store.prometheus.StoreCollector",
            "kvwire.observe.opentelemetry.TransferTracer",
        ),
    ),
    Topic(
        "migration",
        "Move a running request",
        "[How to move one](../../howto/migrate.md).",
        (
            "kvwire.migration.migrate",
            "kvwire.migration.Migration",
            "kvwire.migration.MigrationTarget",
            "kvwire.migration.RunningRequest",
            "kvwire.migration.Written",
            "kvwire.migration.Arrival",
        ),
    ),
    Topic(
        "testing",
        "Test your program",
        "[How to test a server](../../howto/test-your-server.md), [a "
        "backend](../../howto/write-a-backend.md) and [a "
        "tier](../../howto/write-a-tier.md).",
        (
            "kvwire.testing.harness.loopback",
            "kvwire.testing.harness.Loopback",
            "kvwire_certify.conformance.runner.check_backend",
            "kvwire_certify.conformance.runner.check_lanes",
            "kvwire_certify.conformance.runner.CheckOptions",
            "kvwire_certify.tiers.check_tier",
        ),
    ),
    Topic(
        "tiers",
        "Write a tier",
        "[How to write one](../../howto/write-a-tier.md).",
        (
            "kvwire_store.spi.Tier",
            "kvwire_store.spi.Batch",
            "kvwire_store.spi.BlockResult",
            "kvwire_store.spi.TierAddress",
        ),
    ),
    Topic(
        "services",
        "Write a tier on a key-value service",
        "The shortest way to a [tier](tiers.md) of your own.",
        (
            "kvwire_store.spi.KeyValueTier",
            "kvwire_store.spi.ValueIO",
        ),
    ),
)


def index() -> str:
    """The names of all topics."""
    parts = [_INTRODUCTION]
    for topic in TOPICS:
        where = f"api/{topic.page}.md"
        rows = table(("name", ""), (_row(name, where) for name in topic.names))
        parts.append(f"## [{topic.title}]({where})\n\n{rows}\n")
    return "\n".join(parts)


def page(topic: Topic) -> str:
    """One topic: each of its names with its signature, its docstring, an example."""
    links = _links()
    names = [described(name, links, block(name, links.pages)) for name in topic.names]
    text = f"{topic.text} [Other topics](../api.md)."
    return "\n\n".join((f"# {topic.title}", text, INTRODUCTION, *names)) + "\n"


@cache
def _links() -> Links:
    """Where each name is explained."""
    found_at: dict[str, str] = {}
    first: dict[object, str] = {}
    for topic in TOPICS:
        for name in topic.names:
            found_at[name] = f"{topic.page}.md#{name}"
            thing = found(name)
            for member in members(thing):
                whole = f"{name}.{member}"
                found_at[whole] = f"{topic.page}.md#{whole}"
                first.setdefault(defined(getattr_static(thing, member)), whole)
    for name in kvwire.__all__:
        thing = getattr(kvwire, name)
        if inspect.isclass(thing) and issubclass(thing, kvwire.KVWireError):
            found_at[f"kvwire.{name}"] = f"../errors.md#{name}"
    return Links(found_at, first)


def _row(name: str, where: str) -> tuple[str, str]:
    short = name if name.count(".") > 1 else name.removeprefix("kvwire.")
    return f"[`{short}`]({where}#{name})", purpose(found(name))
