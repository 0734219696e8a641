"""Messages, puts and gets of memory on a device, over transports of host memory.

A simulated device plays the GPU: host code that touched its memory would end the
process, and its streams run beside everything else.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire import (
    BackendUnavailable,
    ClosedOK,
    ConnectionLost,
    DeadlineExceeded,
    MessageTooLarge,
    Request,
    RequestCancelled,
    StaleRegion,
    UsageError,
)
from kvwire.limits import KIB
from tests.support import inside
from tests.support.depth import sample
from tests.support.pairs import Pair, communicators, connected, join, turns, until
from tests.support.simulated_device import (
    SimulatedArray,
    SimulatedDevice,
    SimulatedStream,
)
from tests.support.waiting import PATIENCE_S

# Below and above what travels unasked, one chunk, and more than the slots hold.
SIZES = (1, 16 * KIB, 64 * KIB, 700 * KIB + 3)
SMALL, LARGE = 5000, 300 * KIB

Bytes = npt.NDArray[np.uint8]


def content(nbytes: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def zeros(device: SimulatedDevice, nbytes: int) -> SimulatedArray:
    return device.array(np.zeros(nbytes, np.uint8))


@pytest.fixture
def stream(near: SimulatedDevice) -> Iterator[SimulatedStream]:
    """The current stream of this thread, on the near device."""
    made = near.stream()
    near.set_current(made)
    yield made
    made.close()


@pytest.fixture(params=["tcp", "inproc"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with connected(request.param, chunk_bytes=64 * KIB) as made:
        yield made


class Gate:
    """A kernel that runs until it is let go, and what it does then."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.open = threading.Event()
        stream.call(self._run)

    def _run(self) -> None:
        self.open.wait()


# --- every direction ------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("first", ["send", "recv"])
async def test_a_message_between_any_memory(
    pair: Pair, near: SimulatedDevice, far: SimulatedDevice, nbytes: int, first: str
) -> None:
    values = content(nbytes)
    for source in (values, near.array(values)):
        for target in (np.zeros(nbytes, np.uint8), zeros(far, nbytes)):
            if first == "send":
                sent = pair.left.send(3, source)
                await until(lambda: pair.right.unreceived)
                received = pair.right.recv(3, into=target)
            else:
                received = pair.right.recv(3, into=target)
                sent = pair.left.send(3, source)
            assert await received == nbytes
            assert await sent == nbytes
            await received.released()
            await sent.released()
            got = target if isinstance(target, np.ndarray) else target.read()
            assert np.array_equal(got, values)
    whole = pair.right.recv(3)
    await pair.left.send(3, near.array(values))
    assert bytes(await whole) == values.tobytes()


@pytest.mark.parametrize("nbytes", SIZES)
async def test_puts_and_gets_between_any_memory(
    pair: Pair, near: SimulatedDevice, far: SimulatedDevice, nbytes: int
) -> None:
    values = content(nbytes)
    for there in (np.zeros(nbytes, np.uint8), zeros(far, nbytes)):
        region = pair.far.register(there, "readwrite")
        grant = region.grant(pair.right)
        for source in (values, near.array(values)):
            assert await pair.left.put(source, grant) == nbytes
            for target in (np.zeros(nbytes, np.uint8), zeros(near, nbytes)):
                assert await pair.left.get(grant, into=target) == nbytes
                got = target if isinstance(target, np.ndarray) else target.read()
                assert np.array_equal(got, values)
        half = nbytes // 2
        if half:
            part = near.array(values[:half])
            await pair.left.put(part, grant[nbytes - half : nbytes])
            await pair.left.get(grant[nbytes - half : nbytes], into=part)
            assert np.array_equal(part.read(), values[:half])
        await region.close()
        got = there if isinstance(there, np.ndarray) else there.read()
        assert np.array_equal(got[nbytes - half :], values[:half])


