"""What others are told to dial: by a record, a store server or an engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import kvwire
import kvwire_store
from kvwire import Address, UsageError
from kvwire.directory import Record
from kvwire.directory.dialable import (
    check_dialable,
    read_advertised,
    warn_of_unknown_name,
)
from kvwire.security.keys import write_key_file
from tests.support.logs import warned

NOBODY = [
    ("tcp://0.0.0.0:7400", "every interface"),
    ("tcp://[::]:7400", "every interface"),
    ("tcp://[::ffff:0.0.0.0]:7400", "every interface"),
    ("tcp://224.0.0.1:7400", "multicast or broadcast"),
    ("tcp://[ff02::1]:7400", "multicast or broadcast"),
    ("tcp://255.255.255.255:7400", "multicast or broadcast"),
    ("tcp://[fe80::1]:7400", "one link only; add the link"),
    ("tcp://10.0.0.7:0", "port is 0"),
    ("tcp://node-7:0", "port is 0"),
    ("tcp://a..b:7400", "neither an address nor a host name"),
    ("tcp://a b:7400", "neither an address nor a host name"),
    ("tcp://1.2.3.4.5:7400", "neither an address nor a host name"),
    ("tcp://300.1.1.1:7400", "neither an address nor a host name"),
    ("tcp://0x0:7400", "neither an address nor a host name"),
    ("tcp://127.0.0.0X1:7400", "neither an address nor a host name"),
    (f"tcp://{'x' * 64}.test:7400", "neither an address nor a host name"),
    ("tcp://:7400", "neither an address nor a host name"),
]
SOMEBODY = [
    "tcp://10.0.0.7:7400",
    "tcp://127.0.0.1:1",
    "tcp://[fd00::7]:65535",
    "tcp://[fe80::1%eth0]:7400",
    "tcp://node_7.default.svc.:7400",
    "tcp://müller.example:7400",
    "inproc://name",
    "unix:///run/x",
]


@pytest.mark.parametrize(("text", "words"), NOBODY)
def test_what_nobody_can_dial(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_dialable(Address.parse(text))
    with pytest.raises(UsageError, match="nobody can dial"):
        Record.decode(f'{{"name": "a", "address": "{text}"}}')


@pytest.mark.parametrize("text", SOMEBODY)
def test_what_somebody_can_dial(text: str) -> None:
    check_dialable(Address.parse(text))
    assert Record(name="a", address=text).address == text


def test_a_port_is_in_its_range() -> None:
    with pytest.raises(UsageError, match="port is 65536"):
        check_dialable(Address("tcp", "10.0.0.1", 65536))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("node-7", Address("tcp", "node-7")),
        ("node-7:17400", Address("tcp", "node-7", 17400)),
        ("tcp://203.0.113.7", Address("tcp", "203.0.113.7")),
        ("tcp://203.0.113.7:9", Address("tcp", "203.0.113.7", 9)),
        ("fd00::7", Address("tcp", "fd00::7")),
        ("[fd00::7]", Address("tcp", "fd00::7")),
        ("[fd00::7]:9", Address("tcp", "fd00::7", 9)),
        ("inproc://name", Address("inproc", "name")),
    ],
)
def test_a_host_is_written_with_or_without_a_port(text: str, read: Address) -> None:
    assert read_advertised(text) == read


@pytest.mark.parametrize("text", ["a:b", "tcp://a:99999", "[fd00::7", "http://a"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(UsageError, match="address"):
        check_dialable(read_advertised(text))


async def test_a_name_that_is_not_found_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        await warn_of_unknown_name(Address("tcp", "127.0.0.1", 7400))
        assert not warned(caplog)
        await warn_of_unknown_name(Address("tcp", "no-such-host.invalid", 7400))
    (line,) = warned(caplog)
    assert "tcp://no-such-host.invalid:7400" in line


# --- a store server -------------------------------------------------------------------


async def announced_by_a_server(folder: Path, listen: str, advertise: str) -> str:
    """Return the address in the directory of a store server."""
    write_key_file(folder / "key")
    async with (
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
        kvwire_store.StoreServer(
            store,
            listen,
            labels={},
            advertise=advertise or None,
            directory=f"file:{folder / 'members'}",
            trust="psk",
            psk_file=str(folder / "key"),
        ) as server,
    ):
        directory = kvwire.directory.open_directory(f"file:{folder / 'members'}")
        async for change in directory.watch():
            found = change.record.address
            await directory.close()
            return found.replace(str(server.address.port), "PORT")
    raise AssertionError("nobody was announced")


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        ("10.0.0.5", "tcp://10.0.0.5:PORT"),
        ("10.0.0.5:17500", "tcp://10.0.0.5:17500"),
        ("fd00::5", "tcp://[fd00::5]:PORT"),
    ],
)
async def test_a_store_server_advertises_a_host_with_or_without_a_port(
    tmp_path: Path, advertise: str, told: str
) -> None:
    assert await announced_by_a_server(tmp_path, "0.0.0.0:0", advertise) == told


@pytest.mark.parametrize("advertise", ["0.0.0.0", "[::]:7500", "224.0.0.1", ""])
async def test_a_store_server_that_nobody_could_dial_does_not_start(
    tmp_path: Path, advertise: str
) -> None:
    with pytest.raises(UsageError, match="nobody can dial"):
        await announced_by_a_server(tmp_path, "0.0.0.0:0", advertise)
