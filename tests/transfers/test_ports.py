"""What transfers need of a connection and of a communicator is what the ports name."""

from __future__ import annotations

from kvwire.transfers.ports import CommunicatorPort, ConnectionPort
from tests.scenarios.world import World, scenario


@scenario("inproc")
async def test_what_stands_above_has_what_the_ports_name(w: World) -> None:
    inc = w.pull_side.pull("t", w.target.cache, [1])
    state = inc._state
    communicator: object = state.communicator
    assert state.attempt is not None
    connection: object = state.attempt.connection
    for port, found in (
        (CommunicatorPort, communicator),
        (ConnectionPort, connection),
    ):
        names = {name for name in vars(port) if name[0] != "_"}
        assert len(names) < 13
        assert not {name for name in names if not hasattr(found, name)}
    inc.abort()
