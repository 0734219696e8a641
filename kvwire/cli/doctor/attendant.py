"""``kvwire doctor --listen``: has memory for the measurements of other doctors.

One at a time: two would measure each other. A prober chooses nothing. It is greeted
with grants for memory that this side has filled, one for each size of fragments. It may
ask for three things: an echo, a digest of all of that memory, and that its report is
shown. One that asks nothing for a while is shown out. The profile says that this is a
doctor, so that nobody asks a server that is none.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire import Communicator, Connection, ConnectionClosed, KVWireError
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.trial import PeerReport
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, MIB

logger: logging.Logger = logging.getLogger("kvwire")

PROFILE_KEY: Final = "kvwire.doctor"
PROFILE: Final = {PROFILE_KEY: "2"}
GREETING_TAG: Final = 1
ASK_TAG: Final = 2
ANSWER_TAG: Final = 3
# The first byte of what is asked.
ECHO: Final = b"e"
DIGEST: Final = b"d"
REPORT: Final = b"r"
MESSAGE_BYTES_MAX: Final = 1 * MIB

# The bytes of one pass, each way: much beside what starting costs, and little beside
# the memory of any host.
PASS_BYTES: Final = 64 * MIB
# Fragments of one block and layer: small models, large ones, cross-layer blocks.
FRAGMENT_BYTES: Final = (4 * KIB, 32 * KIB, 1 * MIB)
# What the memory of an attendant is filled from.
SEED: Final = 1
# A prober that is alive asks again as soon as it has measured.
PATIENCE_S: Final = 120.0

T = TypeVar("T")


class Greeting(msgspec.Struct, frozen=True):
    """What an attendant says first.

    Attributes:
        examination: What its host is like.
        grants: For the fragments of each size of ``FRAGMENT_BYTES``.
    """

    examination: Examination
    grants: tuple[bytes, ...]


class ProbeMemory:
    """Memory to measure with: fragments that lie apart, as the blocks of a cache do.

    At each size every second slot is a fragment. What lies between them must never
    change, which shows that a transport writes what it should and nothing beside it.

    Args:
        pass_bytes: Bytes of all fragments of one size.
        seed: Determines what is in it, fragments or not.
    """

    def __init__(self, pass_bytes: int, seed: int) -> None:
        noise = np.random.default_rng(seed).bytes(2 * pass_bytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(noise, np.uint8).copy()

    def slots(self, size: int) -> npt.NDArray[np.uint8]:
        """Pairs of slots: a fragment of this size, and what lies behind it."""
        return self.bytes.reshape(-1, 2, size)

    def fragments(self, size: int) -> Fragments:
        """The same as memory to move."""
        count = len(self.slots(size))
        step = np.uint64(2 * size)
        return Fragments(
            np.uint64(self.bytes.ctypes.data)
            + np.arange(count, dtype=np.uint64) * step,
            np.full(count, size, np.uint64),
            owner=self.bytes,
            writable=True,
        )

    def digest(self) -> bytes:
        """BLAKE2 of all of it."""
        return hashlib.blake2b(self.bytes.data, digest_size=32).digest()


async def attend(
    communicator: Communicator,
    examination: Examination,
    heard: Callable[[Connection, PeerReport | None], None],
    *,
    pass_bytes: int = PASS_BYTES,
) -> None:
    """Serve one connection after the other, until the communicator is closed.

    Args:
        communicator: It listens already.
        examination: What to tell of this host.
        heard: Called with each connection that is over, and its report if it sent one.
        pass_bytes: Bytes of all fragments of one size.
    """
    async for connection in communicator.connections():
        memory = ProbeMemory(pass_bytes, SEED)
        regions = [
            communicator.register(memory.fragments(size), "readwrite")
            for size in FRAGMENT_BYTES
        ]
        reports: list[PeerReport] = []
        try:
            grants = tuple(region.grant(connection).to_bytes() for region in regions)
            greeting = Greeting(examination, grants)
            await connection.send(GREETING_TAG, msgspec.json.encode(greeting))
            await _answer(connection, memory, reports)
        except (KVWireError, TimeoutError) as exc:
            if not isinstance(exc, ConnectionClosed):
                logger.warning("doctor: %s: %r", connection.peer, exc)
        finally:
            await connection.close()
            for region in regions:
                await region.close()
        heard(connection, reports[-1] if reports else None)


async def _answer(
    connection: Connection, memory: ProbeMemory, reports: list[PeerReport]
) -> None:
    """Do what the prober asks, until it goes."""
    buffer = bytearray(MESSAGE_BYTES_MAX)
    while True:
        async with asyncio.timeout(PATIENCE_S):
            count = await connection.recv(ASK_TAG, into=buffer)
            verb, said = bytes(buffer[:1]), bytes(buffer[1:count])
            answer = verb + said
            if verb == DIGEST:
                answer = memory.digest()
            elif verb == REPORT:
                reports[:] = [decoded(connection, said, PeerReport)]
                answer = b""
            await connection.send(ANSWER_TAG, answer)


def decoded(connection: Connection, said: bytes, kind: type[T]) -> T:
    """What another doctor said.

    Raises:
        KVWireError: It is of another version.
    """
    try:
        return msgspec.json.decode(said, type=kind)
    except msgspec.DecodeError as exc:
        raise KVWireError(
            f"the doctor at {connection.peer} is of another version: {exc}"
        ) from None
