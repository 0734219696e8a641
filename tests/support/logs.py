"""What kvwire has logged, without what asyncio's debug mode says of a busy machine."""

from __future__ import annotations

import logging

import pytest


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records of kvwire and its backends."""
    return [r for r in caplog.records if r.name.partition(".")[0] == "kvwire"]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What of that is a warning or worse."""
    return [r.getMessage() for r in logged(caplog) if r.levelno >= logging.WARNING]
