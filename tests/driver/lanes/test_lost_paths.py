"""A lane that loses its path while the control link lives: its payload goes elsewhere.

The lanes are real, of each transport that runs here; NCCL's have a library that is
played. The receiver's endpoint never hears of what was announced, or the sender's never
hears that it has been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
import kvwire_nccl
from kvwire.backend import registry
from kvwire.backend.lane import Lane
from tests.backends.kvwire_nccl.fake import FakeBackend
from tests.support import inside
from tests.support.lanes import raise_again_after
from tests.support.pairs import Pair, connected, until
from tests.support.waiting import PATIENCE_S

INTERVAL_S, MISSES = 0.2, 2
LIMIT_S = INTERVAL_S * MISSES
# A thread that makes an agent of NIXL holds the interpreter. On a busy machine that
# takes longer than LIMIT_S, and the peer would count as gone.
NIXL_INTERVAL_S = 5.0
SPEC = kvwire.KVSpec(
    layers=2, kv_heads=2, head_dim=64, block_tokens=16, dtype="float16"
)
BLOCKS = 256
TRANSPORTS = ["tcp", "local", "ucx", "inproc", "nccl", "nixl"]


@pytest.fixture(autouse=True)
def _played_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its lanes move the memory of this process, without a GPU."""
    # Backends are loaded once for each search path.
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kvwire_nccl, "NcclBackend", FakeBackend)


def layers(value: int) -> list[npt.NDArray[np.float16]]:
    return [np.full((BLOCKS, 2, 16, 2, 64), value, np.float16) for _ in range(2)]


@asynccontextmanager
async def beside(transport: str, **both: Any) -> AsyncIterator[Pair]:
    """A pair with a lane of a transport beside a link over tcp, which may carry too."""
    found = registry.availability(transport)
    if not found.available:
        pytest.skip(f"{transport}: {found.reason}")
    async with connected(
        prefer=tuple(dict.fromkeys((transport, "tcp"))),
        forbid=() if transport == "local" else ("local",),
        lanes=2 if transport == "tcp" else 1,
        ping_interval_s=NIXL_INTERVAL_S if transport == "nixl" else INTERVAL_S,
        ping_misses=MISSES,
        **both,
    ) as pair:
        await until(lambda: inside.lanes(pair.left).open)
        await until(lambda: inside.lanes(pair.right).open)
        yield pair


def nothing_arrives(pair: Pair, patch: pytest.MonkeyPatch) -> None:
    """What is announced to the left, who pulls, is lost on its way."""
    (endpoint,) = inside.lanes(pair.left).open
    patch.setattr(type(endpoint.lane), "receive", lambda *_: None)


def nothing_leaves(pair: Pair, patch: pytest.MonkeyPatch) -> None:
    """All arrives, but the right, who publishes, never hears that it was sent."""
    (endpoint,) = inside.lanes(pair.right).open
    scheduler = inside.driver(pair.right)._scheduler
    sent = scheduler.payload_sent

    def is_sent(lane: Lane, token: object) -> None:
        if lane is not endpoint.lane:
            sent(lane, token)

    patch.setattr(scheduler, "payload_sent", is_sent)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("lose", [nothing_arrives, nothing_leaves])
