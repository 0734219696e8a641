"""The driver of a lane, beside an agent whose peer has just ended."""

from __future__ import annotations

from typing import cast

import pytest

from kvwire.errors import ConnectionLost
from kvwire.types import Role
from kvwire_nixl.driver import NixlDriver
from kvwire_nixl.library import NixlAgent
from kvwire_nixl.settings import parse
from kvwire_nixl.wire import BYE, LaneProofs, NixlBootstrap

OURS = LaneProofs(b"s" * 32, Role.CLIENT)
THEIRS = LaneProofs(b"s" * 32, Role.SERVER)


class AgentOfAPeerGone:
    """An agent whose reads fail; what the peer said last comes with the second look."""

    def __init__(self, last: list[bytes]) -> None:
        self._notes = [[], last]

    def notes(self) -> list[bytes]:
        return self._notes.pop(0) if self._notes else []

    def is_done(self, _: int) -> bool:
        raise ConnectionLost("nixl: getXferStatus: NIXL_ERR_REMOTE_DISCONNECT")


@pytest.mark.parametrize(
    ("last", "told"), [([THEIRS.note(1), THEIRS.note(BYE)], [1]), ([], [])]
)
def test_a_peer_may_end_once_it_has_read_everything(
    last: list[bytes], told: list[int]
) -> None:
    """Its word is being read meanwhile, to see that it lives."""
    sent: list[int] = []
    driver = NixlDriver(
        parse({}),
        NixlBootstrap("1.5.1", "UCX", "a" * 32, 0, b""),
        OURS,
        "test",
        call_soon=lambda call: call(),
        joined=lambda _: None,
        received=lambda _: None,
        sent=sent.append,
        gone=lambda _: None,
    )
    driver.agent = cast("NixlAgent", AgentOfAPeerGone(last))
    driver._offered, driver._word_handle, driver._word_posted = 1, 7, True
    if told:
        assert driver._turn()
    else:
        with pytest.raises(ConnectionLost, match="DISCONNECT"):
            driver._turn()
    assert sent == told
