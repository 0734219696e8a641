"""Goals R7, S7 and S8 inside TLS: handshakes cut, stalled, in crowds, or nonsense."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import kvwire
from kvwire import Communicator
from kvwire.limits import KIB, PENDING_HANDSHAKES_MAX
from tests.fault.test_handshake_cuts import HANDSHAKE_S, SLACK_S
from tests.fault.test_strangers import Crowd, client_hello, resident_bytes
from tests.support.certificates import FAR, NEAR, Authority
from tests.support.pairs import until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
async def sides(
    authority: Authority,
) -> AsyncIterator[tuple[Communicator, Communicator]]:
    asyncio.get_running_loop().set_debug(False)
    both: dict[str, Any] = {"handshake_timeout_s": HANDSHAKE_S, "prefer": ("tcp",)}
    async with (
        kvwire.open(name="near", **both, **authority.config(NEAR, FAR)) as near,
        kvwire.open(name="far", **both, **authority.config(FAR, NEAR)) as far,
    ):
        yield near, far


# --- nonsense -------------------------------------------------------------------------


def nonsense() -> Iterator[bytes]:
    rng = random.Random(7)
    hello = client_hello()
    for _ in range(60):
        wrong = bytearray(hello)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        yield bytes(wrong)
    for size in (1, 5, 32, 300, 20 * KIB):
        yield rng.randbytes(size)
        yield b"\x16\x03\x01" + rng.randbytes(size)
        yield hello + rng.randbytes(size)
        yield hello + hello
    yield from (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x2e\x01\x00\x02", bytes(64 * KIB))


async def test_nonsense_costs_its_own_connection(
    sides: tuple[Communicator, Communicator], caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log for each, no traceback, and the next peer is served."""
    caplog.set_level(logging.INFO, "kvwire")
    near, far = sides
    address = await far.listen("127.0.0.1:0")
    said = list(nonsense())
    for data in said:
        async with Crowd(address) as crowd:
            try:
                await crowd.grow(1, data)
                crowd.sockets[0].shutdown(1)
                await crowd.expect_told()
            except ConnectionError:
                pass
    await until(lambda: not far._state.drivers)
    await until(lambda: not far._state._reception._tasks)
    assert len(caplog.records) == len(said)
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    connection = await near.connect(address)
    await connection.close()


# --- stalled --------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_thousand_that_stall_do_not_stop_an_honest_one(
    authority: Authority,
) -> None:
    """Some say nothing, some half a ClientHello, some a whole one."""
    hello = client_hello()
    asyncio.get_running_loop().set_debug(False)
    async with (
        kvwire.open(name="near", prefer=("tcp",), **authority.config(NEAR)) as near,
        kvwire.open(name="far", prefer=("tcp",), **authority.config(FAR)) as far,
    ):
        address = await far.listen("127.0.0.1:0")
        async with Crowd(address) as crowd:
            for data in itertools.islice(
                itertools.cycle((b"", hello[:5], hello[:-1], hello)), 20
            ):
                await crowd.grow(50, data)
                connection = await near.connect(address)
                await connection.close()
                assert len(far._state._reception._pending) <= PENDING_HANDSHAKES_MAX


async def test_who_stalls_is_gone_by_the_deadline(
    sides: tuple[Communicator, Communicator],
) -> None:
    hello = client_hello()
    address = await sides[1].listen("127.0.0.1:0")
    for data in (b"", hello[:5], hello[:-1], hello):
        async with Crowd(address) as crowd:
            async with asyncio.timeout(HANDSHAKE_S + SLACK_S):
                await crowd.grow(8, data)
                await crowd.expect_told()


# --- memory ---------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/statm is Linux's")
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.slow
async def test_handshakes_that_fail_leave_nothing(authority: Authority) -> None:
    asyncio.get_running_loop().set_debug(False)
    hello = client_hello()
    async with kvwire.open(**authority.config(FAR)) as comm:
        address = await comm.listen("127.0.0.1:0")

        async def fail(count: int) -> None:
            async with Crowd(address) as crowd:
                await crowd.grow(count, hello[:100] + bytes(100) + hello[200:])
                await crowd.expect_told()
            await until(lambda: not comm._state.drivers)

        gc.collect()
        gc.disable()
        try:
            await fail(100)
            before = resident_bytes()
            for _ in range(10):
                await fail(100)
            grown = resident_bytes() - before
        finally:
            gc.enable()
        each = grown / 1000
        print(f"until it is collected, a failed handshake keeps {each / KIB:.1f} KiB")
        # As much as one without TLS; the 40 KiB of OpenSSL are gone at once.
        assert each < 24 * KIB
