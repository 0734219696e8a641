"""Which messages nobody receives, so that the log can name them once."""

from __future__ import annotations

from collections.abc import Mapping

from kvwire.limits import WAITING_LOG_S


class UnreceivedLog:
    """Watches the oldest message of each tag that waits for a receive."""

    def __init__(self) -> None:
        # Since when the same message is the oldest; None once it was named.
        self._seen: dict[int, tuple[object, float | None]] = {}

    def look(self, oldest: Mapping[int, object], now: float) -> list[int]:
        """Return the tags to name: the same message has waited there for long."""
        before, self._seen, named = self._seen, {}, []
        for tag, message in oldest.items():  # bounded: by the credit of the core
            was, since = before.get(tag, (None, None))
            if was is not message:
                since = now
            elif since is not None and now - since >= WAITING_LOG_S:
                named.append(tag)
                since = None
            self._seen[tag] = message, since
        return named
