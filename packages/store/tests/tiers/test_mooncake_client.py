"""What their client may do to a tier, without it: one that is played here."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from kvwire_store.address import TierAddress
from tests.support.pairs import until

MODULE = "kvwire_store.tiers.mooncake"


class Played:
    """Their client, of which the first ones take only some memory."""

    made: list[Played]

    def __init__(self) -> None:
        self.left = 1 if not self.made else 100
        self.known: set[int] = set()
        self.closed = False
        self.made.append(self)

    def setup(self, *_: object) -> int:
        return 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        self.left -= 1
        self.known.add(address)
        return 0 if self.left >= 0 else -1

    def health_check(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    store = ModuleType("mooncake.store")
    store.MooncakeDistributedStore = Played  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", store)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    Played.made = []
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)


async def test_a_client_that_does_not_take_our_memory_is_left(module: Any) -> None:
    """With what it has taken: the next one has not been told of that."""
    master = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0
    )
    async with master:
        port = master.sockets[0].getsockname()[1]
        where = f"mooncake://127.0.0.1:{port}?buffer=4KiB"
        tier = await module.MooncakeTier.open(TierAddress.parse(where))
        try:
            assert "refused to register kvwire's memory" in tier.reason
            await until(lambda: tier.taking)
            first, second = Played.made
            await until(lambda: first.closed)
            stages = [tier._stages.get_nowait() for _ in range(tier._stages.qsize())]
            assert len(stages) == tier._stages_made
            assert {stage.ctypes.data for stage in stages} == second.known
        finally:
            await tier.close()
