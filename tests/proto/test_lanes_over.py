"""Lanes that are over: others come in their place, and nobody speaks of them again."""

from __future__ import annotations

import pytest

from kvwire.limits import LANES_MAX
from kvwire.proto.lanes import LaneStage
from kvwire.types import Role
from tests.proto.lanes import Scene, expect_whole

CLIENT, SERVER = Role.CLIENT, Role.SERVER


@pytest.mark.rule("KVW-LN-01", "keeps")
def test_so_many_lanes_at_once_and_no_more() -> None:
    """One that is over makes room for another, whose number is new."""
    scene = Scene()
    for number in range(1, LANES_MAX + 1):
        assert scene.lanes.raise_one() == number
    assert scene.client.core.lanes.next_number() is None
    scene.lanes.end(scene.half(CLIENT, 3))
    scene.pair.run()
    assert scene.client.core.lanes.next_number() is None
    scene.lanes.rest()
    assert scene.lanes.raise_one() == LANES_MAX + 1
    assert scene.stage(SERVER, LANES_MAX + 1) is LaneStage.OPEN
    assert scene.client.core.lanes.next_number() is None


@pytest.mark.rule("KVW-LN-08", "keeps")
@pytest.mark.parametrize("refuses", [True, False])
def test_a_connection_lives_longer_than_any_number_of_its_lanes(refuses: bool) -> None:
    """Each breaks or never comes, has a number of its own, and is forgotten."""
    scene = Scene()
    scene.lanes.refuses = refuses
    for number in range(1, 10 * LANES_MAX):
        assert scene.lanes.raise_one() == number
        if not refuses:
            scene.lanes.via[CLIENT] = number
            request = scene.put()
            scene.lanes.end(scene.half(SERVER, number))
            scene.lanes.rest()
            expect_whole(scene, request)
        scene.lanes.rest()
        for peer in (scene.client, scene.server):
            assert len(peer.core.lanes._lanes) == 1
    assert scene.client.broken is scene.server.broken is None


@pytest.mark.rule("KVW-LN-01", "keeps")
def test_a_lane_is_raised_after_the_first_choice() -> None:
    scene = Scene()
    scene.up()
    scene.client.core.lanes.end_initial_set()
    scene.client.collect()
    scene.lanes.end(scene.half(CLIENT))
    scene.lanes.rest()
    assert scene.up() == 2
    request = scene.put()
    scene.lanes.rest()
    expect_whole(scene, request)
    assert scene.half(CLIENT, 2).number == 2
    assert scene.server.core.lanes.initial_set_done