# --- behind what the caller's stream does ---------------------------------------------


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("verb", ["send", "put"])
async def test_what_a_kernel_still_writes_is_sent_behind_it(
    pair: Pair, near: SimulatedDevice, stream: SimulatedStream, nbytes: int, verb: str
) -> None:
    """Nothing else waits for it, and later messages of the tag do not overtake it."""
    late, source = content(nbytes), zeros(near, nbytes)
    target = np.zeros(nbytes, np.uint8)
    region = pair.far.register(target, "readwrite")
    grant = region.grant(pair.right)
    gate = Gate(stream)
    stream.call(lambda: source.write(late))
    sent = pair.left.send(1, source) if verb == "send" else pair.left.put(source, grant)
    assert "waits for work queued on its device" in repr(sent)
    await pair.left.send(1, b"second")
    received = pair.right.recv(1, into=target) if verb == "send" else None
    if received:
        await turns(50)
        assert not received.done()
    # Bytes of another stream go on meanwhile.
    idle = near.stream()
    near.set_current(idle)
    other = pair.right.recv(2)
    await pair.left.send(2, near.array(content(10)))
    assert bytes(await other) == content(10).tobytes()
    gate.open.set()
    assert await sent == nbytes
    if received:
        assert await received == nbytes
    assert bytes(await pair.right.recv(1)) == b"second"
    await region.close()
    assert np.array_equal(target, late)
    idle.close()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("verb", ["recv", "recv of one that is here", "get"])
async def test_what_a_kernel_still_reads_is_overwritten_behind_it(
    pair: Pair, near: SimulatedDevice, stream: SimulatedStream, nbytes: int, verb: str
) -> None:
    values, target, seen = content(nbytes), zeros(near, nbytes), list[bool]()
    region = pair.far.register(values)
    grant = region.grant(pair.right)
    gate = Gate(stream)
    stream.call(lambda: seen.append(bool(target.read().any())))
    sent = None
    if verb == "recv of one that is here":
        sent = pair.right.send(1, values)
        await until(lambda: pair.left.unreceived)
    if verb == "get":
        received = pair.left.get(grant, into=target)
    else:
        received = pair.left.recv(1, into=target)
    after = pair.left.recv(1)
    if verb == "recv":
        sent = pair.right.send(1, values)
    await pair.right.send(1, b"second")
    if verb != "get":
        assert bytes(await after) == b"second"
    await pair.right.send(9, b"other")
    assert bytes(await pair.left.recv(9)) == b"other"
    assert not received.done()
    gate.open.set()
    assert await received == nbytes
    assert seen == [False], "what a kernel was reading was overwritten"
    assert np.array_equal(target.read(), values)
    if sent is not None:
        await sent
    if verb == "get":
        assert bytes(await after) == b"second"
    await region.close()


async def test_a_peer_that_is_not_connected_yet_waits_for_the_caller_s_stream(
    near: SimulatedDevice, stream: SimulatedStream
) -> None:
    """The stream that was current when the verb was called, not when it is posted."""
    late, source = content(LARGE), zeros(near, LARGE)
    async with communicators() as (one, other):
        address = await other.listen("tcp://127.0.0.1:0")
        gate = Gate(stream)
        stream.call(lambda: source.write(late))
        peer = one.peer(str(address))
        sent = peer.send(4, source)
        idle = near.stream()
        near.set_current(idle)
        there = await anext(other.connections())
        received = there.recv(4)
        await until(lambda: peer.connection is not None)
        await turns(50)
        assert not received.done()
        gate.open.set()
        assert await sent == LARGE
        assert bytes(await received) == late.tobytes()
        idle.close()


async def test_a_receive_that_was_withdrawn_waits_anew(
    pair: Pair, near: SimulatedDevice, stream: SimulatedStream
) -> None:
    """Its memory was the caller's meanwhile, who has queued more since."""
    target, seen = zeros(near, SMALL), list[bool]()
    received = pair.left.recv(1, into=target)
    waiting = asyncio.ensure_future(asyncio.wait_for(received, 0.01))
    with pytest.raises(TimeoutError):
        await waiting
    await received.released()
    gate = Gate(stream)
    stream.call(lambda: seen.append(bool(target.read().any())))
    again = asyncio.ensure_future(received)
    await pair.right.send(1, content(SMALL))
    await turns(50)
    assert not received.done()
    gate.open.set()
    assert await again == SMALL
    assert seen == [False]


@pytest.mark.parametrize("verb", ["send", "recv", "put", "get"])
async def test_a_kernel_that_never_ends_holds_up_its_own_stream_alone(
    pair: Pair, near: SimulatedDevice, stream: SimulatedStream, verb: str
) -> None:
    """And no other request, however many wait for that stream."""
    gate = Gate(stream)
    stuck = [begin(pair, near, verb, SMALL, tag=tag) for tag in range(40)]
    other = near.stream()
    near.set_current(other)
    for tag in range(40, 80):
        request, answer = begin(pair, near, verb, SMALL, tag=tag)
        assert await request == SMALL
        if answer is not None:
            assert await answer == SMALL
    assert not any(request.done() for request, _ in stuck)
    gate.open.set()
    for request, answer in stuck:
        assert await request == SMALL
        if answer is not None:
            assert await answer == SMALL
    other.close()


