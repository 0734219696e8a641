"""Events are values: what was said stays said."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from kvwire.errors import ClosedOK
from kvwire.proto import events
from kvwire.proto.events import Ended, Event, RequestDone
from kvwire.proto.requests import RequestRecord
from kvwire.proto.state import RequestKind


def test_events_do_not_change() -> None:
    """None of their fields can be set."""
    request = RequestRecord(kind=RequestKind.SEND, wire_id=None, buffer=None, nbytes=5)
    done = RequestDone(request=request, error=None, nbytes=5)
    assert done.held is None
    with pytest.raises(AttributeError):
        done.nbytes = 6  # type: ignore[misc]
    ended = Ended(error=ClosedOK("over"), graceful=True)
    with pytest.raises(AttributeError):
        ended.graceful = False  # type: ignore[misc]


def test_every_event_is_listed() -> None:
    """Whoever matches over ``Event`` has seen them all."""
    classes = {
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    assert set(get_args(Event)) == classes
