"""Targets that come with kvwire: what is offered lands, and kvwire breaks nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from kvwire.testing.certify.runner import Stage, certify
from kvwire.testing.certify.schedule import Schedule, Step, make
from kvwire.testing.certify.transport import TARGETS
from tests.support.depth import sample
from tests.support.servers import redis_server

TRANSPORTS = ("kvwire:tcp", "kvwire:local", "kvwire:ucx")
# They need a server, and are tested with one.
SERVED = {"redis", "s3"}
NEEDS = {
    "kvwire:ucx": "libucx",
    "mooncake": "mooncake",
    "nixl": "nixl_cu12",
    "ucx": "libucx",
}
ONCE = Schedule(
    seed=0,
    slots=4,
    slot_bytes=64 << 10,
    steps=(
        Step("offer", 0, 1, 2),
        Step("get", 0, 2),
        Step("put", 0, 0),
        Step("get", 0, 2),
        Step("withdraw", 0),
    ),
)


def installed(target: str) -> str:
    """The target, if what it needs is installed.

    It is not loaded here: libraries leave descriptors and threads in a process.
    """
    needed = NEEDS.get(target, "kvwire")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return target


@pytest.mark.parametrize("target", sorted(set(TARGETS) - SERVED))
async def test_what_is_offered_lands(target: str) -> None:
    async with Stage(installed(target)) as stage:
        played = await stage.play(ONCE)
    assert (played.rule, played.text) == ("", "")
    assert played.operations == 3


@pytest.fixture(scope="module")
def redis_address() -> Iterator[str]:
    with redis_server() as server:
        yield f"127.0.0.1:{server.port}"


async def test_redis(redis_address: str) -> None:
    found = await certify(f"redis:{redis_address}", seeds=sample(range(1, 33), 8))
    assert found.breaches == ()
    assert found.operations


@pytest.mark.parametrize("target", TRANSPORTS)
async def test_kvwire_breaks_nothing(target: str) -> None:
    """Of 300 schedules in a thorough run, some in another."""
    first = 1000 * TRANSPORTS.index(target)
    found = await certify(
        installed(target), seeds=sample(range(first, first + 100), 25)
    )
    assert found.breaches == ()
    assert found.operations


async def test_a_get_whose_await_is_cancelled() -> None:
    """It was released too early, and written to memory that was in use."""
    async with Stage("kvwire:tcp") as stage:
        assert (await stage.play(make(1))).rule == ""