# --- ends -----------------------------------------------------------------------------


def begin(
    pair: Pair,
    device: SimulatedDevice,
    verb: str,
    nbytes: int,
    *,
    tag: int = 1,
    **options: Any,
) -> tuple[Request[int], Request[Any] | None]:
    """A request of the left side with memory on a device, and the other end's."""
    memory = device.array(content(nbytes))
    if verb == "send":
        into = np.zeros(nbytes, np.uint8)
        return pair.left.send(tag, memory, **options), pair.right.recv(tag, into=into)
    if verb == "recv":
        mine = pair.left.recv(tag, into=memory, **options)
        return mine, pair.right.send(tag, content(nbytes))
    region = pair.far.register(np.zeros(nbytes, np.uint8), "readwrite")
    grant = region.grant(pair.right)
    if verb == "put":
        return pair.left.put(memory, grant, **options), None
    return pair.left.get(grant, into=memory, **options), None


VERBS = ("send", "recv", "put", "get")


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", ["cancel", "connection", "peer"])
async def test_memory_is_not_free_while_a_device_copies(
    pair: Pair, near: SimulatedDevice, verb: str, how: str, nbytes: int
) -> None:
    near.hold()
    request, other = begin(pair, near, verb, nbytes)
    await until(lambda: not inside.staging(pair.left).quiet)
    if how == "cancel":
        request.cancel()
        with pytest.raises(RequestCancelled):
            await request
    else:
        (pair.left if how == "connection" else pair.right).abort("enough")
        with pytest.raises(ConnectionLost):
            await request
    freed = asyncio.ensure_future(request.released())
    await turns(50)
    assert not freed.done()
    assert pair.near.quarantined_bytes == nbytes
    near.release()
    await freed
    assert pair.near.quarantined_bytes == 0
    if other is not None:
        await asyncio.gather(other, return_exceptions=True)
        await other.released()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", ["cancel", "deadline", "connection"])
async def test_a_request_ends_while_its_stream_is_busy(
    pair: Pair, near: SimulatedDevice, stream: SimulatedStream, verb: str, how: str
) -> None:
    """Nothing has touched its memory, which is free at once, and nothing will."""
    gate = Gate(stream)
    options: dict[str, Any] = {"deadline": 0.3} if how == "deadline" else {}
    request, other = begin(pair, near, verb, SMALL, **options)
    await turns(20)
    held = inside.driver(pair.left).held
    if verb == "recv":
        await until(lambda: held)
    error: type[Exception] = DeadlineExceeded
    if how == "cancel":
        request.cancel()
        error = RequestCancelled
    elif how == "connection":
        pair.left.abort("enough")
        error = ConnectionLost
    with pytest.raises(error):
        await request
    await request.released()
    gate.open.set()
    if how != "connection":
        if verb == "send":
            assert isinstance(other, Request)
            await asyncio.gather(other, return_exceptions=True)
        # The credit of a message that was taken and dropped is back: more arrive.
        for n in range(3):
            await pair.right.send(2, content(n + 1))
            assert len(await pair.left.recv(2)) == n + 1
        await until(lambda: not held)
    elif other is not None:
        await asyncio.gather(other, return_exceptions=True)
    await turns(20)


@pytest.mark.parametrize("verb", VERBS)
async def test_queued_work_that_fails_ends_the_request(
    pair: Pair, near: SimulatedDevice, stream: SimulatedStream, verb: str
) -> None:
    gate = Gate(stream)
    request, other = begin(pair, near, verb, SMALL)
    await turns(20)
    near.fail("an illegal memory access")
    gate.open.set()
    with pytest.raises(
        BackendUnavailable, match=f"before the {verb} failed: an illegal"
    ):
        await request
    await request.released()
    if verb == "send":
        assert other is not None
        with pytest.raises(kvwire.KVWireError, match="an illegal memory access"):
            await other
    with pytest.raises(BackendUnavailable, match="an illegal memory access"):
        await begin(pair, near, "put", SMALL)[0]


