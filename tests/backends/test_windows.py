"""Windows by each way that a lane has, read from another process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvwire.errors import ConnectionLost
from kvwire.memory import compiled
from kvwire.memory.compiled import compiled_function
from kvwire_local import blocks
from kvwire_local.blocks import MappedBlocks, ProcessBlocks
from tests.backends.kvwire_ucx import support as ucx
from tests.backends.window_owner import BLOCKS, Owner, owner
from tests.support.compiled import need_compiled, without_compiled
from tests.support.pairs import turns, until
from tests.support.runs import ran

# A child takes a third of a second to start.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
# A reader without the second look is wrong within the first hundreds of blocks.
BELIEVED_MAX = 1_000_000
SOURCE = compiled.LIBRARY.with_suffix(".c")


@pytest.fixture(
    params=[
        pytest.param("ucx", marks=ucx.needs_reading),
        "mapped",
        "mapped in Python",
        "process_vm_readv",
        "process_vm_readv in Python",
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found, _, without = request.param.partition(" in ")
    if without:
        without_compiled(monkeypatch)
    elif found != "ucx":
        need_compiled()
    return str(found)


@pytest.fixture
async def there(way: str, tmp_path: Path) -> AsyncIterator[Owner]:
    scheme = "ucx" if way == "ucx" else "local"
    settings = {"TLS": ucx.SHARED_MEMORY} if way == "ucx" else {}
    in_arena = way == "mapped"
    async with owner(scheme, settings, tmp_path, in_arena=in_arena) as made:
        assert made.window.way == way
        assert made.window.immediate == (way != "ucx")
        yield made


@pytest.fixture
def _no_second_look(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a lane of one host; the loops are compiled where they were."""
    if way == "ucx":
        return
    if blocks.mapped_compiled is None:

        def look(*_: object) -> None:
            pass

        monkeypatch.setattr(MappedBlocks, "_look_again", look)
        monkeypatch.setattr(ProcessBlocks, "_look_again", look)
        return
    named = sysconfig.get_config_var("CC") or "cc"
    compiler = shutil.which(named.split()[0]) or shutil.which("cc")
    if compiler is None or not SOURCE.exists():
        pytest.skip("there is no compiler, or not the source of _copy.so")
    library = tmp_path / "planted.so"
    flags = ("-O2", "-fPIC", "-shared", "-DKVWIRE_PLANTED")
    ran(compiler, *flags, "-o", library, SOURCE, check=True)
    for name in ("mapped_compiled", "process_compiled"):
        function = getattr(blocks, name).held
        planted = compiled_function(
            function.__name__,
            *function.argtypes,
            result=function.restype,
            library=library,
        )
        assert planted is not None
        monkeypatch.setattr(blocks, name, planted)


async def test_scattered_blocks_go_where_they_belong(there: Owner) -> None:
    blocks = [5, 6, 7, 40, 0, 63, 21]
    batch = there.batch(blocks, into=[10, 11, 12, 3, 1, 0, 50])
    assert (await there.read(batch)).tolist() == [True] * len(blocks)
    assert not there.wrong(batch).any()
    untouched = np.setdiff1d(np.arange(BLOCKS), [10, 11, 12, 3, 1, 0, 50])
    assert not any(one[untouched].any() for one in there.mine)


async def test_a_block_withdrawn_or_guessed_has_not_landed(there: Owner) -> None:
    tickets = there.board[:3].copy()
    tickets[1] += 1
    batch = there.batch([0, 1, 2], tickets)
    assert (await there.read(batch)).tolist() == [True, False, True]
    await there.do("withdraw")
    assert not (await there.read(there.batch([0, 1, 2]))).any()


async def test_what_lies_outside_is_not_read(there: Owner) -> None:
    """Its blocks have not landed; the others of the batch have."""
    blocks = [3, BLOCKS, 4, 2**40]
    batch = there.batch(blocks, np.ones(4, np.uint64), into=[3, 9, 4, 10])
    batch = batch._replace(generations=there.board[[3, 0, 4, 0]])
    assert (await there.read(batch)).tolist() == [True, False, True, False]
    inside = batch._replace(entries=np.array([3, 0, 4, 0], np.uint64))
    assert (await there.read(inside)).tolist() == [True, False, True, False]
    assert not any(one[[9, 10]].any() for one in there.mine)


async def test_an_empty_batch_is_over_as_any(there: Owner) -> None:
    assert not (await there.read(there.batch([]))).size


@pytest.mark.parametrize(
    "blocks", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
async def test_nothing_torn_or_stale_is_reported_as_landed(
    there: Owner, blocks: int
) -> None:
    """Beside an owner that takes back, writes and offers all the time."""
    await there.do("churn")
    seen = await there.watch(blocks)
    print(f"{there.window.way}: {seen}")
    assert seen.landed
    assert seen.missing
    assert not seen.wrong


@pytest.mark.usefixtures("_no_second_look")
async def test_a_reader_without_a_second_look_is_found(way: str, there: Owner) -> None:
    """Else the test before would prove nothing."""
    await there.do("churn")
    seen = 0
    while True:
        found = await there.watch(20 * BLOCKS, believing=way == "ucx")
        seen += found.landed + found.missing
        if found.wrong:
            return
        assert seen < BELIEVED_MAX


async def test_an_owner_that_is_stopped_while_it_writes(there: Owner) -> None:
    """Nobody waits for it; the block that it was at is missing."""
    await there.do("churn")
    wrong = landed = 0
    for _ in range(10):
        there.signal(signal.SIGSTOP)
        stopped = await there.watch(5 * BLOCKS)
        assert not there.window.owner_gone
        there.signal(signal.SIGCONT)
        seen = await there.watch(5 * BLOCKS)
        landed += stopped.landed
        wrong += stopped.wrong + seen.wrong
    assert landed
    assert not wrong


async def test_an_owner_that_is_killed_ends_its_readers(there: Owner) -> None:
    """Reads in flight end, and touch nothing from then on.

    But mapped, what it had offered is there for ever.
    """
    await there.do("churn")
    reads = asyncio.create_task(there.read_all(8))
    await turns(3)
    there.signal(signal.SIGKILL)
    await there.wait()
    await reads
    assert not there.window.busy
    if there.window.way == "mapped":
        await there.handler.end()
        after = await there.watch(BLOCKS)
        assert (after.landed > 0, after.wrong) == (True, 0)
        assert there.window.owner_gone
        return
    for one in there.mine:
        one[:] = 0
    with pytest.raises(ConnectionLost):
        await there.read(there.batch([1]))
    await there.handler.end()
    with pytest.raises(ConnectionLost, match="has ended"):
        await there.read(there.batch([1]))
    assert not any(one.any() for one in there.mine)


async def test_a_window_may_be_concealed_while_it_is_read(there: Owner) -> None:
    """Each block is right or has not landed; the other end goes on."""
    reads = asyncio.create_task(there.read_all(8))
    await turns(3)
    await there.do("conceal")
    assert all(isinstance(end, (np.ndarray, ConnectionLost)) for end in await reads)
    assert not there.window.busy
    await there.do("expose")


async def test_a_closed_reader_is_quiet_once_its_reads_are_over(there: Owner) -> None:
    read = there.window.read(there.batch(list(range(BLOCKS))))
    there.window.close()
    there.window.close()
    with pytest.raises(ConnectionLost):
        there.window.read(there.batch([1]))
    if isinstance(read, asyncio.Future):
        assert there.window.busy
        read.cancel()
    await until(lambda: not there.window.busy)
