"""Events are values: what was said stays said."""

from __future__ import annotations

from typing import get_args

import msgspec

from kvwire.proto import events
from kvwire.proto.events import Event


def test_every_event_is_listed() -> None:
    """Whoever matches over ``Event`` has seen them all."""
    classes = {
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    assert set(get_args(Event)) == classes
