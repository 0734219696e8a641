"""The loopback harness: one line, two connected communicators, nothing left over."""

from __future__ import annotations

import pytest

import kvwire
from kvwire.testing import Loopback, loopback
from kvwire.testing.faults import FaultPlan

BACKENDS = ("inproc", "tcp")


async def chat(pair: Loopback) -> int:
    """Send 50 messages, one after the other; how many arrived."""
    for number in range(50):
        await pair.ab.send(1, b"%d" % number)
        assert await pair.ba.recv(1, deadline=0.1) == b"%d" % number
    return number + 1


@pytest.mark.parametrize("backend", BACKENDS)
async def test_both_ends_of_one_connection(backend: str) -> None:
    async with loopback(backend) as pair:
        assert isinstance(pair, Loopback)
        assert pair.a.name == pair.ba.peer.name == "a"
        assert pair.b.name == pair.ab.peer.name == "b"
        assert pair.ab.transport == pair.ba.transport == backend
        assert pair.address.scheme == backend
        await pair.ab.send(7, b"there")
        assert await pair.ba.recv(7) == b"there"
        await pair.ba.send(7, b"and back")
        assert await pair.ab.recv(7) == b"and back"
    assert pair.ab.closed
    assert pair.ba.closed


async def test_configuration_is_that_of_both() -> None:
    config = kvwire.Config(profile={"model": "toy"}, message_bytes=8)
    async with loopback(config=config, eager_bytes=0) as pair:
        for communicator in (pair.a, pair.b):
            assert communicator.config.profile == {"model": "toy"}
            assert communicator.config.message_bytes == 8
            assert communicator.config.eager_bytes == 0


async def test_an_exception_aborts_and_goes_on() -> None:
    with pytest.raises(ZeroDivisionError):
        async with loopback() as pair:
            1 / 0  # noqa: B018 - raises
    with pytest.raises(kvwire.ConnectionLost):
        await pair.ab.send(1, b"x")


async def test_faults_befall_what_is_sent() -> None:
    """A link that dies after 20 frames ends the connection, and the block ends too."""
    plan = FaultPlan(seed=1, kill=1.0, kill_after=20)
    async with loopback(faults=plan) as pair:
        with pytest.raises(kvwire.ConnectionLost, match="killed by its fault plan"):
            await chat(pair)


async def test_a_stalled_link_does_not_keep_the_end_waiting() -> None:
    plan = FaultPlan(seed=1, stall=1.0, stall_after=10)
    async with loopback(faults=plan, close_timeout_s=3600) as pair:
        with pytest.raises(kvwire.DeadlineExceeded):
            await chat(pair)


async def test_the_plan_is_in_force_for_this_pair_only() -> None:
    plan = FaultPlan(seed=1, kill=1.0, kill_after=20)
    async with loopback(faults=plan), loopback() as sound:
        assert await chat(sound) == 50


async def test_a_handshake_that_faults_have_hit_is_an_error() -> None:
    with pytest.raises(kvwire.ConnectionLost):
        async with loopback(faults=FaultPlan(seed=1, kill=1.0)):
            pytest.fail("connected over a dead link")


async def test_other_backends_have_no_faults() -> None:
    with pytest.raises(kvwire.UsageError, match="only inproc injects faults"):
        async with loopback("tcp", faults=FaultPlan(seed=1)):
            pytest.fail("took a plan that nothing follows")
