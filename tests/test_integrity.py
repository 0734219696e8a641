"""Which payloads are sent with a checksum, and which of them are the ones sent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kvwire
from kvwire.integrity import SAMPLED_ONE_IN, CheckMode, Checks, matches
from kvwire.kv.fragments import Fragments
from kvwire.limits import EAGER_BYTES_MAX
from kvwire.memory.checksum import checksum
from kvwire.types import Device, MemoryKind
from kvwire.wire.header import Flag, FrameType, Header, decode_header, encode_header

SHORT, LONG = (memoryview(bytes(n)) for n in (EAGER_BYTES_MAX, EAGER_BYTES_MAX + 1))
MANY = 4000


def header(check: int | None) -> Header:
    flags = 0 if check is None else int(Flag.CHECKED)
    return decode_header(
        encode_header(FrameType.DATA, flags, 0, 1, payload_check=check or 0)
    )


def checked(checks: Checks, payload: memoryview, count: int) -> list[int]:
    """The numbers of those of so many payloads that have a checksum."""
    return [i for i in range(count) if checks.of(payload) is not None]


@pytest.mark.parametrize(
    ("mode", "short", "long"),
    [
        ("auto", MANY, MANY),
        ("on", MANY, MANY),
        ("off", 0, 0),
        ("sampled", MANY, MANY // SAMPLED_ONE_IN),
    ],
)
def test_how_many_are_checked(mode: CheckMode, short: int, long: int) -> None:
    checks = Checks(mode)
    assert len(checked(checks, SHORT, MANY)) == short
    assert abs(len(checked(checks, LONG, MANY)) - long) <= 1


@pytest.mark.parametrize(
    ("mode", "long"),
    [("auto", MANY // SAMPLED_ONE_IN), ("on", MANY), ("off", 0)],
)
def test_how_many_are_checked_from_memory_to_memory(mode: CheckMode, long: int) -> None:
    checks = Checks(mode)
    found = [i for i in range(MANY) if checks.of(LONG, intact=True) is not None]
    assert abs(len(found) - long) <= 1


def test_the_first_is_checked_and_the_longest_gap_is_known() -> None:
    numbers = checked(Checks("sampled"), LONG, MANY)
    assert numbers[0] == 0
    assert max(b - a for a, b in itertools.pairwise(numbers)) == 13


@pytest.mark.parametrize("period", [2, 8, 13, 16, 32, 80, 100])
def test_no_place_in_a_transfer_is_passed_over_for_ever(period: int) -> None:
    """Transfers of the same number of chunks, such as one for each layer."""
    numbers = checked(Checks("sampled"), LONG, MANY)
    assert {number % period for number in numbers} == set(range(period))


def test_it_is_the_checksum_of_the_payload() -> None:
    check = Checks("on").of(SHORT)
    assert check == checksum(SHORT)
    assert matches(SHORT, header(check))
    damaged = memoryview(bytes(EAGER_BYTES_MAX - 1) + b"x")
    assert not matches(damaged, header(check))
    assert matches(damaged, header(None))
    assert matches(None, header(check))


def test_memory_of_a_device_is_not_touched() -> None:
    where = np.array([8], np.uint64)
    device = Device(MemoryKind.CUDA, 0)
    there = Fragments(where, where, owner=None, writable=True, device=device)
    assert Checks("on").of(there) is None
    assert matches(there, header(1))


async def test_a_large_message_arrives_with_few_checksums() -> None:
    config = kvwire.Config(checksum="sampled")
    async with kvwire.open(config, name="a") as a, kvwire.open(config, name="b") as b:
        near = await a.connect(await b.listen("127.0.0.1:0"))
        far = await b.accept()
        data = np.random.default_rng(1).integers(0, 256, 20_000_000, np.uint8)
        into = np.zeros_like(data)
        receiving = far.recv(1, into=into)
        await near.send(1, data)
        assert await receiving == data.size
        assert (into == data).all()