@pytest.mark.parametrize("verb", VERBS)
async def test_memory_of_a_device_that_fails_is_never_free(
    pair: Pair, near: SimulatedDevice, verb: str
) -> None:
    near.hold()
    request, other = begin(pair, near, verb, LARGE)
    await until(lambda: not inside.staging(pair.left).quiet)
    near.fail("it fell off the bus")
    near.release()
    with pytest.raises(ConnectionLost, match="it fell off the bus"):
        await request
    freed = asyncio.ensure_future(request.released())
    await turns(50)
    assert not freed.done()
    assert pair.near.quarantined_bytes == LARGE
    freed.cancel()
    if other is not None:
        await asyncio.gather(other, return_exceptions=True)


async def test_the_peer_closes_while_a_message_is_copied(
    pair: Pair, near: SimulatedDevice
) -> None:
    """The message was here: its receive ends well, and only then the connection."""
    target = zeros(near, SMALL)
    near.hold()
    received = pair.left.recv(1, into=target)
    await pair.right.send(1, content(SMALL))
    closing = asyncio.ensure_future(pair.right.close())
    await until(lambda: not inside.staging(pair.left).quiet)
    await turns(50)
    assert not received.done()
    near.release()
    assert await received == SMALL
    await closing
    assert np.array_equal(target.read(), content(SMALL))


async def test_what_was_held_is_received_after_the_end(
    pair: Pair, near: SimulatedDevice
) -> None:
    await pair.right.send(1, content(SMALL))
    await pair.right.send(1, b"")
    await until(lambda: pair.left.unreceived.get(1) == 2)
    await pair.right.close()
    await pair.left.wait_closed()
    target = zeros(near, SMALL)
    received = pair.left.recv(1, into=target)
    assert await received == SMALL
    await received.released()
    assert await pair.left.recv(1, into=target) == 0
    assert np.array_equal(target.read(), content(SMALL))
    with pytest.raises(ClosedOK):
        await pair.left.recv(1, into=target)


async def test_a_copy_that_fails_after_the_end_fails_its_receive(
    pair: Pair, near: SimulatedDevice
) -> None:
    """The connection, which is over, no longer fails its requests."""
    await pair.right.send(1, content(SMALL))
    await until(lambda: pair.left.unreceived.get(1) == 1)
    await pair.right.close()
    await pair.left.wait_closed()
    near.hold()
    received = pair.left.recv(1, into=zeros(near, SMALL))
    await until(lambda: not inside.staging(pair.left).quiet)
    near.fail("it fell off the bus")
    near.release()
    with pytest.raises(BackendUnavailable, match="it fell off the bus"):
        await asyncio.wait_for(received, PATIENCE_S)
    assert pair.near.quarantined_bytes == SMALL


async def test_a_closed_communicator_copies_nothing(
    pair: Pair, near: SimulatedDevice
) -> None:
    await pair.right.send(1, content(SMALL))
    await until(lambda: pair.left.unreceived)
    await pair.near.close()
    with pytest.raises(BackendUnavailable, match="the communicator is closed"):
        pair.left.recv(1, into=zeros(near, SMALL))
    assert bytes(await pair.left.recv(1)) == content(SMALL).tobytes()


