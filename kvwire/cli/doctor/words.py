"""What two doctors say to each other, over a connection of kvwire itself.

The prober asks, the attendant answers: one JSON message each, of at most
``MESSAGE_BYTES_MAX`` bytes. The attendant chooses its own memory, and takes from the
prober nothing but one of the fragment sizes that both know. It shows in its profile
that it is a doctor, so that nobody asks a server that is none.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from kvwire import Connection, KVWireError
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.trial import Report
from kvwire.limits import KIB, MIB

PROFILE_KEY: Final = "kvwire.doctor"
PROFILE: Final = {PROFILE_KEY: "1"}
# Tags of both directions, and of the echoes.
ASK_TAG: Final = 1
ANSWER_TAG: Final = 2
ECHO_TAG: Final = 3

MESSAGE_BYTES_MAX: Final = 1 * MIB
# The bytes of one pass, each way: much beside what starting costs, and little beside
# the memory of any host.
PASS_BYTES: Final = 64 * MIB
# Fragments of one block and layer: small models, large ones, cross-layer blocks.
FRAGMENT_BYTES: Final = (4 * KIB, 32 * KIB, 1 * MIB)
ECHO_BYTES: Final = 64
ECHOES_MAX: Final = 1000


class Examine(msgspec.Struct, frozen=True, tag="examine"):
    """Answered with an Examination."""


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    """The next ``count`` messages of ``ECHO_TAG`` are sent back; then Done."""

    count: int


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Memory in fragments of a size, filled from a seed; answered with Lent."""

    fragment_bytes: int
    seed: int


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """What is in the lent memory now; answered with Digested."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The report, for the attendant's user to have too; answered with Done."""

    report: Report


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """A grant for the memory; see :meth:`kvwire.Grant.from_bytes`."""

    grant: bytes


class Digested(msgspec.Struct, frozen=True, tag="digested"):
    """BLAKE2 of the lent bytes, and whether those between them are untouched."""

    digest: bytes
    gaps_untouched: bool


class Examined(msgspec.Struct, frozen=True, tag="examined"):
    """What the attendant's host is like."""

    examination: Examination


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It has been done."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It has not been done, and why."""

    reason: str


T = TypeVar("T")
Ask = Examine | Echo | Lend | Digest | Finish
Answer = Examined | Done | Lent | Digested | Refused

_ask_of: Final = msgspec.json.Decoder(Ask)
_answer_of: Final = msgspec.json.Decoder(Answer)


async def ask(connection: Connection, question: Ask, kind: type[T]) -> T:
    """Ask the attendant, and wait for an answer of a kind."""
    await say(connection, question)
    return await heard(connection, kind)


async def say(connection: Connection, question: Ask) -> None:
    """Ask the attendant; :func:`heard` waits for the answer."""
    await connection.send(ASK_TAG, msgspec.json.encode(question))


async def heard(connection: Connection, kind: type[T]) -> T:
    """The attendant's answer, which has to be of a kind."""
    said = await _received(connection, ANSWER_TAG, _answer_of)
    if isinstance(said, kind):
        return said
    text = said.reason if isinstance(said, Refused) else type(said).__name__
    raise KVWireError(f"the doctor at {connection.peer} answered: {text[:200]!r}")


async def asked(connection: Connection) -> Ask:
    """The prober's next question."""
    return await _received(connection, ASK_TAG, _ask_of)


async def answer(connection: Connection, said: Answer) -> None:
    """Answer the prober."""
    await connection.send(ANSWER_TAG, msgspec.json.encode(said))


async def _received(
    connection: Connection, tag: int, decoder: msgspec.json.Decoder[T]
) -> T:
    buffer = bytearray(MESSAGE_BYTES_MAX)
    count = await connection.recv(tag, into=buffer)
    try:
        return decoder.decode(memoryview(buffer)[:count])
    except msgspec.DecodeError as exc:
        raise KVWireError(
            f"the doctor at {connection.peer} is of another version: {exc}"
        ) from None
