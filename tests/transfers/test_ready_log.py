"""Marks: what may be said, by whom, and what a mistake is told."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvwire import KVSpec, PagedCache, UsageError
from kvwire.driver.devices import Devices
from kvwire.limits import MIB, SEGMENTS_MAX
from kvwire.transfers.ready_log import ReadyLog, ReadyRange

SPEC = KVSpec(
    layers=4,
    first_layer=2,
    model_layers=8,
    kv_heads=1,
    head_dim=2,
    block_tokens=4,
    dtype="float32",
)


def cache(*groups: str) -> PagedCache:
    def tensors() -> list[Any]:
        return [np.zeros((8, 2, 4, 1, 2), np.float32) for _ in range(4)]

    if groups:
        return PagedCache.grouped({name: (SPEC, tensors()) for name in groups})
    return PagedCache(SPEC, tensors())


def marks_of(*groups: str) -> tuple[ReadyLog, list[int]]:
    """The marks of a list of three blocks, and the log's length at each wake-up."""
    made, woken = cache(*groups), list[int]()
    lists = made.block_lists({name: [5, 1, 3] for name in groups} or [5, 1, 3])
    loop = asyncio.get_running_loop()
    devices = Devices(loop, MIB)

    def wake() -> None:
        marks.woken = False
        woken.append(len(marks.log))

    marks = ReadyLog(made, lists, loop, wake, devices)
    return marks, woken


async def turn() -> None:
    await asyncio.sleep(0)


async def test_layers_are_the_model_s_and_blocks_are_positions() -> None:
    marks, _ = marks_of()
    marks.add(2, None, None, None)
    marks.add(slice(3, 5), slice(1, None), None, None)
    number: Any = np.int64(3)
    marks.add(number, 0, None, None)
    marks.add(slice(None, 5), slice(0, 0), None, None)
    assert marks.log == [
        ReadyRange("kv", range(1), range(3)),
        ReadyRange("kv", range(1, 3), range(1, 3)),
        ReadyRange("kv", range(1, 2), range(1)),
        ReadyRange("kv", range(3), range(0)),
    ]
    assert not marks.complete


@pytest.mark.parametrize(
    ("layers", "blocks", "said"),
    [
        (1, None, "layers of group 'kv': 1 is outside 2 to 5"),
        (6, None, "layers of group 'kv': 6 is outside 2 to 5"),
        (-1, None, "layers of group 'kv': -1 is outside 2 to 5"),
        (2.0, None, "layers of group 'kv': 2.0 must be a number or a slice"),
        (True, None, "layers of group 'kv': True must be a number or a slice"),
        (None, False, "blocks of group 'kv': False must be a number or a slice"),
        (None, slice(False, 2), "blocks of .*: False must be a number or a slice"),
        ("2", None, "layers of group 'kv': '2' must be a number or a slice"),
        (slice(1, 3), None, "1 to 3 .* is outside 2 to 6"),
        (slice(2, 7), None, "2 to 7 .* is outside 2 to 6"),
        (slice(2, 6, 2), None, r"\(step 2\) is outside 2 to 6"),
        (slice("a", None), None, "'a' must be a number or a slice"),
        (None, 3, "blocks of group 'kv': 3 is outside 0 to 2"),
        (None, 5, "blocks of group 'kv': 5 is outside 0 to 2"),
        (None, slice(2, 1), "2 to 1 .* is outside 0 to 3"),
    ],
)
async def test_what_is_not_there(layers: Any, blocks: Any, said: str) -> None:
    marks, woken = marks_of()
    with pytest.raises(UsageError, match=said):
        marks.add(layers, blocks, None, None)
    await turn()
    assert marks.log == []
    assert woken == []


async def test_groups_are_marked_by_name_or_all_at_once() -> None:
    marks, _ = marks_of("full", "window")
    with pytest.raises(UsageError, match="pass group=, one of full, window"):
        marks.add(2, None, None, None)
    with pytest.raises(UsageError, match=r"unknown group 'kv'; .* full, window"):
        marks.add(2, None, "kv", None)
    marks.add(2, None, "window", None)
    with pytest.raises(UsageError, match="of group 'window' is already marked"):
        marks.add(None, None, None, None)
    assert len(marks.log) == 1, "nothing of a mark that is refused was taken"
    marks.add(None, None, "full", None)
    with pytest.raises(UsageError, match="layer 3 of block position 0 of group 'win"):
        marks.finish(partial=False)
    marks.add(slice(3, None), None, "window", None)
    marks.finish(partial=False)
    assert marks.complete
    assert marks.all_in


async def test_a_gap_keeps_a_transfer_from_being_finished() -> None:
    marks, _ = marks_of()
    marks.add(slice(2, 4), None, None, None)
    marks.add(4, slice(0, 2), None, None)
    with pytest.raises(UsageError, match=r"layer 4 of block position 2 .* \(1 layers"):
        marks.finish(partial=False)
    marks.finish(partial=True)
    assert marks.all_in
    assert not marks.complete
    with pytest.raises(UsageError, match="already finished"):
        marks.add(5, None, None, None)


async def test_one_wake_up_for_any_number_of_marks() -> None:
    marks, woken = marks_of()
    for layer in range(2, 6):
        marks.add(layer, None, None, None)
    marks.finish(partial=False)
    assert woken == []
    await turn()
    assert woken == [4]


@pytest.mark.parametrize("where", ["this loop", "another thread"])
async def test_a_mark_that_waits(where: str) -> None:
    """It flows once its future is done; until then the transfer is not all in."""
    marks, woken = marks_of()
    future: Any = asyncio.get_running_loop().create_future()
    if where == "another thread":
        future = Future()
    marks.add(None, None, None, future)
    marks.finish(partial=False)
    await turn()
    assert [len(marks.log), marks.all_in] == [0, False]
    if where == "another thread":
        await asyncio.to_thread(future.set_result, None)
    else:
        future.set_result(None)
    while not marks.all_in:
        await turn()
    await turn()
    assert marks.log == [ReadyRange("kv", range(4), range(3))]
    assert woken[-1] == 1
    with pytest.raises(UsageError, match="already finished"):
        marks.add(2, None, None, None)


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_mark_whose_future_does_not_come_true(how: str) -> None:
    """It is never ready, and so the transfer never all in."""
    marks, woken = marks_of()
    future: Future[None] = Future()
    marks.add(3, slice(1, 3), None, future)
    marks.finish(partial=True)
    if how == "fails":
        future.set_exception(ValueError("no kernel"))
    else:
        future.cancel()
    await turn()
    assert woken
    assert marks.log == []
    assert not marks.all_in
    assert marks.failed.startswith(
        "the condition of layers 3 to 3 x blocks 1 to 2 of group 'kv'"
    )


async def test_marks_without_end() -> None:
    """Those that name no block claim nothing, and are counted all the same."""
    marks, _ = marks_of()
    for _ in range(SEGMENTS_MAX):
        marks.add(2, slice(0, 0), None, None)
    with pytest.raises(UsageError, match=f"more than {SEGMENTS_MAX} marks"):
        marks.add(2, None, None, None)
