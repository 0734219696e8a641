"""Segments move while their transfer does."""

from __future__ import annotations

from kvwire.proto.records import SegmentRecord
from kvwire.proto.requests import RequestRecord
from kvwire.proto.state import RequestInput, RequestKind, RequestStage


def test_a_segment_is_in_the_state_of_its_transfer() -> None:
    """It has none of its own."""
    request = RequestRecord(
        kind=RequestKind.OUTGOING, wire_id=None, buffer=None, nbytes=0
    )
    segment = SegmentRecord(request=request, number=1, box=(0, 0, 1, 0, 1), nbytes=5)
    states = [segment.state]
    for event in (RequestInput.GO, RequestInput.FAIL):
        request.advance(event)
        states.append(segment.state)
    assert states == [RequestStage.POSTED, RequestStage.MOVING, RequestStage.FAILED]
