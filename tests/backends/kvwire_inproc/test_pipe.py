"""One direction of a link within a process: order, counts, and whose memory it is."""

from __future__ import annotations

from threading import RLock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ConnectionLost
from kvwire.limits import HEADER_BYTES
from kvwire.memory.copy import as_fragments
from kvwire_inproc.pipe import InprocPipe, PipeEnd, PipeFrame

HEADER = bytes(HEADER_BYTES)
PAYLOAD = bytes(range(200))


def frame(length: int = 0, token: object = None) -> PipeFrame:
    return PipeFrame(HEADER, memoryview(PAYLOAD)[:length] if length else None, token)


@pytest.fixture
def pipe() -> InprocPipe:
    return InprocPipe(RLock())


@given(
    lengths=st.lists(st.integers(0, len(PAYLOAD)), min_size=1, max_size=8),
    piece_bytes=st.integers(1, len(PAYLOAD) + 1),
    cut=st.booleans(),
)
def test_every_byte_arrives_once_and_is_queued_until_then(
    lengths: list[int], piece_bytes: int, cut: bool
) -> None:
    """However it is cut; ``queued_bytes`` falls with each piece, and ends at 0."""
    pipe = InprocPipe(RLock())
    pipe.put([frame(length) for length in lengths])
    queued_bytes = sum(lengths) + HEADER_BYTES * len(lengths)
    for length in lengths:
        assert pipe.queued_bytes == queued_bytes
        into = memoryview(bytearray(length))
        head = pipe.head()
        assert head is not None
        landing = as_fragments(into) if cut and length else into
        while head.moved < length:
            moved = pipe.move(head, landing, piece_bytes)
            assert 0 < moved <= piece_bytes
            queued_bytes -= moved
            assert pipe.queued_bytes == queued_bytes
        pipe.done(head)
        queued_bytes -= HEADER_BYTES
        assert into == PAYLOAD[:length]
    assert pipe.queued_bytes == 0


def test_after_an_end_the_sender_s_memory_is_not_read(pipe: InprocPipe) -> None:
    """Even by a receiver that is in the middle of a payload, and has it in hand."""
    pipe.put([frame(200, "token"), frame(10)])
    head = pipe.head()
    assert head is not None
    into = memoryview(bytearray(200))
    pipe.move(head, into, 50)
    error = ConnectionLost("aborted")
    pipe.end(error)
    assert pipe.move(head, into, 150) == 0
    assert bytes(into[50:]) == bytes(150)
    pipe.done(head)
    assert pipe.take_sent() == []
    assert pipe.head() is None
    assert pipe.queued_bytes == 0
    assert pipe.outcome() == PipeEnd(error)