@pytest.mark.parametrize("verb", VERBS)
async def test_a_device_that_lets_nobody_wait(
    pair: Pair,
    near: SimulatedDevice,
    stream: SimulatedStream,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    def wait(*_: object) -> None:
        raise RuntimeError("out of memory")

    gate = Gate(stream)
    monkeypatch.setattr(SimulatedStream, "wait", wait)
    request, other = begin(pair, near, verb, SMALL)
    with pytest.raises(
        BackendUnavailable, match=f"before the {verb} failed: out of mem"
    ):
        await request
    await request.released()
    if other is not None:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
    gate.open.set()


async def test_held_messages_leave_a_slot_to_the_link(
    pair: Pair, near: SimulatedDevice
) -> None:
    """Many wait for slots, and a large one comes by the link: all are there."""
    count = 20
    targets = [zeros(near, SMALL) for _ in range(count)]
    for n in range(count):
        await pair.right.send(1, content(SMALL, n))
    await until(lambda: pair.left.unreceived.get(1) == count)
    big, sent = zeros(near, LARGE), pair.right.send(2, content(LARGE))
    near.hold()
    received = [pair.left.recv(1, into=target) for target in targets]
    received.append(pair.left.recv(2, into=big))
    await until(lambda: inside.staging(pair.left).paused)
    received[7].cancel()
    near.release()
    for n, request in enumerate(received):
        if n == 7:
            with pytest.raises(RequestCancelled):
                await request
        else:
            assert await request == (LARGE if n == count else SMALL)
            if n < count:
                assert np.array_equal(targets[n].read(), content(SMALL, n))
    assert np.array_equal(big.read(), content(LARGE))
    assert not targets[7].read().any()
    await sent


async def test_a_region_of_a_device_is_closed_under_a_put(
    pair: Pair, far: SimulatedDevice
) -> None:
    region = pair.far.register(zeros(far, LARGE), "readwrite")
    grant = region.grant(pair.right)
    far.hold()
    put = pair.left.put(content(LARGE), grant)
    await until(lambda: not inside.staging(pair.right).quiet)
    closing = asyncio.ensure_future(region.close())
    with pytest.raises(StaleRegion):
        await put
    await turns(50)
    assert not closing.done()
    far.release()
    await closing


# --- refusals -------------------------------------------------------------------------


async def test_memory_that_cannot_be_used_is_refused_by_name(
    pair: Pair, near: SimulatedDevice
) -> None:
    array = near.array(content(64).reshape(8, 8))
    turned = SimulatedArray(near, array.data_ptr(), (8, 8), np.dtype(np.uint8), "")
    turned.stride = lambda: (1, 8)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="buffer: the memory is not C-contiguous"):
        pair.left.send(1, turned)
    with pytest.raises(UsageError, match="into: the memory is not C-contiguous"):
        pair.left.recv(1, into=turned)
    region = pair.far.register(bytearray(65), "readwrite")
    grant = region.grant(pair.right)
    with pytest.raises(
        UsageError, match="the buffer has 64 bytes and the grant has 65"
    ):
        pair.left.put(array, grant)
    with pytest.raises(
        UsageError, match="the buffer has 64 bytes and the grant has 65"
    ):
        pair.left.get(grant, into=array)
    with pytest.raises(UsageError, match="contiguous host memory"):
        pair.near.expose("w", array, block_bytes=8)
    await region.close()


async def test_messages_of_no_bytes(pair: Pair, near: SimulatedDevice) -> None:
    target = zeros(near, 8)
    nothing = SimulatedArray(near, target.data_ptr(), (4, 0, 2), np.dtype(np.uint8), "")
    for into in (nothing, target):
        await pair.left.send(1, nothing)
        assert await pair.right.recv(1, into=into) == 0
        received = pair.right.recv(1, into=into)
        await pair.left.send(1, b"")
        assert await received == 0
    assert not target.read().any()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_a_message_that_is_too_large_waits_for_a_larger_tensor(
    pair: Pair, near: SimulatedDevice, nbytes: int
) -> None:
    target = zeros(near, nbytes)
    small = pair.left.recv(1, into=zeros(near, nbytes - 1))
    sent = pair.right.send(1, content(nbytes))
    with pytest.raises(MessageTooLarge, match="it waits for a larger buffer"):
        await small
    await small.released()
    assert await pair.left.recv(1, into=target) == nbytes
    await sent
    assert np.array_equal(target.read(), content(nbytes))


