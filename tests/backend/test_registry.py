"""Backends are found through entry points, and two claims to one name are refused.

The fake distributions lie in a site-packages of their own, and an interpreter of their
own asks the registry about them: what is found depends on the path alone, as it does
for a user.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvwire.backend import API_VERSION, Backend, registry
from kvwire.errors import BackendUnavailable
from kvwire.types import Address
from tests.support.runs import python

_BACKEND = """
from kvwire.backend import Availability, Backend, Capabilities

class FakeBackend(Backend):
    scheme = "{scheme}"
    api_version = {api_version}
    capabilities = Capabilities(links=False, lanes=True)

    @classmethod
    def availability(cls):
        return Availability(available=True, reason="{module}")

    async def listen(self, address, accept):
        raise OSError

    async def connect(self, address):
        raise OSError

no_class = FakeBackend.availability
"""


def _broken(*lines: str) -> str:
    """Return the source of a backend of which some lines are not as promised."""
    return _BACKEND.replace("no_class", "\n".join((*lines, "no_class")))


_ASK = """
import json, sys
from kvwire.backend import registry
from kvwire.errors import BackendUnavailable

def load(name):
    try:
        return registry.load(name).__module__
    except BackendUnavailable as exc:
        return f"refused: {exc}"

def availability(name):
    found = registry.availability(name)
    return [found.available, found.reason]

