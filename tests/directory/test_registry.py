"""A directory is found by the scheme of its URL, whoever has brought it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

import pytest

from kvwire import BackendUnavailable, UsageError
from kvwire.directory import open_directory
from kvwire.directory.file import FileDirectory
from kvwire.errors import without_password
from tests.support.plugged import plug_in


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
