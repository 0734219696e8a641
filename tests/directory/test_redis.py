"""A real Redis or Valkey, one that is not there, and URLs that are none."""

from __future__ import annotations

import pytest

from kvwire import ConnectError, UsageError
from kvwire.directory import open_directory
from tests.directory.records import record
from tests.support.servers import free_port, redis_server


async def test_fleets_have_prefixes() -> None:
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}/3?prefix="
        a, b = open_directory(url + "a"), open_directory(url + "b")
        await a.announce(record(1))
        assert await b.members() == ()
        assert await a.members() == (record(1),)
        await a.close()
        await b.close()


async def test_a_server_that_is_not_there() -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    directory = open_directory(f"valkey://:secret@127.0.0.1:{free_port()}")
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1") as caught:
        await directory.members()
    assert "secret" not in str(caught.value)
    assert "secret" not in caught.value.address
    await directory.close()


def test_an_url_that_the_library_does_not_take() -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    with pytest.raises(UsageError, match="redis"):
        open_directory("redis://host:port")
