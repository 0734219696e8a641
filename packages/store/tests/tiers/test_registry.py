"""A tier is found by the scheme of its address, also one of another distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire import BackendUnavailable, UsageError
from kvwire_store import BlockStore
from packages.store.tests.tiers.services import PlayedTier
from tests.support.plugged import plug_in

OPENED: list[PlayedTier] = []


class Mine(PlayedTier):
    async def connect(self) -> None:
        OPENED.append(self)


async def test_a_third_partys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, tmp_path, "kvwire_store.tiers", "mine", f"{__name__}:Mine")
    async with BlockStore.open(["memory:1MiB", "mine:here?prefix=a"]) as store:
        assert store.name == "memory:1MiB, mine:here?prefix=a"
    assert len(OPENED) == 1


async def test_a_kind_that_nobody_has() -> None:
    with pytest.raises(
        UsageError, match=r"unknown kind 'tape'; the kinds are memory, disk"
    ):
        await BlockStore.open(["memory:1MiB", "tape:/dev/st0"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["kvwire.missing:It"], "cannot be imported: ModuleNotFoundError"),
        (["kvwire_store.counters:StoreCounters"], "is not a kvwire_store.tiers.Tier"),
        (["a:A", "b:B"], "claimed by a:A and b:B"),
    ],
)
async def test_what_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str], words: str
) -> None:
    plug_in(monkeypatch, tmp_path, "kvwire_store.tiers", "mine", *values)
    with pytest.raises(BackendUnavailable, match=words):
        await BlockStore.open(["memory:1MiB", "mine:here"])
