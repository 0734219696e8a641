"""A paused link hands over no header, and ends the payload under way; none is lost."""

from __future__ import annotations

import asyncio

import pytest

from kvwire.backend import Backend, Landing, Link, LinkHandler, registry
from kvwire.limits import HEADER_BYTES, KIB
from kvwire.types import Address
from tests.support.pairs import anywhere, until

# From nothing to more than any buffer between the two holds.
SIZES = [0, 10, 0, 7 * KIB, 100 * KIB, 3, 9 * KIB, 0, 256 * KIB, 1]


class Receiver(LinkHandler):
    """Pauses with every header, and says what came when it is resumed."""

    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.paused = False
        self.headers_while_paused = 0
        self.closed = asyncio.Event()

    def header_received(self, link: Link, header: memoryview) -> Landing:
        self.headers_while_paused += self.paused
        self.paused = True
        link.pause()
        length = int.from_bytes(header[:8], "little")
        return Landing(length, memoryview(bytearray(length)))

    def body_received(self, link: Link, landing: Landing) -> None:
        assert isinstance(landing.payload, memoryview)
        self.arrived.append(bytes(landing.payload))

    def frame_sent(self, link: Link, token: object) -> None:
        pass

    def link_writable(self, link: Link) -> None:
        link.flush()

    def link_closed(self, link: Link, error: Exception | None) -> None:
        self.closed.set()


@pytest.fixture(params=["tcp", "inproc"])
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def joined(backend: Backend, scheme: str) -> tuple[Link, Link]:
    accepted: list[Link] = []
    listener = await backend.listen(Address.parse(anywhere(scheme)), accepted.append)
    near = await backend.connect(listener.address)
    await until(lambda: accepted)
    await listener.close()
    return near, accepted[0]


async def test_every_frame_arrives_once_and_in_order(scheme: str) -> None:
    backend = registry.load(scheme)()
    near, far = await joined(backend, scheme)
    sender, receiver = Receiver(), Receiver()
    near.start(sender)
    far.start(receiver)
    frames = [bytes([n]) * size for n, size in enumerate(SIZES)]
    for n, payload in enumerate(frames):
        header = len(payload).to_bytes(8, "little").ljust(HEADER_BYTES, b"\1")
        near.send(header, memoryview(payload), n)
    near.flush()
    for n in range(len(frames)):
        await until(lambda n=n: len(receiver.arrived) > n)  # type: ignore[misc]
        # Nothing follows, however often the loop looks.
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(receiver.arrived) == n + 1
        receiver.paused = False
        far.resume()
    assert receiver.arrived == frames
    assert receiver.headers_while_paused == 0
    near.abort()
    far.abort()
    await sender.closed.wait()
    await receiver.closed.wait()


async def test_paused_again_before_it_has_gone_on(scheme: str) -> None:
    backend = registry.load(scheme)()
    near, far = await joined(backend, scheme)
    sender, receiver = Receiver(), Receiver()
    near.start(sender)
    far.start(receiver)
    header = (0).to_bytes(8, "little").ljust(HEADER_BYTES, b"\1")
    near.send(header)
    near.send(header)
    near.flush()
    await until(lambda: receiver.arrived)
    far.resume()
    far.pause()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(receiver.arrived) == 1
    receiver.paused = False
    far.resume()
    await until(lambda: len(receiver.arrived) == 2)
    near.abort()
    far.abort()
    await sender.closed.wait()
    await receiver.closed.wait()
