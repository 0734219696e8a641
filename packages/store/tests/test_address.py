"""Tiers as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire import BackendUnavailable, UsageError
from kvwire.limits import GIB, KIB, MIB
from kvwire_store import BlockStore
from kvwire_store.address import TierAddress
from packages.store.tests.tiers.services import PlayedTier
from tests.support.plugged import plug_in


def test_the_parts_of_an_address() -> None:
    address = TierAddress.parse("disk:var/kv cache?size=1.5GiB&slab=32MiB")
    assert (address.scheme, address.place) == ("disk", f"{Path.cwd()}/var/kv cache")
    assert address.size(address.options["size"]) == 3 * GIB // 2
    assert address.slab_bytes(GIB) == 32 * MIB


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8192", 8192), ("4 KiB", 4 * KIB), ("2mib", 2 * MIB), ("10KB", 10_000)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert TierAddress.parse(f"memory:{text}").size(text) == nbytes


@pytest.mark.parametrize("text", ["", "8", "-8GiB", "1e9", "8GiBs", "nan", "9" * 17])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="tier 'memory:"):
        TierAddress.parse(f"memory:{text}").size(text)


@pytest.mark.parametrize(
    ("nbytes", "slab_bytes"),
    [
        (100 * GIB, 64 * MIB),
        (256 * MIB, 16 * MIB),
        (512 * KIB, 64 * KIB),
        (32 * KIB, 32 * KIB),
        (10_000, 8 * KIB),
    ],
)
def test_slabs_by_the_size_of_the_tier(nbytes: int, slab_bytes: int) -> None:
    assert TierAddress.parse("memory:1").slab_bytes(nbytes) == slab_bytes


@pytest.mark.parametrize("text", [7, "memory", "disk:a?size=1&size=2"])
def test_what_is_no_tier(text: object) -> None:
    with pytest.raises(UsageError, match="tier "):
        TierAddress.parse(text)


@pytest.mark.parametrize("text", ["0", "-1", "61", "nan", "inf", "", "soon", "9" * 400])
def test_a_number_out_of_range(text: str) -> None:
    with pytest.raises(UsageError, match=r"timeout=.* a number of at most 60"):
        TierAddress.parse(f"kvwire://a:1?timeout={text}").number("timeout", 10, 60)


def test_a_number_that_is_not_there_is_the_usual_one() -> None:
    address = TierAddress.parse("kvwire://a:1?timeout=0.5")
    assert address.number("timeout", 10, 60) == 0.5
    assert address.number("requests", 10, 60) == 10


@pytest.mark.parametrize("text", ["disk:{}?size=1MiB", "object:file://{}"])
@pytest.mark.parametrize("folder", ["~/kv", "$HOME/kv", "${HOME}/kv"])
def test_paths_are_read_as_a_shell_reads_them(
    monkeypatch: pytest.MonkeyPatch, text: str, folder: str
) -> None:
    monkeypatch.setenv("HOME", "/srv/me")
    place = TierAddress.parse(text.format(folder)).place
    assert place.removeprefix("file://") == "/srv/me/kv"


@pytest.mark.parametrize("folder", ["$KV_NO_SUCH/kv", "~nobody-of-this-name/kv"])
def test_a_path_that_a_shell_could_not_read_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match="write"):
        TierAddress.parse(f"disk:{folder}?size=1MiB")


@pytest.mark.parametrize("password", ["a#b", "a?b", "a/b", "a[b"])
def test_a_password_with_signs_of_a_url_is_refused_and_not_shown(password: str) -> None:
    with pytest.raises(UsageError, match="a URL reserves") as caught:
        TierAddress.parse(f"redis://user:{password}@host:1/0?timeout=1")
    assert password not in str(caught.value)


# --- who opens it ---------------------------------------------------------------------


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
