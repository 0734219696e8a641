"""System calls that a sandbox or a file system refuses: a way without, or its name."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwire import UsageError
from kvwire.memory.arena import may_share
from kvwire_store import BlockStore, StoreServer
from tests.support.caches import Memory

REFUSED = (errno.EPERM, errno.ENOSYS)


@pytest.fixture
def refusing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Refuse calls to a function of a module, as it is parametrized."""
    module, name, number = request.param

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    may_share.cache_clear()
    monkeypatch.setattr(module, name, refuse)
    yield
    monkeypatch.undo()
    may_share.cache_clear()


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(
    "refusing", [(os, "memfd_create", number) for number in REFUSED], indirect=True
)
async def test_memory_needs_no_memfd(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open([f"kvwire://{server.address}"]) as client,
    ):
        await client.put([b"h" * 32], Memory().cache, [0])
        got = await client.get([b"h" * 32], Memory().cache, [1])
        assert got.complete
    (said,) = [r.getMessage() for r in caplog.records if "memfd" in r.getMessage()]
    assert "peers of this host get copies" in said


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(
    ("refusing", "remedy"),
    [
        ((module, name, number), remedy)
        for module, name, remedy in (
            (fcntl, "flock", "flock: .*; .*allow flock in .*-o flock"),
            (os, "posix_fallocate", "fallocate: .*; .*allow fallocate in"),
        )
        for number in REFUSED
    ],
    indirect=["refusing"],
)
async def test_a_call_that_a_disk_needs_is_named_with_its_remedy(
    remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=remedy):
        await BlockStore.open(["memory:1MiB", f"disk:{tmp_path}?size=2MiB"])
