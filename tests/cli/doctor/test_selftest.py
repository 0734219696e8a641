"""The same command on both sides: one finds the other, and both have the report."""

from __future__ import annotations

import asyncio
import socket

import pytest

import kvwire
from kvwire import Address, KVWireError, UsageError
from kvwire.cli.doctor.attendant import FRAGMENT_BYTES, PROFILE
from kvwire.cli.doctor.selftest import selftest
from kvwire.cli.doctor.trial import Report
from kvwire.limits import MIB
from tests.cli.doctor.trees import examination, machine


def free_address() -> Address:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return Address("tcp", *unused.getsockname())


async def run(address: Address, name: str, wait_s: float = 10) -> Report:
    said: list[str] = []
    async with kvwire.open(profile=PROFILE, require=("tcp",)) as communicator:
        report = await selftest(
            communicator,
            address,
            examination(machine(system=name)),
            said.append,
            wait_s=wait_s,
            pass_bytes=MIB,
        )
    assert said
    return report


async def test_both_have_the_same_report() -> None:
    address = free_address()
    first, second = await asyncio.gather(run(address, "a"), run(address, "b"))
    assert first == second
    assert first.well
    assert first.there is not None
    assert {first.here.machine.system, first.there.machine.system} == {"a", "b"}
    by_name = {trial.asked: trial for trial in first.trials}
    assert by_name[""].taken == "tcp"
    rates = by_name["tcp"].rates
    assert {rate.fragment_bytes for rate in rates} == set(FRAGMENT_BYTES)
    assert {rate.verb for rate in rates} == {"put", "get"}


async def test_a_transport_that_was_ruled_out_says_so() -> None:
    address = free_address()
    report, _ = await asyncio.gather(run(address, "a"), run(address, "b"))
    assert [trial.asked for trial in report.trials] == ["", "tcp"]
    reasons = {c.name: c.reason for c in report.trials[0].candidates}
    assert "not among `require`" in reasons["inproc"]


async def test_nobody_comes() -> None:
    with pytest.raises(KVWireError, match=r"nobody finished a self-test within 0\.05"):
        await run(free_address(), "a", wait_s=0.05)


async def test_nobody_listens_on_an_address_of_another_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = Address("tcp", *taken.getsockname())
        with pytest.raises(KVWireError, match="for 0 s"):
            await run(address, "a", wait_s=0)


async def test_an_address_of_every_host_is_refused() -> None:
    with pytest.raises(UsageError, match="name the address of one"):
        await run(Address("tcp", "0.0.0.0", 7400), "a")


async def test_a_server_that_is_no_doctor() -> None:
    async with kvwire.open() as server:
        address = await server.listen("127.0.0.1:0")
        with pytest.raises(KVWireError, match="no `kvwire doctor --listen`"):
            await run(address, "a")
