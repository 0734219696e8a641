"""Blocks that are overwritten while they are read: none is taken for good."""

from __future__ import annotations

import shutil
import signal
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvwire.errors import ConnectionLost
from kvwire.memory import compiled
from kvwire.memory.compiled import compiled_function
from kvwire_local import blocks
from kvwire_local.blocks import MappedBlocks, ProcessBlocks
from tests.backends.kvwire_local.window_rig import need_compiled, without_compiled
from tests.backends.window_owner import BLOCKS, Owner, owner
from tests.support.runs import ran

# A child takes a third of a second to start.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
_SOURCE = compiled.LIBRARY.with_suffix(".c")
# Without the second look, some of the first thousands are wrong.
_BLOCKS_MAX = 1_000_000


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def with_compiled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> bool:
    if request.param:
        need_compiled()
    else:
        without_compiled(monkeypatch)
    return bool(request.param)


@pytest.fixture(params=["mapped", "process_vm_readv"])
async def there(
    request: pytest.FixtureRequest, with_compiled: bool, tmp_path: Path
) -> AsyncIterator[Owner]:
    """An owner that withdraws blocks and writes to them all the time."""
    in_arena = request.param == "mapped"
    async with owner("local", {}, tmp_path, in_arena=in_arena) as made:
        assert made.window.way == request.param
        await made.do("churn")
        yield made


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
async def test_no_torn_block_is_taken(there: Owner, count: int) -> None:
    seen = await there.watch(count)
    print(f"{there.window.way}: {seen}")
    assert seen.landed
    assert seen.missing
    assert not seen.wrong


async def test_without_the_second_look_torn_blocks_are_taken(
    there: Owner,
    with_compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above would find it within seconds."""
    plant(monkeypatch, tmp_path, with_compiled=with_compiled)
    wrong = blocks_seen = 0
    while not wrong:
        seen = await there.watch(BLOCKS)
        wrong += seen.wrong
        blocks_seen += seen.landed + seen.missing
        assert blocks_seen < _BLOCKS_MAX


def plant(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, with_compiled: bool
) -> None:
    """Leave the second look out."""
    if not with_compiled:

        def look(*_: object) -> None:
            pass

        monkeypatch.setattr(MappedBlocks, "_look_again", look)
        monkeypatch.setattr(ProcessBlocks, "_look_again", look)
        return
    named = sysconfig.get_config_var("CC") or "cc"
    compiler = shutil.which(named.split()[0]) or shutil.which("cc")
    if compiler is None or not _SOURCE.exists():
        pytest.skip("there is no compiler, or not the source of _copy.so")
    library = folder / "planted.so"
    flags = ("-O2", "-fPIC", "-shared", "-DKVWIRE_PLANTED")
    ran(compiler, *flags, "-o", library, _SOURCE, check=True)
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


async def test_an_owner_that_is_stopped_while_it_writes(there: Owner) -> None:
    """Nobody waits for it; the block that it was at is missing."""
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


async def test_an_owner_that_is_killed_while_it_writes(there: Owner) -> None:
    """Mapped, what it had offered is there for ever; other memory is gone."""
    await there.watch(20 * BLOCKS)
    there.signal(signal.SIGKILL)
    if there.window.way == "mapped":
        dying = await there.watch(50 * BLOCKS)
        await there.wait()
        await there.handler.end()
        after = await there.watch(BLOCKS)
        assert after.landed
        assert not dying.wrong + after.wrong
    else:
        with pytest.raises(ConnectionLost, match="the window's owner has ended"):
            await there.watch(_BLOCKS_MAX)
    assert there.window.owner_gone
