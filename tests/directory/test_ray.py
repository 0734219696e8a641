"""A directory on a real Ray, its actor killed; and the actor's table without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from kvwire import UsageError
from kvwire.directory.limits import MEMBERS_MAX, RECORD_BYTES_MAX

pytest.importorskip("ray", reason="ray is not installed: `make test-ray`")

import ray

from kvwire.directory import ChangeKind, open_directory
from kvwire.directory import ray as on_ray
from tests.directory.records import record
from tests.support.servers import ray_cluster

pytestmark = [
    # Ray's own.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def ray_on_one_node() -> Iterator[None]:
    with ray_cluster():
        yield


async def test_a_table_tells_what_has_changed() -> None:
    table = on_ray.RayTable()
    life, number, found = await table.changes(0, 0)
    assert found == {}
    waiting = asyncio.ensure_future(table.changes(life, number))
    await table.erase("a")
    assert await table.write("a", b"1", 10) == ""
    assert await waiting == (life, 1, {"a": b"1"})
    await table.write("b", b"2", 10)
    await table.erase("a")
    assert await table.changes(life, 1) == (life, 3, {"a": None, "b": b"2"})
    assert (await table.changes(life - 1, 3))[2] == {"b": b"2"}


async def test_a_table_has_leases_and_bounds() -> None:
    table = on_ray.RayTable(wait_s=0.01)
    assert await table.write("0", bytes(2 * RECORD_BYTES_MAX), 10) == ""
    assert len((await table.changes(0, 0))[2]["0"] or b"") == RECORD_BYTES_MAX + 1
    for key in range(MEMBERS_MAX):
        assert await table.write(str(key), b"", -1 if key == 0 else 10) == ""
    # The first one's lease is over, so there is a place.
    assert await table.write("one", b"1", 10) == ""
    assert "full" in await table.write("two", b"2", 10)
    life, number, found = await table.changes(0, 0)
    assert len(found) == MEMBERS_MAX
    assert await table.changes(life, number) == (life, number, {})


def test_a_url_that_names_a_host() -> None:
    with pytest.raises(UsageError, match="RAY_ADDRESS"):
        open_directory("ray://host:10001")


class TestOnRay:
    @pytest.fixture(autouse=True)
    def _nothing_left(self, ray_on_one_node: None) -> None:
        """Ray keeps threads and descriptors for as long as it is connected."""

    async def test_members_come_back_after_the_actor_was_killed(self) -> None:
        one = record(1)
        announcing, watching = open_directory("ray:k"), open_directory("ray:k")
        await announcing.announce(one)
        async with aclosing(watching.watch()) as changes:
            assert (await anext(changes)).record == one
            actor = ray.get_actor("k", namespace=on_ray.NAMESPACE)
            ray.kill(actor, no_restart=False)
            two = record(2)
            await announcing.announce(two)
            change = await anext(changes)
            assert (change.kind, change.record) == (ChangeKind.JOINED, two)
        # The one that the actor forgot is announced anew as well.
        async with aclosing(watching.watch()) as changes:
            names = {(await anext(changes)).record.name for _ in range(2)}
            assert names == {"n1", "n2"}
        await announcing.close()
        await watching.close()