async def test_what_cannot_be_staged_is_refused(
    pair: Pair, near: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = zeros(near, SMALL)
    region = pair.near.register(memory)
    near.pinned_bytes_max = 0
    with pytest.raises(BackendUnavailable, match="pinned memory were refused"):
        pair.left.send(1, memory)
    with pytest.raises(BackendUnavailable, match="pinned memory were refused"):
        region.grant(pair.left)
    monkeypatch.setattr(type(inside.link(pair.left)), "pausable", False)
    with pytest.raises(BackendUnavailable, match="cannot be paused"):
        pair.left.recv(1, into=memory)
    await region.close()
    assert len(inside.buffers(pair.near)) == 0
    near.close()
    with pytest.raises(UsageError, match="does not exist, or was closed"):
        pair.near.peer("127.0.0.1:1").send(1, memory)


# --- anything, in any order -----------------------------------------------------------


class Disorder:
    """Requests of one connection, and devices and streams that are busy at times."""

    def __init__(
        self,
        dice: random.Random,
        pair: Pair,
        near: SimulatedDevice,
        far: SimulatedDevice,
    ) -> None:
        self.dice = dice
        self.pair = pair
        self.near = near
        self.far = far
        self.stream = near.stream()
        near.set_current(self.stream)
        self.gates: list[Gate] = []
        # The two ends of a message; a put or get by itself.
        self.requests: list[tuple[Request[Any], ...]] = []
        self.regions: list[kvwire.Region] = []
        # Where the bytes of a request are to be, if it ends well.
        self.checks: list[tuple[Request[Any], SimulatedArray, Bytes]] = []

    def message_to_far(self, tag: int, values: Bytes) -> None:
        sent = self.pair.left.send(tag, self.near.array(values))
        there = zeros(self.far, values.nbytes)
        received = self.pair.right.recv(tag, into=there)
        self.requests.append((sent, received))
        self.checks.append((received, there, values))

    async def message_to_near(self, tag: int, values: Bytes) -> None:
        sent = self.pair.right.send(tag, values)
        await turns(self.dice.randrange(10))
        here = zeros(self.near, values.nbytes)
        received = self.pair.left.recv(tag, into=here)
        self.requests.append((sent, received))
        self.checks.append((received, here, values))

    def one_sided(self, values: Bytes) -> None:
        memory: Any = self.dice.choice([values.copy(), self.far.array(values)])
        region = self.pair.far.register(memory, "readwrite")
        self.regions.append(region)
        grant = region.grant(self.pair.right)
        if self.dice.random() < 0.5:
            self.requests.append((self.pair.left.put(self.near.array(values), grant),))
            return
        here = zeros(self.near, values.nbytes)
        received = self.pair.left.get(grant, into=here)
        self.requests.append((received,))
        self.checks.append((received, here, values))

    async def step(self, number: int) -> None:
        dice = self.dice
        values = content(dice.choice((*SIZES[:-1], SMALL, LARGE)), number)
        what = dice.randrange(9)
        if what == 0:
            # A tag for each message: a cancel does not shift the others.
            self.message_to_far(number, values)
        elif what == 1:
            await self.message_to_near(number, values)
        elif what in (2, 3):
            self.one_sided(values)
        elif what == 4:
            self.gates.append(Gate(self.stream))
        elif what == 5:
            self.open_gates()
        elif what == 6:
            dice.choice([self.near, self.far]).hold()
        elif what == 7 and self.requests:
            dice.choice(dice.choice(self.requests)).cancel()
        else:
            self.near.release()
            self.far.release()
        await turns(dice.randrange(12))

    def open_gates(self) -> None:
        for gate in self.gates:
            gate.open.set()
        self.gates.clear()

    async def end(self) -> None:
        """Let all go on; all ends, and all memory is free."""
        self.open_gates()
        self.near.release()
        self.far.release()
        for ends in self.requests:
            # One whose other end has failed may never meet a message.
            if any(end.done() and not succeeded(end) for end in ends):
                for end in ends:
                    end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            for end in ends:
                await end.released()
        for region in self.regions:
            await region.close()
        self.stream.close()


def succeeded(request: kvwire.Request[int]) -> bool:
    with suppress(kvwire.KVWireError, asyncio.InvalidStateError):
        request.result()
        return True
    return False


@pytest.mark.parametrize("seed", list(sample(range(60), 5)))
async def test_any_requests_in_any_order(
    seed: int, near: SimulatedDevice, far: SimulatedDevice
) -> None:
    """Each ends once, with the right bytes if it ends well; all memory is free then."""
    dice = random.Random(seed)
    async with communicators(chunk_bytes=64 * KIB) as (one, other):
        pair = await join(one, other, dice.choice(["tcp", "inproc"]))
        disorder = Disorder(dice, pair, near, far)
        for number in range(25):
            await disorder.step(number)
        if dice.random() < 0.3:
            dice.choice([pair.left, pair.right]).abort("enough")
        await disorder.end()
        for request, array, values in disorder.checks:
            if succeeded(request):
                assert request.result() == values.nbytes
                assert np.array_equal(array.read(), values)
        assert one.quarantined_bytes == other.quarantined_bytes == 0
        # What no receive has taken is all that is kept, once the events have fired.
        waiting = sum(pair.left.unreceived.values())
        await until(lambda: len(inside.driver(pair.left).held) <= waiting)
