"""Distributions of transfers: what is counted where, and how many peers are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvwire.observe import distributions
from tests.support.caches import Memory
from tests.support.pairs import connected


def test_buckets_count_what_is_at_most_their_bound() -> None:
    found = distributions.Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        found.add(value)
    assert found.buckets == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert found.total == 6.0


async def test_an_end_is_in_each_of_them_once() -> None:
    seen = distributions.TransferDistributions()
    async with connected("inproc") as pair:
        pair.near.watchers.add(seen)
        out = pair.far.publish("x", Memory().cache, [0, 1])
        out.ready()
        out.finish()
        outcome = await pair.left.pull("x", Memory().cache, [2, 3])
        await out
    for found in (seen.exposed, seen.queue, seen.nbytes):
        assert sum(found.counts) == 1
    assert seen.nbytes.total == outcome.nbytes
    times = outcome.timings
    assert seen.exposed.total + seen.queue.total + times.mark_wait_s == pytest.approx(
        times.total_s
    )
    assert seen.peers == {("far", "consumer", "complete"): (1, outcome.nbytes)}


async def test_peers_are_bounded() -> None:
    seen = distributions.TransferDistributions()
    async with connected("inproc") as pair:
        inc = pair.left.pull("x", Memory().cache, [2, 3])
        inc.abort()
        outcome = await inc

        class Named:
            def __init__(self, name: str) -> None:
                self.peer = replace(pair.left.peer, name=name)

        for number in range(distributions.PEERS_MAX + 3):
            one: Any = Named(f"peer-{number}")
            seen.ended(inc, outcome, (one, one))
    assert len(seen.peers) == distributions.PEERS_MAX + 1
    assert seen.peers[distributions.OTHER, "consumer", "failed"] == (6, 0)
