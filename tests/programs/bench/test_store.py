"""Those who stand beside a store move the same bytes, and are found out otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.side import Bench, driven
from kvwire.cli.bench.store import (
    FLUSHED_PUT,
    GET,
    LOOKUPS,
    MATCH,
    MATCHES,
    ONE,
    PUT,
    SETS,
    TIERS,
    StoreWork,
    benchmark,
    work_of,
)
from kvwire.limits import MIB
from tests.cli.bench.contenders import does
from tests.programs.bench import redis
from tests.programs.bench.redis import PROGRAM
from tests.programs.bench.store import beside
from tests.programs.bench.store_pairs import sockets, transfers
from tests.programs.bench.store_peers import (
    FileBlocks,
    FlatBlocks,
    MemoryBlocks,
    ObjectBlocks,
)

HAS_OBSTORE = find_spec("obstore") is not None
if HAS_OBSTORE:
    import obstore.store

    # Its threads start with the first request of a process, and stay.
    obstore.put(obstore.store.MemoryStore(), "first", b"")

MADE: dict[str, Callable[[Path, ExitStack], FlatBlocks]] = {
    "memcpy": lambda *_: MemoryBlocks(),
    "file": FileBlocks,
    "obstore": lambda place, _: ObjectBlocks(place),
}


def work(verb: str, shape: str = "small") -> StoreWork:
    return work_of("any", verb, shape, 4 * MIB)


@pytest.mark.skipif(not HAS_OBSTORE, reason="needs obstore: pip install obstore")
def test_each_stands_beside_the_tiers_that_do_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ours = benchmark(list(TIERS), ["tcp"], ["small"], tmp_path, 4 * MIB, "asyncio")
    found = beside(ours)
    assert [(m.name, m.remedy) for m in found.missing] == [(PROGRAM, redis.INSTALL)]
    others = {
        f"{case.group} {case.name}": [one.name for one in case.beside]
        for case in found.cases
    }
    for name, expected in {
        "memory 64 KiB put": ["memcpy"],
        "memory 4 KiB match": ["dict"],
        "memory 4 KiB match of one": ["dict"],
        "disk 64 KiB put": ["memcpy", "file"],
        "disk 64 KiB put, flushed": ["file"],
        "disk 4 KiB match": [],
        "server over tcp 64 KiB get": ["transfer tcp", "sockets"],
        "server over tcp 4 KiB match": ["sockets"],
        "object 64 KiB get of one": ["obstore"],
    }.items():
        assert others[name] == expected
    # Everybody has processes once, whatever they stand beside.
    everybody = {one for case in found.cases for one in case.contenders}
    assert len(everybody) == len({one.name for one in everybody})


@pytest.mark.parametrize("name", MADE)
async def test_they_do_every_work(name: str, tmp_path: Path) -> None:
    if name == "obstore" and not HAS_OBSTORE:
        pytest.skip("obstore is not installed: pip install obstore")
    with ExitStack() as opened:
        peer = MADE[name](tmp_path, opened)
        async with driven(Bench({}), peer.rounds) as (_, ask):
            for verb in (PUT, FLUSHED_PUT, GET, ONE):
                # An object for each block: few.
                done = work(verb, "large" if name == "obstore" else "small")
                for number in range(SETS + 2):
                    seconds = (await ask(done, checks=not number)).seconds
                    assert len(seconds) == (done.count if verb == ONE else 1)
        if name == "file":
            nbytes = (tmp_path / f"{done.nbytes}").stat().st_size
            assert nbytes == SETS * done.set_bytes  # as a disk tier has
        peer.flat(done).block(done.count - 1)[1][0] ^= 1
        with pytest.raises(RuntimeError, match="other bytes than put had stored"):
            await peer.verify(done)


async def test_a_dict_finds_its_hashes() -> None:
    async with driven(Bench({}), MemoryBlocks().rounds) as (_, ask):
        assert len((await ask(work(MATCH))).seconds) == LOOKUPS


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("verb", [PUT, GET, ONE])
def test_transfers_do_every_work(verb: str) -> None:
    done = work(verb)
    with Contender("it", transfers, options={"transport": "tcp"}).start() as pair:
        found = does(pair, done, done.count if verb == ONE else 1)
    assert len(found.cpu_s) == 2


def does_every_work(contender: Contender) -> bool:
    with contender.start() as pair:
        looked = dict.fromkeys(MATCHES, LOOKUPS)
        for verb in (PUT, GET, ONE, *MATCHES, PUT):
            done = work(verb)
            does(pair, done, {ONE: done.count, **looked}.get(verb, 1))
    return True


@pytest.mark.usefixtures("threads")
def test_sockets_do_every_work() -> None:
    """Each on a thread: they block their loops, which is why they are processes."""
    assert does_every_work(Contender("sockets", sockets))


def test_redis_does_every_work() -> None:
    absent = redis.missing()
    if absent is not None:
        pytest.skip(f"{absent.name} is not installed: {absent.remedy}")
    assert does_every_work(Contender("redis", redis.blocks, alone=True))
