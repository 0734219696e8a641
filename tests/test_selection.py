"""Which transport is taken, and why each other one was not."""

from __future__ import annotations

import pytest

from kvwire import BackendUnavailable, Config, registry, selection
from kvwire.backend import API_VERSION, Availability

_KNOWN = {
    "tcp": Availability(available=True, reason="sockets"),
    "ucx": Availability(
        available=False, reason="libucp is not installed", remedy="pip install it"
    ),
    "inproc": Availability(available=True, reason="part of kvwire"),
}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda: tuple(sorted(_KNOWN)))
    monkeypatch.setattr(registry, "availability", _availability)


def _availability(name: str) -> Availability:
    unknown = Availability(available=False, reason=f"no backend called {name!r}")
    return _KNOWN.get(name, unknown)


def verdicts(config: Config, *offered: str, version: int = API_VERSION) -> list[str]:
    """The report, a line for each candidate."""
    report = selection.judge(config, "tcp", [(name, version) for name in offered])
    return [str(candidate) for candidate in report.candidates]


def test_every_transport_that_either_side_knows_is_in_the_report() -> None:
    elsewhere = "needs an address of its own; this connection was made over tcp"
    assert verdicts(Config(), "tcp", "rdma") == [
        f"inproc: refused, {elsewhere}",
        "rdma: refused, no backend called 'rdma'",
        "tcp: taken, offered by both sides",
        "ucx: refused, libucp is not installed",
    ]


def test_preferred_ones_come_first() -> None:
    (first, *_) = verdicts(Config(prefer=("tcp", "ucx")), "tcp")
    assert first == "tcp: taken, offered by both sides"
    (first, *_) = verdicts(Config(prefer=("ucx", "tcp")), "tcp")
    assert first == "ucx: refused, libucp is not installed"


@pytest.mark.parametrize(
    ("config", "offered", "version", "reason"),
    [
        (Config(forbid=("tcp",)), ("tcp",), API_VERSION, "forbidden by `forbid`"),
        (Config(require=("ucx",)), ("tcp",), API_VERSION, "not among `require` = ucx"),
        (Config(), (), API_VERSION, "not offered by the client"),
        (Config(), ("tcp",), API_VERSION + 1, "client has contract"),
    ],
)
def test_each_reason_to_refuse_is_said(
    config: Config, offered: tuple[str, ...], version: int, reason: str
) -> None:
    found = verdicts(config, *offered, version=version)
    (tcp,) = [line for line in found if line.startswith("tcp:")]
    assert tcp.startswith(f"tcp: refused, {reason}")
    assert not any("taken" in line for line in found)


def test_a_report_is_read_by_people() -> None:
    report = selection.judge(Config(), "tcp", [("tcp", API_VERSION)])
    assert report.taken == "tcp"
    assert str(report).count(";") >= 2
    assert [candidate.name for candidate in report] == ["inproc", "tcp", "ucx"]


# --- one connection's own wishes ------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", ["tcp"], ["ucx", "tcp"], ("tcp", "x")])
def test_a_connection_can_require_one_of_several(transport: str | list[str]) -> None:
    wished = selection.wishes(Config(), transport)
    names = (transport,) if isinstance(transport, str) else tuple(transport)
    assert wished.require == wished.prefer == names


def test_without_wishes_the_configuration_holds() -> None:
    config = Config(prefer=("tcp",))
    assert selection.wishes(config, None) is config


def test_what_cannot_run_cannot_be_required() -> None:
    for config, transport in [
        (Config(), "ucx"),
        (Config(require=("ucx",)), None),
        (Config(), ["ucx", "rdma"]),
    ]:
        with pytest.raises(BackendUnavailable, match="libucp is not installed; pip"):
            selection.wishes(config, transport)


def test_one_transport_cannot_be_required_and_forbidden() -> None:
    with pytest.raises(ValueError, match="both in require and in forbid"):
        selection.wishes(Config(forbid=("tcp",)), "tcp")
