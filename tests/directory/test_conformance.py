"""Every directory keeps every promise: one test for each check."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from kvwire.directory import Directory
from kvwire.directory.base import Batch
from kvwire.directory.file import FileDirectory
from kvwire.errors import UsageError
from kvwire.testing import check_directory
from kvwire.testing.conformance import Check, CheckFailed
from kvwire.testing.conformance.directories import DIRECTORY_CHECKS, DirectoryRig
from tests.support.servers import nats_server, redis_server


@pytest.fixture(scope="module", params=["file", "redis", "nats"])
def url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    match request.param:
        case "file":
            yield f"file:{tmp_path_factory.mktemp('fleet')}?interval_s=0.05"
        case "redis":
            with redis_server() as server:
                yield f"redis://127.0.0.1:{server.port}?prefix=kit"
        case "nats":
            with nats_server() as server:
                yield f"nats://127.0.0.1:{server.port}?bucket=kit"


@pytest.mark.parametrize("check", DIRECTORY_CHECKS, ids=lambda check: check.id)
async def test_directory(url: str, check: Check) -> None:
    await check_directory(url, only=[check.id])


# --- the kit itself -------------------------------------------------------------------


class Forgetful(FileDirectory):
    async def erase(self, key: str) -> None:
        pass


class Mute(FileDirectory):
    """Says nothing but what was there at first."""

    async def follow(self) -> AsyncGenerator[Batch, None]:
        async for batch in super().follow():
            yield batch
            await asyncio.Event().wait()


class Unrenewed(FileDirectory):
    """Takes a value once, and never again."""

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        if not self._path(key).exists():
            await super().write(key, value, lease_s)


_BROKEN: dict[str, tuple[type[Directory], str]] = {
    "directory.withdrawn": (Forgetful, "Timeout"),
    "directory.joined": (Mute, "Timeout"),
    "directory.lease": (Unrenewed, "living"),
}


@pytest.mark.parametrize("name", _BROKEN)
async def test_the_kit_finds_what_is_broken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, words = _BROKEN[name]

    def make(rig: DirectoryRig) -> Directory:
        rig._opened.append(cls(f"file:{tmp_path}?interval_s=0.05"))
        return rig._opened[-1]

    monkeypatch.setattr(DirectoryRig, "directory", make)
    with pytest.raises(CheckFailed, match=words):
        await check_directory("file:", only=[name], timeout_s=1.0)


async def test_a_check_that_is_not_known() -> None:
    with pytest.raises(UsageError, match=r"no check of directories is called x\.y"):
        await check_directory("file:", only=["x.y"])


async def test_the_report_names_the_kind(tmp_path: Path) -> None:
    seen: list[str] = []
    report = await check_directory(
        f"file:{tmp_path}?interval_s=0.05",
        only=["directory.empty", "directory.announced"],
        progress=lambda result: seen.append(result.check.id),
    )
    assert report.backend == "file"
    assert seen == ["directory.empty", "directory.announced"]
    assert len(report.passed) == 2