async def test_a_transfer_goes_on_elsewhere_and_drains(
    transport: str, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_again_after(monkeypatch, PATIENCE_S)
    async with beside(transport) as pair:
        (lost,) = inside.lanes(pair.left).open
        lose(pair, monkeypatch)
        out = pair.far.publish("x", kvwire.PagedCache(SPEC, layers(1)), range(BLOCKS))
        out.ready(layers=slice(0, 2))
        out.finish()
        target = layers(0)
        into = kvwire.PagedCache(SPEC, target)
        async with asyncio.timeout(PATIENCE_S):
            incoming = pair.left.pull("x", into, range(BLOCKS))
            assert (await incoming).complete
            assert (await out).complete
            await incoming.drained()
            await out.drained()
        assert all((layer == 1).all() for layer in target)
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: not inside.lanes(pair.left).knows(lost.lane))
        assert not pair.left.closed
        reports = f"{pair.left.transport_report} {pair.right.transport_report}"
        assert "its path is lost: nothing has" in reports or transport == "tcp"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_each_waiter_of_joined_transfers_has_its_layer_and_their_outcome(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_again_after(monkeypatch, PATIENCE_S)
    async with beside(transport) as pair:
        nothing_arrives(pair, monkeypatch)
        targets = [layers(0), layers(0)]
        for rank in range(2):
            paged = kvwire.PagedCache(SPEC, layers(1 + rank))
            out = pair.far.publish(f"x/{rank}", paged, range(BLOCKS))
            out.ready(layers=slice(0, 2))
            out.finish()
        joined = kvwire.join(
            *(
                pair.left.pull(
                    f"x/{rank}", kvwire.PagedCache(SPEC, into), range(BLOCKS)
                )
                for rank, into in enumerate(targets)
            )
        )
        async with asyncio.timeout(PATIENCE_S):
            waiters = [asyncio.ensure_future(joined.layer(n % 2)) for n in range(4)]
            outcomes = await asyncio.gather(*map(_outcome, [joined] * 3))
            await asyncio.gather(*waiters)
            await joined.drained()
        assert all(outcome.complete for outcome in outcomes)
        for rank, target in enumerate(targets):
            assert all((layer == 1 + rank).all() for layer in target)


async def _outcome(joined: kvwire.Joined) -> kvwire.Outcome:
    return await joined


async def test_a_window_is_read_by_messages_once_gets_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card's gets that vanish: what they may write to is first taken from UCX."""
    library = pytest.importorskip("kvwire_ucx.windows", reason="needs libucp")
    posted: list[Any] = []

    def get(_: object, __: object, ___: object, over: Any, ____: object) -> None:
        posted.append(over)

    async with beside("ucx", one_sided_windows="peers") as pair:
        owner, into = layers(1), layers(0)
        window = pair.far.expose("w", kvwire.PagedCache(SPEC, owner))
        remote = await pair.left.window("w")
        if remote.way != "ucx":
            pytest.skip("UCX has neither cma nor a network card here")
        monkeypatch.setattr(library.Worker, "get", get)
        (endpoint,) = inside.lanes(pair.left).open
        ticket = window.offer(range(BLOCKS))
        getting = remote.get(ticket, into=kvwire.PagedCache(SPEC, into))
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: not inside.lanes(pair.left).knows(endpoint.lane))
            for over in posted:  # as UCX says once its worker is destroyed
                assert not getting.done()
                over(library.ERR_CANCELED, 0)
            assert (await getting).complete
        assert all((layer == 1).all() for layer in into)


async def test_without_another_transport_the_connection_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(
        require=("inproc",), ping_interval_s=INTERVAL_S, ping_misses=MISSES
    ) as pair:
        nothing_arrives(pair, monkeypatch)
        receiving = pair.left.recv(1, into=bytearray(1 << 20))
        sending = pair.right.send(1, bytes(1 << 20))
        with pytest.raises(
            kvwire.ConnectionLost, match=r"nothing has arrived for 0\.4"
        ):
            await receiving
        with pytest.raises(kvwire.ConnectionLost):
            await sending


async def lasts(pair: Pair, seconds: float) -> None:
    """The connection does not end for so long."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pair.left.wait_closed(), seconds)


async def test_a_lane_that_rests_or_is_slow_does_not_fail() -> None:
    """No payload is no loss, and neither is payload that comes slowly."""
    async with beside("inproc") as pair:
        (endpoint,) = inside.lanes(pair.left).open
        await lasts(pair, 4 * LIMIT_S)
        for _ in range(4):
            sending = pair.right.send(1, bytes(1 << 20))
            assert len(await pair.left.recv(1)) == 1 << 20
            await sending
            await lasts(pair, LIMIT_S / 2)
        assert inside.lanes(pair.left).open == [endpoint]
