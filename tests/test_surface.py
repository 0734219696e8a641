"""What a user's object shows is what the reference documents, no more and no less."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Coroutine
from pathlib import Path

import pytest

import kvwire
import kvwire_store
from kvwire.directory import Record, open_directory
from kvwire.directory.file import FileDirectory
from tests.programs.reference.words import FOLDER, attributes
from tests.support.caches import Memory
from tests.support.pairs import connected
from tests.support.runs import python


def documented(cls: type) -> set[str]:
    """The members that a page of the API shows, and those that only Python calls."""
    pages = "".join(page.read_text() for page in (FOLDER / "api").glob("*.md"))
    named = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
    assert pages.count(f'## <a id="{named}"></a>') == 1
    members = re.findall(rf'### <a id="{re.escape(named)}[.](\w+)"', pages)
    of_python = ("send", "throw", "close") if issubclass(cls, Coroutine) else ()
    return {*attributes(cls), *members, *of_python}


def shown(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


async def test_objects_show_what_is_documented() -> None:
    async with (
        connected("inproc") as pair,
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
        kvwire_store.StoreServer(store, "127.0.0.1:0") as server,
    ):
        region = pair.far.register(bytearray(8))
        request = pair.left.recv(1)
        outgoing = pair.far.publish("x", Memory().cache, [0])
        incoming = pair.left.pull("x", Memory().cache, [1])
        outgoing.ready()
        outgoing.finish()
        put = store.put([b"hash"], Memory().cache, [0])
        peer = pair.near.peer("127.0.0.1:1")
        things: tuple[object, ...] = (pair.near, pair.left, peer, region, request)
        window = pair.far.expose("kv", Memory().cache)
        remote = await pair.left.window("kv")
        things += (outgoing, incoming, kvwire.join(incoming), store, put, server)
        things += (window, remote)
        for thing in things:
            names = documented(type(thing))
            assert names, thing
            assert shown(thing) == names, thing
        assert (await incoming).complete
        await put
        await region.close()
        request.cancel()


def test_an_engine_shows_what_is_documented() -> None:
    with (
        kvwire.Engine(trust="loopback") as engine,
        kvwire.Engine(trust="loopback") as other,
    ):
        connection = other.connect(engine.listen("inproc://here"))
        things: tuple[object, ...] = (
            engine,
            engine.publish("x", Memory().cache, [0]),
            other.pull(connection, "x", Memory().cache, [1]),
        )
        for thing in things:
            assert shown(thing) == documented(type(thing)), thing


@pytest.mark.parametrize(
    ("asynchronous", "synchronous"),
    [
        (kvwire.Outgoing, kvwire.EngineOutgoing),
        (kvwire.Incoming, kvwire.EngineIncoming),
    ],
)
def test_threads_have_what_coroutines_have(
    asynchronous: type, synchronous: type
) -> None:
    """Where those wait, these have ``wait_drained`` and ``wait_layer``."""
    lacking = documented(asynchronous) - documented(synchronous)
    assert lacking <= {"drained", "layer"}


@pytest.mark.parametrize(
    "kind",
    [
        kvwire.Communicator,
        kvwire.Connection,
        kvwire.Peer,
        kvwire.Region,
        kvwire.Window,
        kvwire.RemoteWindow,
        kvwire.Incoming,
        kvwire.Outgoing,
        kvwire.Joined,
        kvwire_store.BlockStore,
        kvwire_store.StoreServer,
        FileDirectory,
    ],
)
def test_what_is_closed_or_drained_can_be_a_block(kind: type) -> None:
    assert hasattr(kind, "__aenter__")
    with pytest.raises(kvwire.UsageError, match="write `async with`"):
        kind.__enter__(object.__new__(kind))  # type: ignore[attr-defined]


async def test_blocks_close_what_they_hold(tmp_path: Path) -> None:
    async with connected("inproc") as pair:
        async with pair.far.register(bytearray(8)) as region:
            grant = region.grant(pair.right)
        with pytest.raises(kvwire.StaleRegion):
            await pair.left.get(grant, bytearray(8))
        async with (
            pair.far.expose("kv", Memory().cache) as window,
            await pair.left.window("kv") as remote,
        ):
            assert remote.way != "closed"
        assert window.closed
        async with pair.near.peer("127.0.0.1:1") as peer:
            assert peer.connection is None
        with pytest.raises(kvwire.ClosedOK):
            await peer.connect()
        pair.far.publish("x", Memory().cache, [0])
        async with kvwire.join(pair.left.pull("x", Memory().cache, [1])) as joined:
            assert not joined.done()
        assert joined.is_drained
        assert joined.outcome is not None
        async with open_directory(f"file:{tmp_path}") as directory:
            assert await directory.members() == ()
        with pytest.raises(kvwire.ClosedOK):
            await directory.announce(
                Record(name="late", address="127.0.0.1:1", incarnation="00" * 16)
            )


# --- `import kvwire` is cheap, and every public name is there when it is used ---------


def test_import_kvwire_loads_neither_numpy_nor_a_loop() -> None:
    """What only needs the version or an error does not wait for the rest."""
    code = "import sys, kvwire; print(*sys.modules, sep='\\n')"
    done = python("-c", code, check=True)
    loaded = set(done.stdout.split())
    assert "kvwire.errors" in loaded
    assert not loaded & {"numpy", "asyncio", "msgspec", "socket", "kvwire.communicator"}
    assert not loaded & {
        "torch",
        "cupy",
        "pytest",
        "rich",
        "cyclopts",
        "kvwire.testing",
    }
    assert not {module for module in loaded if module.startswith("kvwire_")}


@pytest.mark.parametrize("name", kvwire.__all__)
def test_a_public_name_is_what_its_home_defines(name: str) -> None:
    found = getattr(kvwire, name)
    if name != "__version__":
        assert found is getattr(importlib.import_module(found.__module__), name)


def test_type_checkers_and_the_table_agree() -> None:
    """The names come from where mypy thinks they come from."""
    source = Path(str(kvwire.__file__)).read_text()
    block = next(n for n in ast.parse(source).body if isinstance(n, ast.If))
    said = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert said == kvwire._HOMES
    assert said.keys() < set(kvwire.__all__)


def test_no_public_name_is_a_module() -> None:
    """Importing such a module would put it where the name belongs."""
    package = Path(str(kvwire.__file__)).parent
    assert not {p.stem for p in package.glob("*.py")} & set(kvwire.__all__)
    assert not {p.name for p in package.iterdir() if p.is_dir()} & set(kvwire.__all__)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'send'"):
        kvwire.send  # type: ignore[attr-defined]  # noqa: B018


def test_no_two_errors_have_one_code() -> None:
    """Or what a peer says would come out as either."""
    found: list[type[kvwire.KVWireError]]
    found = [kvwire.HandshakeError, kvwire.RequestError]
    for parent in found:
        found += parent.__subclasses__()
    codes = [cls.code for cls in found if "code" in vars(cls)]
    assert len(set(codes)) == len(codes) > 8