names = registry.names()
json.dump({
    "names": names,
    "load": {name: load(name) for name in [*names, "nobody"]},
    "availability": {name: availability(name) for name in [*names, "nobody"]},
    "rank": {name: registry.rank(name) for name in [*names, "nobody"]},
}, sys.stdout)
"""


@dataclass(frozen=True)
class Fake:
    """One distribution that offers ``name`` as ``value``."""

    dist: str
    name: str
    value: str
    module: str = ""
    scheme: str = ""
    api_version: int = API_VERSION
    source: str = _BACKEND

    def install(self, site: Path) -> None:
        info = site / f"{self.dist}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {self.dist}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
        entry = f"[kvwire.backends]\n{self.name} = {self.value}\n"
        (info / "entry_points.txt").write_text(entry)
        if self.module:
            source = self.source.format(
                scheme=self.scheme or self.name,
                api_version=self.api_version,
                module=self.module,
            )
            (site / f"{self.module}.py").write_text(source)


_FAKES = (
    Fake("good", "good", "kvw_good:FakeBackend", "kvw_good"),
    # Two distributions, two modules: whichever came first would win silently.
    Fake("honest", "taken", "kvw_honest:FakeBackend", "kvw_honest"),
    Fake("squatter", "taken", "kvw_squatter:FakeBackend", "kvw_squatter"),
    # Two distributions that name the same class: one of them installed over the other.
    Fake("original", "same", "kvw_same:FakeBackend", "kvw_same"),
    Fake("vendored-copy", "same", "kvw_same:FakeBackend"),
    # A claim to a name that kvwire itself offers.
    Fake("shadow", "inproc", "kvw_shadow:FakeBackend", "kvw_shadow"),
    Fake("old", "old", "kvw_old:FakeBackend", "kvw_old", api_version=0),
    Fake("misnamed", "alias", "kvw_alias:FakeBackend", "kvw_alias", scheme="real"),
    Fake("function", "function", "kvw_func:no_class", "kvw_func", scheme="f"),
    Fake("gone", "gone", "kvw_nowhere:FakeBackend"),
    Fake("typo", "typo", "kvw_good:Missing"),
    Fake(
        "nolib", "nolib", "kvw_nolib:X", "kvw_nolib", source="raise OSError('no .so')"
    ),
    Fake("exits", "exits", "kvw_exits:X", "kvw_exits", source="raise SystemExit(3)"),
    Fake(
        *("nocaps", "nocaps", "kvw_nocaps:FakeBackend", "kvw_nocaps"),
        source=_broken("del FakeBackend.capabilities"),
    ),
    Fake(
        *("raises", "raises", "kvw_raises:FakeBackend", "kvw_raises"),
        source=_broken("FakeBackend.availability = FakeBackend.rank = lambda: 1 / 0"),
    ),
    Fake(
        *("nothing", "nothing", "kvw_nothing:FakeBackend", "kvw_nothing"),
        source=_broken("FakeBackend.availability = lambda: None"),
    ),
    Fake(
        *("ranks", "ranks", "kvw_ranks:FakeBackend", "kvw_ranks"),
        source=_broken("FakeBackend.rank = lambda: 'high'"),
    ),
)


@dataclass(frozen=True)
class Answers:
    """What an interpreter with the fakes installed says."""

    names: list[str]
    load: dict[str, str]
    availability: dict[str, list[object]]
    rank: dict[str, object]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    site = tmp_path_factory.mktemp("site-packages")
    for fake in _FAKES:
        fake.install(site)
    return Answers(**json.loads(_run(site, _ASK)))


def _run(site: Path, program: str) -> str:
    """Return what an interpreter prints that finds the packages of a site too."""
    path = [str(site), os.environ.get("PYTHONPATH", "")]
    done = python(
        "-c",
        program,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    return done.stdout


def test_a_foreign_backend_is_found(answers: Answers) -> None:
    assert "good" in answers.names
    assert answers.load["good"] == "kvw_good"
    assert answers.availability["good"] == [True, "kvw_good"]


def test_names_are_sorted_and_without_doubles(answers: Answers) -> None:
    assert answers.names == sorted(set(answers.names))
    assert {"inproc", "taken", "gone"} <= set(answers.names)


@pytest.mark.parametrize(
    ("name", "owners"),
    [
        ("taken", "honest 1.0 and squatter 1.0"),
        ("same", "original 1.0 and vendored-copy 1.0"),
        ("inproc", "kvwire .* and shadow 1.0"),
    ],
)
def test_two_owners_of_a_name_are_refused(
    answers: Answers, name: str, owners: str
) -> None:
    """Both are named, and neither is imported."""
    said = answers.load[name]
    assert re.search(f"is claimed by {owners}; uninstall one of them", said)
    assert answers.availability[name][0] is False


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("old", f"implements contract 0, this kvwire {API_VERSION}"),
        ("alias", "FakeBackend.scheme must be that name too"),
        ("function", "is not a kvwire.backend.Backend"),
        ("gone", "cannot be imported: ModuleNotFoundError"),
        ("typo", "cannot be imported: AttributeError"),
        ("nolib", "cannot be imported: OSError: no .so"),
        ("exits", "cannot be imported: SystemExit: 3"),
        ("nocaps", "FakeBackend.capabilities must be kvwire.backend.Capabilities"),
        ("nobody", "no backend called 'nobody' is installed; did you mean 'good'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    answers: Answers, name: str, reason: str
) -> None:
    assert reason in answers.load[name]
    available, said = answers.availability[name]
    assert not available
    assert reason in str(said)


@pytest.mark.parametrize(
    ("name", "gave"), [("raises", "ZeroDivisionError"), ("nothing", "None")]
)
def test_availability_that_breaks_its_promise_is_a_no(
    answers: Answers, name: str, gave: str
) -> None:
    """It was raised to whoever connected, over whatever transport."""
    available, said = answers.availability[name]
    assert not available
    assert f"a bug of backend {name!r}: availability() gave {gave}" in str(said)


def test_a_rank_that_is_none_goes_last(answers: Answers) -> None:
    assert answers.rank["good"] == 50
    broken = {answers.rank[name] for name in ("raises", "ranks", "gone", "nobody")}
    assert broken == {registry.RANK_LAST}


@pytest.mark.parametrize("text", [b"nonsense", b"x = y \xff"])
def test_entry_points_that_cannot_be_read_are_said_in_words(
    tmp_path: Path, text: bytes
) -> None:
    Fake("spoilt", "spoilt", "kvw_spoilt:X").install(tmp_path)
    entries = tmp_path / "spoilt-1.0.dist-info/entry_points.txt"
    entries.write_bytes(b"[kvwire.backends]\n" + text + b"\n")
    program = """
from kvwire.backend import registry
from kvwire.errors import BackendUnavailable
try:
    registry.names()
except BackendUnavailable as exc:
    print(exc)
"""
    said = _run(tmp_path, program)
    assert "installed packages cannot be read: " in said
    assert "; reinstall spoilt" in said


@pytest.mark.parametrize("name", ["inproc", "tcp"])
def test_own_backends_come_the_same_way(name: str) -> None:
    cls = registry.load(name)
    assert issubclass(cls, Backend)
    assert cls.scheme == name
    assert registry.availability(name).available


@pytest.mark.parametrize("name", ["local", "nccl", "nixl", "ucx"])
async def test_who_has_no_links_says_what_to_listen_on(name: str) -> None:
    backend, address = registry.load(name)(), Address(name, "127.0.0.1", 1)
    says = f'tcp://..., with transport="{name}"'
    with pytest.raises(BackendUnavailable, match=re.escape(says)):
        await backend.listen(address, lambda link: None)
    with pytest.raises(BackendUnavailable, match=re.escape(says)):
        await backend.connect(address)
