"""Wrong calls: messages, grants, KV transfers, threads, forgotten words."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import kvwire
from kvwire import Outcome, UsageError
from tests.support.wrong_uses import steps
from tests.support.wrong_uses.things import SPEC, WrongUse, cache

# Wrong types are refused by type checkers as well, which are not asked here.
untyped: Any = kvwire


def call(name: str, do: Any, words: str, error: type = UsageError) -> WrongUse:
    return WrongUse(f"`{name}`", do, error, words)


class StandIn(NamedTuple):
    """An argument that is made when its row is done."""

    name: str
    make: Callable[[Any], Any]

    def __repr__(self) -> str:
        return self.name


CACHE: Final = StandIn("cache", lambda t: t.kv)
GRANT: Final = StandIn("grant", steps.grant)
# What a path begins with.
_OBJECTS: Final[dict[str, Callable[[Any], Any]]] = {
    "conn": lambda t: t.conn,
    "comm": lambda t: t.b,
    "out": lambda t: t.b.publish("x", t.kv, [0]),
    "inc": lambda t: t.b.expect("x", t.kv, [0]),
    "kvwire": lambda _: kvwire,
    "Grant": lambda _: kvwire.Grant,
    "KVSpec": lambda _: steps.spec,
}


class Arguments:
    """What a call is given."""

    def __init__(self, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.given, self.options = given, options

    def __repr__(self) -> str:
        options = (f"{key}={value!r}" for key, value in self.options.items())
        return f"({', '.join([*map(repr, self.given), *options])})"

    def on(self, path: str, t: Any) -> Any:
        """Call what a path such as ``await inc.layer`` means."""
        first, *names = path.removeprefix("await ").split(".")
        found = _OBJECTS[first](t)
        for name in names:
            found = getattr(found, name)
        given = [one.make(t) if isinstance(one, StandIn) else one for one in self.given]
        return found(*given, **self.options)


def a(*given: Any, **options: Any) -> Arguments:
    """Keep arguments for the row they stand in."""
    return Arguments(given, options)


def calls(path: str, *rows: tuple[Arguments, str]) -> list[WrongUse]:
    """Make a row for each list of arguments."""
    return [
        call(f"{path}{given!r}", partial(given.on, path), words)
        for given, words in rows
    ]


MESSAGES: Final = [
    *calls(
        "conn.send",
        (a(-1, b"x"), "tag=-1: an integer from 0 to 2**64 - 1 is needed"),
        (a("1", b"x"), "tag='1': an integer from 0 to 2**64 - 1 is needed"),
        (a(True, b"x"), "tag=True: an integer from 0 to 2**64 - 1 is needed"),
        (a(1, "text"), "buffer: str is no memory that kvwire can use; pass its bytes"),
        (a(1, None), "buffer: NoneType is no memory that kvwire can use; pass"),
        (a(1, [1, 2]), "buffer: list is no memory that kvwire can use; pass bytes, a"),
        (a(1, b"x", deadline="soon"), "deadline='soon': pass a time of the loop's"),
        (a(1, b"x", deadline=-1), "deadline=-1: pass a time of the loop's clock"),
    ),
    call(
        "conn.send(2**64, b'x')",
        lambda t: t.conn.send(2**64, b"x"),
        "tag=18446744073709551616: an integer from 0 to 2**64 - 1 is",
    ),
    call(
        "conn.send(1, array[::2])",
        lambda t: t.conn.send(1, np.zeros(8)[::2]),
        "buffer: the memory is not C-contiguous (shape (4,), strides",
    ),
    call(
        "conn.send(1, b'x', deadline=nan)",
        lambda t: t.conn.send(1, b"x", deadline=math.nan),
        "deadline=nan: pass a time of the loop's clock (loop.time() +",
    ),
    *calls(
        "conn.recv",
        (a(1.5), "tag=1.5: an integer from 0 to 2**64 - 1 is needed"),
        (a(1, into=b"read-only"), "into: bytes is read-only; pass a bytearray, a"),
        (a(1, into="text"), "into: str is no memory that kvwire can use; pass its"),
        (a(1, into=100), "into: int is no memory that kvwire can use; pass bytes, a"),
    ),
    *calls(
        "conn.put",
        (a(b"x", "grant"), "grant: a kvwire.Grant of the peer is needed, and this is"),
        (a(b"x", None), "grant: a kvwire.Grant of the peer is needed, and this is a"),
    ),
    call(
        "conn.put(b'x', grant of 8 bytes)",
        lambda t: t.conn.put(b"x", steps.grant(t)),
        "the buffer has 1 bytes and the grant 8; pass grant[a:b] of",
    ),
    *calls(
        "conn.get",
        (a(GRANT, b"12345678"), "into: bytes is read-only; pass a bytearray, a"),
    ),
    call(
        "back.get(grant of conn, ...)",
        lambda t: t.back.get(steps.grant(t), bytearray(8)),
        "the peer ended it: 'no such grant on this connection'",
        kvwire.AccessDenied,
    ),
    call(
        "grant[3]",
        lambda t: steps.grant(t)[3],
        "a grant is sliced, grant[a:b]; it has no single bytes",
    ),
    call(
        "grant[::2]", lambda t: steps.grant(t)[::2], "grant[0:8:2]: the step must be 1"
    ),
    *calls(
        "Grant.from_bytes",
        (a(b"short"), "a grant has 72 bytes, these are 5"),
        (a("text"), "a grant has 72 bytes, these are 4"),
    ),
    *calls(
        "comm.register",
        (a("text"), "buffer: str is no memory that kvwire can use; pass its bytes"),
        (a(b"x", "write"), "buffer: bytes is read-only; pass a bytearray, a writable"),
    ),
    call(
        "comm.register(buffer, 'reed')",
        lambda t: t.a.register(bytearray(1), "reed"),
        'access=\'reed\': use "read" (the peer may get), "write" (the',
    ),
    call(
        "comm.register(buffer, 3)",
        lambda t: t.a.register(bytearray(1), 3),
        'access=3: use "read" (the peer may get), "write" (the peer',
    ),
    call(
        "region.grant(conn of another communicator)",
        lambda t: t.a.register(bytearray(1)).grant(t.back),
        "grant: the connection is of another communicator",
    ),
    call(
        "region.grant('peer')",
        lambda t: t.a.register(bytearray(1)).grant("peer"),
        "grant: a kvwire.Connection is needed, and this is a str",
    ),
    call(
        "region.grant(comm.connect(...)), without await",
        steps.unawaited,
        "grant: a kvwire.Connection is needed, and this is a",
    ),
    call(
        "region.grant(conn, offset=2) of 1 byte",
        lambda t: t.a.register(bytearray(1)).grant(t.conn, offset=2),
        "grant: 2+-1 of a region of 1 bytes",
    ),
    call(
        "region.grant(conn, access='write') of one that is read",
        lambda t: t.a.register(bytearray(1)).grant(t.conn, access="write"),
        "grant: Access.WRITE of a region registered for Access.READ",
    ),
]


CACHES: Final = [
    *calls(
        "KVSpec",
        (a(layers=0), "KVSpec: layers=0: a number from 1 to 4096"),
        (a(head_dim=-1), "KVSpec: head_dim=-1: a number from 1 to 65536"),
        (a(dtype="flot16"), "KVSpec: dtype='flot16' is none of bfloat16, float16"),
        (a(block_tokens="16"), "KVSpec: block_tokens='16': a number from 1 to 65536"),
        (a(shard=(2, 2)), "KVSpec: shard rank=2: a number from 0 to 1"),
    ),
    call(
        "PagedCache(spec, [])",
        lambda t: untyped.PagedCache(SPEC, []),
        "group 'kv': 0 tensors for layers=2; pass one for each layer",
    ),
    call(
        "PagedCache(spec, [wrong shape])",
        lambda t: untyped.PagedCache(SPEC, [np.zeros((4, 2), np.float32)] * 2),
        "group 'kv': tensors[0]: shape (4, 2) is not NHD of this spec",
    ),
    call(
        "PagedCache(spec, [float64])",
        lambda t: untyped.PagedCache(SPEC, [np.zeros((4, 2, 2, 1, 4))] * 2),
        "group 'kv': tensors[0]: dtype is float64 and the spec says",
    ),
    call(
        "PagedCache(spec, tensors, layout='NDH')",
        lambda t: untyped.PagedCache(
            SPEC, [np.zeros((4, 2, 2, 1, 4), np.float32)] * 2, layout="NDH"
        ),
        "layout 'NDH': no axis 'NDH'; the axes are layer, block, kv",
    ),
    call(
        "conn.pull('x', tensors, [0])",
        lambda t: t.conn.pull("x", [np.zeros(4)], [0]),
        "cache: a kvwire.PagedCache is needed, and this is a list",
    ),
    *calls(
        "conn.pull",
        (a("x", CACHE, [-1]), "blocks of group 'kv': block id -1 at position 0 is out"),
        (a("x", CACHE, [99]), "blocks of group 'kv': block id 99 at position 0 is out"),
        (a("x", CACHE, [0, 0]), "blocks of group 'kv': block id 0 is there twice"),
        (a("x", CACHE, []), "blocks: 0 blocks; a transfer has 1 to 4194304"),
        (a("x", CACHE, [0.5]), "blocks of group 'kv': a flat sequence of block ids"),
        (a("x", CACHE, None), "blocks of group 'kv': a flat sequence of block ids"),
        (a("x", CACHE, {"group": [0]}), "blocks: no group 'group'; this cache has kv"),
        (a("", CACHE, [0]), "a transfer id of 0 bytes; 1 to 255 are allowed"),
        (a(1.5, CACHE, [0]), "transfer id 1.5: pass a str, bytes or int"),
        (a("x", CACHE, [0], prioriy=3), "pull: no option 'prioriy'; did you mean"),
        (a("x", CACHE, [0], priority=256), "priority=256: 0 to 255; a higher one goes"),
        (a("x", CACHE, [0], lease_s=0), "lease_s=0: a number of seconds above 0"),
        (a("x", CACHE, [0], lease_s="soon"), "lease_s='soon': a number of seconds"),
        (a("x", CACHE, [0], tokens=0), "group 'kv': tokens=0 is 0 blocks of 2 tokens"),
        (a("x", CACHE, [0], tokens=99), "group 'kv': tokens=99 is 50 blocks of 2"),
        (a("x", CACHE, [0], hashes=[b"a", b"b"]), "hashes: 2 for the 1 blocks of"),
        (a("x", CACHE, [0], hashes=["a"]), "hashes: one of group 'kv' is not bytes; a"),
        (a("x", CACHE, [0], deadline="soon"), "deadline='soon': pass a time of the"),
        (a("x", CACHE, [0], consumers=2), "pull: no option 'consumers'; did you mean"),
    ),
    call(
        "conn.pull('x' * 300, cache, [0])",
        lambda t: t.conn.pull("x" * 300, t.kv, [0]),
        "a transfer id of 300 bytes; 1 to 255 are allowed",
    ),
    call(
        "conn.pull('x', read-only cache, [0])",
        lambda t: t.conn.pull("x", cache(writable=False), [0]),
        "this cache has a tensor that is not writable: nothing can",
    ),
    *calls(
        "comm.publish",
        (a("x", CACHE, [0], consumers=0), "consumers=0: a number, at least 1"),
        (a("x", CACHE, [0], consumers="2"), "consumers='2': a number, at least 1"),
        (a("x", CACHE, [0], group_bytes=0), "group_bytes=0: at least 1, for layer by"),
    ),
    call(
        "comm.publish('x', cache, [0], growing=True), without tokens",
        lambda t: t.b.publish("x", t.kv, [0], growing=True),
        "growing=True: tokens= says how many the whole transfer will",
    ),
    call(
        "comm.publish('x', ...), twice",
        lambda t: [t.b.publish("x", t.kv, [n]) for n in (0, 1)],
        "transfer 'x' is published already, and has not ended; ids may",
    ),
    call(
        "comm.expect('x', ...), twice",
        lambda t: [t.b.expect("x", t.kv, [n]) for n in (0, 1)],
        "transfer 'x' is expected already, and has not ended; ids may",
    ),
    call(
        "conn.pull('x', cache, [0], tokens='2')",
        lambda t: t.conn.pull("x", t.kv, [0], tokens="2"),
        "group 'kv': tokens='2': a number",
    ),
    call(
        "PagedCache(tensors, spec)",
        lambda t: untyped.PagedCache([], SPEC),
        "PagedCache: a kvwire.KVSpec is needed, and this is a list",
    ),
    call(
        "PagedCache.grouped({'kv': spec})",
        lambda t: untyped.PagedCache.grouped({"kv": SPEC}),
        "group 'kv': (spec, tensors) is needed, and this is a KVSpec",
    ),
    *calls(
        "out.ready",
        (a(layers=9), "ready: layers of group 'kv': 9 is not one of 0 to 1"),
        (a(layers="0"), "ready: layers of group 'kv': '0' is neither a number nor a"),
        (a(group="full"), "ready: no group 'full'; there is kv"),
        (a(after="event"), "after=str: pass a future, a torch.cuda.Event, a"),
    ),
    call(
        "out.ready(blocks=7), a block id and no position",
        lambda t: t.b.publish("x", t.kv, [3]).ready(blocks=3),
        "ready: blocks of group 'kv': 3 is not one of 0 to 0",
    ),
    call(
        "out.ready(layers=0), twice",
        steps.marked_twice,
        "ready: part of layers 0 to 0 x blocks 0 to 0 of group 'kv'",
    ),
    call(
        "out.finish(), with marks missing",
        lambda t: t.b.publish("x", t.kv, [0]).finish(),
        "finish: layer 0 of block position 0 of group",
    ),
    call(
        "out.extend([1]), not growing",
        lambda t: t.b.publish("x", t.kv, [0]).extend([1]),
        "extend: this transfer was not begun with growing=True",
    ),
    *calls(
        "await inc.layer",
        (a(9), "layer 9 is not in this cache"),
        (a(0, "full"), "no group 'full'; there is kv"),
    ),
    call(
        "inc.layer_event(0), in host memory",
        lambda t: t.b.expect("x", t.kv, [0]).layer_event(0),
        "layer_event: this cache lies in host memory; await layer(n)",
    ),
    *calls(
        "kvwire.join",
        (a(), "join: pass the Incoming of each producer"),
    ),
    call(
        "kvwire.join(of other blocks)",
        lambda t: untyped.join(t.b.expect("x", t.kv, [0]), t.b.expect("y", t.kv, [1])),
        "join: the block lists of 'x' and 'y' differ in group 'kv'",
    ),
    *calls(
        "await comm.fired",
        (a("event"), "after=str: pass a future, a torch.cuda.Event, a"),
    ),
    WrongUse(
        "pull what nobody publishes, with a deadline",
        lambda t: t.conn.pull("x", t.kv, [0], deadline=0.05),
        Outcome,
        "the transfer's deadline passed: the peer 'b' has not",
    ),
    WrongUse(
        "pull on a connection that is closed",
        steps.pull_closed,
        Outcome,
        "this side closed the connection",
    ),
    WrongUse(
        "push on a connection that was aborted",
        steps.push_aborted,
        Outcome,
        "no more",
    ),
    WrongUse(
        "pull another model's cache",
        steps.other_model,
        Outcome,
        "the peer ended it: \"group 'kv' differs in head_dim: head_dim",
    ),
]
