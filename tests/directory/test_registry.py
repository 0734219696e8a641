"""A directory is found by the scheme of its URL, whoever has brought it."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pytest

from kvwire import BackendUnavailable, ConnectError, UsageError
from kvwire.directory import ChangeKind, open_directory
from kvwire.directory.file import FileDirectory
from kvwire.errors import without_password
from tests.directory.records import a_lease_has_ended, record
from tests.support.plugged import plug_in
from tests.support.servers import free_port, nats_server, redis_server


def test_a_folder() -> None:
    directory = open_directory("file:/tmp/fleet")
    assert isinstance(directory, FileDirectory)
    assert str(directory) == "file:/tmp/fleet"


def test_a_kind_that_nobody_has() -> None:
    with pytest.raises(UsageError, match=r"unknown kind of directory 'etcd'.*file"):
        open_directory("etcd://host")


def test_a_third_partys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(
        monkeypatch,
        tmp_path,
        "kvwire.directories",
        "mine",
        "kvwire.directory.file:FileDirectory",
    )
    assert isinstance(open_directory("mine:/tmp/fleet"), FileDirectory)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["kvwire.missing:It"], "cannot be imported: ModuleNotFoundError"),
        (["kvwire.directory.record:Record"], "is not a kvwire.directory.Directory"),
        (["a:A", "b:B"], "claimed by a:A and b:B"),
    ],
)
def test_what_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str], words: str
) -> None:
    plug_in(monkeypatch, tmp_path, "kvwire.directories", "mine", *values)
    with pytest.raises(BackendUnavailable, match=words):
        open_directory("mine:")


@pytest.mark.parametrize(
    ("kind", "library"), [("redis", "redis"), ("nats", "nats"), ("ray", "ray")]
)
def test_a_library_that_is_not_installed(
    kind: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what to install."""
    for name in list(sys.modules):
        if f"{name}.".startswith(f"{library}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"kvwire.directory.{kind}", raising=False)
    with pytest.raises(BackendUnavailable) as caught:
        open_directory(f"{kind}://host:1")
    assert re.fullmatch(
        rf"directory '{kind}': (a directory .+|Redis) needs {library}\S*, which is not "
        rf"installed: pip install .+",
        str(caught.value),
    )


def test_an_option_that_it_has_not() -> None:
    with pytest.raises(UsageError, match="did you mean 'interval_s'"):
        open_directory("file:/tmp/fleet?interval=1")
    with pytest.raises(UsageError, match="a number of seconds above 0"):
        open_directory("file:/tmp/fleet?interval_s=0")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:secret@[::1", "Invalid IPv6 URL"),
        ("nats://:secret@host:99999", "Port out of range"),
        ("nats://:secret@host:x", "Port could not be cast"),
        ("nats://:secret@host?bucket=a.b", "use letters, digits, - and _"),
        ("dns://a..b:7400", "label empty"),
        ("k8s://a.b:7400?api=https://[::1", r"api='https://\[::1'"),
    ],
)
def test_a_url_that_is_none(url: str, words: str) -> None:
    scheme = url.partition(":")[0]
    if scheme in _LIBRARIES:
        pytest.importorskip(_LIBRARIES[scheme], reason=f"for {scheme}")
    with pytest.raises(UsageError, match=words) as caught:
        open_directory(url)
    assert "secret" not in str(caught.value)


_LIBRARIES: Final = {"redis": "redis", "nats": "nats", "k8s": "httpx"}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("file:/a@b", "file:/a@b"),
        ("redis://host:1/2?prefix=a", "redis://host:1/2?prefix=a"),
        ("redis://user:p%40ss@host:1/2", "redis://...@host:1/2"),
        ("redis://:a@b@host", "redis://...@host"),
        ("redis://:a@b@[host", "redis://...@[host"),
        ("redis://user:a#b?c/d@host:1/2", "redis://...@host:1/2"),
        ("redis://host/?email=a@b", "redis://...@b"),
        ("file:///srv/a@b", "file:///srv/a@b"),
        ("kvwire://role=a?directory=redis://:x@y", "kvwire://...@y"),
        ("kvwire://a?directory=redis%3A%2F%2F%3Ax%40y", "kvwire://...%40y"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("sign", "/?#[]")
@pytest.mark.parametrize("scheme", ["redis", "nats", "file"])
def test_a_password_that_would_end_the_host_is_refused_with_the_remedy(
    scheme: str, sign: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{sign} as %")) as caught:
        open_directory(f"{scheme}://user:hunt{sign}er@127.0.0.1:1")
    assert "hunt" not in str(caught.value)


# --- directories on real servers: shared by fleets, killed, or not there --------------


SERVERS: Final = {"redis": redis_server, "nats": nats_server}
# What sets fleets apart that share a server.
FLEETS: Final = {"redis": "/3?prefix=", "nats": "?bucket="}


@pytest.mark.parametrize("kind", SERVERS)
async def test_members_come_back_after_the_server_was_killed(kind: str) -> None:
    """It has nothing in it when it comes back."""
    with SERVERS[kind]() as server:
        url = f"{kind}://127.0.0.1:{server.port}"
        announcing, watching = open_directory(url), open_directory(url)
        one, two = record(1, lease_s=0.5), record(2, lease_s=0.5)
        await announcing.announce(one)
        async with aclosing(watching.watch()) as changes:
            assert (await anext(changes)).record == one
            pending = asyncio.ensure_future(anext(changes))
            server.kill()
            announced = asyncio.ensure_future(announcing.announce(two))
            # Longer than a lease: who was there has not left for that.
            await a_lease_has_ended(0.7)
            assert not pending.done()
            server.start()
            await announced
            change = await pending
            assert (change.kind, change.record) == (ChangeKind.JOINED, two)
        # The one that the server forgot is announced anew as well.
        async with aclosing(watching.watch()) as changes:
            names = {(await anext(changes)).record.name for _ in range(2)}
            assert names == {"n1", "n2"}
        await announcing.close()
        assert await watching.members() == ()
        await watching.close()


@pytest.mark.parametrize("kind", SERVERS)
async def test_fleets_share_a_server(kind: str) -> None:
    with SERVERS[kind]() as server:
        url = f"{kind}://127.0.0.1:{server.port}{FLEETS[kind]}"
        # In Redis, names that are patterns of themselves or of each other.
        names = ("[a]*", "[a]?") if kind == "redis" else ("a", "b")
        a, b = (open_directory(url + quote(name)) for name in names)
        # A key may be an address, of any characters.
        made = record(1, incarnation="", address="unix:///run/x.y*>")
        await a.announce(made)
        assert await b.members() == ()
        assert await a.members() == (made,)
        await a.close()
        assert await b.members() == ()
        await b.close()


@pytest.mark.parametrize("scheme", ["valkey", "nats"])
async def test_a_server_that_is_not_there(scheme: str) -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    pytest.importorskip("nats", reason="nats is not installed: pip install nats-py")
    directory = open_directory(f"{scheme}://user:secret@127.0.0.1:{free_port()}")
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1") as caught:
        await directory.members()
    assert "secret" not in f"{caught.value} {caught.value.address}"
    await directory.close()


def test_an_url_that_the_library_does_not_take() -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    with pytest.raises(UsageError, match="redis"):
        open_directory("redis://host:port")
