"""Every size that a setting takes is opened and used: 0, 1, 1 KiB, GiB, the largest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pytest

import kvwire
from kvwire import Config
from kvwire.errors import UsageError
from kvwire.limits import GIB, KIB, TIB
from kvwire.types import Address, in_bytes
from tests.support.caches import Memory, same
from tests.support.pairs import connected

# Of the settings that are times, tests of what they limit use the smallest and largest.
_UNITS_OF_TIME: Final = "_s"
_VALUES: Final = (0, 1, KIB, 64 * KIB, GIB, 2 * GIB, 64 * GIB)
# A setting without a largest value takes any that msgspec reads from a file.
_LARGEST: Final = 2**63 - 1
_TAG: Final = 1


def sizes() -> Iterator[tuple[str, int]]:
    """Yield each numeric setting with each of these values that it takes."""
    found = msgspec.inspect.type_info(Config)
    assert isinstance(found, msgspec.inspect.StructType)
    for field in found.fields:
        if not isinstance(field.type, msgspec.inspect.IntType):
            continue
        least = field.type.ge
        most = field.type.le or _LARGEST
        assert least is not None, f"{field.name} takes numbers below 0"
        within = {value for value in _VALUES if least <= value <= most}
        for value in sorted({least, *within, most}):
            yield field.name, int(value)


def test_every_setting_that_is_a_number_has_its_sizes() -> None:
    named = {name for name, _ in sizes()}
    assert {"chunk_bytes", "message_bytes", "quarantine_bytes", "lanes"} <= named
    assert not any(name.endswith(_UNITS_OF_TIME) for name in named)


@pytest.mark.parametrize(("name", "value"), [*sizes()])
async def test_a_setting_is_used_at_each_of_its_sizes(name: str, value: int) -> None:
    """By a message, a transfer, a put, a get, and blocks from a window."""
    data = np.random.default_rng(value % 2**32).bytes(100 * KIB)
    settings: dict[str, Any] = {name: value}
    async with connected("tcp", prefer=("tcp",), **settings) as pair:
        message = data
        if name == "message_bytes":
            message = data[: min(value, len(data))]
        sent = pair.left.send(_TAG, message)
        assert bytes(await pair.right.recv(_TAG)) == message
        await sent

        source, target = Memory(), Memory()
        source.stamp([0, 1])
        out = pair.far.publish("x", source.cache, [0, 1])
        out.ready()
        out.finish()
        pulled = pair.left.pull("x", target.cache, [2, 3])
        assert (await pulled).complete
        await pulled.drained()
        assert (await out).complete
        await out.drained()
        assert same(source, [0, 1], target, [2, 3])

        lent = np.zeros(len(data), np.uint8)
        async with pair.far.register(lent, access="readwrite") as region:
            raw = region.grant(pair.right).to_bytes()
            grant = kvwire.Grant.from_bytes(raw)
            await pair.left.put(data, grant)
            back = bytearray(len(data))
            await pair.left.get(grant, into=back)
            assert back == lent.tobytes() == data

        async with (
            pair.far.expose("kv", source.cache) as window,
            await pair.left.window("kv") as remote,
        ):
            into = Memory()
            ticket = window.offer([0, 1])
            got = await remote.get(ticket, into=into.cache, blocks=[4, 5])
            assert got.complete
            assert same(source, [0, 1], into, [4, 5])


# --- sizes as people say them, and addresses that are none ----------------------------


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4096, "4 KiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (2 * TIB, "2 TiB"),
    ],
)
def test_sizes(count: int, said: str) -> None:
    assert in_bytes(count) == said


@pytest.mark.parametrize("user", ["user:", ":", "", "user:more:"])
@pytest.mark.parametrize("scheme", ["", "tcp://", "redis://"])
@pytest.mark.parametrize("sign", ["", "#", "?", "/", "[", "@"])
def test_a_password_in_an_address_is_not_shown(
    scheme: str, user: str, sign: str
) -> None:
    with pytest.raises(UsageError, match="without a user name") as caught:
        Address.parse(f"{scheme}{user}secret{sign}word@host:7400")
    assert "secret" not in str(caught.value)
    assert "host:7400" in str(caught.value)


def test_a_path_may_have_an_at_sign() -> None:
    assert Address.parse("unix:///run/a@b").host == "/run/a@b"
