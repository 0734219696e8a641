"""Which transport is taken, and why each other one was not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from kvwire import BackendUnavailable, Config, UsageError
from kvwire.backend import API_VERSION, Availability, Capabilities, registry, selection

_KNOWN = {
    "tcp": Availability(available=True, reason="sockets"),
    "ucx": Availability(
        available=False, reason="libucp is not installed", remedy="pip install it"
    ),
    "inproc": Availability(available=True, reason="part of kvwire"),
    "local": Availability(available=True, reason="process_vm_readv"),
    "unix": Availability(available=True, reason="sockets in files"),
}
_CAPABILITIES = {
    "tcp": Capabilities(lanes=True),
    "ucx": Capabilities(links=False, lanes=True),
    "inproc": Capabilities(lanes=True, same_process=True),
    "local": Capabilities(links=False, lanes=True, same_host=True),
    "unix": Capabilities(),
}
_RANKS = {"inproc": 0, "local": 10, "ucx": 20, "tcp": 30, "unix": 50}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda: tuple(sorted(_KNOWN)))
    monkeypatch.setattr(registry, "availability", _availability)
    monkeypatch.setattr(registry, "_load", lambda name, _: _load(name))


def _availability(name: str) -> Availability:
    unknown = Availability(available=False, reason=f"no backend called {name!r}")
    return _KNOWN.get(name, unknown)


def _load(name: str) -> SimpleNamespace:
    if name not in _KNOWN:
        raise BackendUnavailable(f"no backend called {name!r}")
    return SimpleNamespace(capabilities=_CAPABILITIES[name], rank=lambda: _RANKS[name])


def verdicts(config: Config, *offered: str, version: int = API_VERSION) -> list[str]:
    """The report, a line for each candidate."""
    report = selection.negotiate(config, "tcp", [(name, version) for name in offered])
    return [str(candidate) for candidate in report.candidates]


def test_every_transport_that_either_side_knows_is_in_the_report() -> None:
    """In the order in which they would be tried: by rank, where nobody wishes."""
    assert verdicts(Config(), "tcp", "local", "rdma", "unix") == [
        "inproc: refused, only within one process; name it in `prefer` to try it",
        "local: taken, offered by both sides",
        "ucx: refused, libucp is not installed",
        "tcp: refused, another was preferred",
        "unix: refused, needs an address of its own; this connection was made over tcp",
        "rdma: refused, no backend called 'rdma'",
    ]


def test_preferred_ones_come_first() -> None:
    (first, *_) = verdicts(Config(prefer=("tcp", "ucx")), "tcp", "local")
    assert first == "tcp: taken, offered by both sides"
    first, second, *_ = verdicts(Config(prefer=("ucx", "tcp")), "tcp", "ucx")
    assert first == "ucx: refused, libucp is not installed"
    assert second == "tcp: taken, offered by both sides"


def test_a_later_contract_is_refused_by_name() -> None:
    """And the next transport is taken; without one the error has the same reason."""
    offered = [("local", API_VERSION + 1), ("tcp", API_VERSION)]
    report = selection.negotiate(Config(), "tcp", offered)
    assert report.taken == "tcp"
    said = f"client has contract {API_VERSION + 1}, this side {API_VERSION}; upgrade"
    (refused,) = (str(one) for one in report if one.name == "local")
    assert refused.startswith(f"local: refused, {said}")


@pytest.mark.parametrize("key", ["prefer", "require"])
def test_lanes_of_this_process_are_for_who_names_them(key: str) -> None:
    """Two communicators of one process are seldom anything but a test."""
    config = Config().replace(**{key: ("inproc",)})  # type: ignore[arg-type] # one of two keys
    (first, *_) = verdicts(config, "inproc", "tcp")
    assert first == "inproc: taken, offered by both sides"


def test_what_is_possible_is_tried_in_order() -> None:
    """The first is taken; a later one is the next if it fails."""
    report = selection.negotiate(
        Config(forbid=("inproc",)),
        "tcp",
        [(name, API_VERSION) for name in ("local", "tcp", "ucx")],
    )
    assert [c.name for c in report if c.possible] == ["local", "tcp"]
    assert report.taken == "local"


def test_what_was_tried_is_in_the_report_with_its_reason() -> None:
    report = selection.negotiate(
        Config(), "tcp", [(name, API_VERSION) for name in ("local", "tcp")]
    )
    now = selection.with_result(
        report, "tcp", "offered by both sides", {"local": "EPERM"}
    )
    assert now.taken == "tcp"
    assert [str(c) for c in now if c.name in ("local", "tcp")] == [
        "local: refused, EPERM",
        "tcp: taken, offered by both sides",
    ]
    assert [c.name for c in now] == [c.name for c in report]
    same = selection.with_result(report, "tcp", "asked for", {})
    assert "local: refused, another was preferred" in map(str, same)


# --- the control link -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scheme", "refused"),
    [
        (Config(), "tcp", ""),
        (Config(require=("tcp",)), "tcp", ""),
        (Config(require=("local",)), "tcp", ""),
        (Config(forbid=("tcp",)), "tcp", "forbidden by `forbid`"),
        (Config(require=("unix",)), "tcp", "not among `require` = unix"),
        (Config(), "ucx", "libucp is not installed; pip install it"),
        (Config(), "local", "connect to a tcp:// address, and the data goes over it"),
        (Config(), "rdma", "no backend called 'rdma'"),
    ],
)
def test_what_may_carry_the_control_link(
    config: Config, scheme: str, refused: str
) -> None:
    """One that carries no data may, beside lanes of one that is required."""
    said = selection.control_rejection(config, scheme)
    assert said.endswith(refused)
    assert bool(said) is bool(refused)


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


# --- one connection's own wishes ------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", ["tcp"], ["ucx", "tcp"], ("tcp", "x")])
def test_a_connection_can_require_one_of_several(transport: str | list[str]) -> None:
    wished = selection.apply_overrides(Config(), transport)
    names = (transport,) if isinstance(transport, str) else tuple(transport)
    assert wished.require == wished.prefer == names


def test_what_cannot_run_cannot_be_required() -> None:
    for config, transport in [
        (Config(), "ucx"),
        (Config(require=("ucx",)), None),
        (Config(), ["ucx", "rdma"]),
    ]:
        with pytest.raises(BackendUnavailable, match="libucp is not installed; pip"):
            selection.require_usable(selection.apply_overrides(config, transport))


def test_a_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again once a transport that could not run can: none is ruled out for good."""
    made = selection.Selection(Config(), "tcp")
    made.require()
    assert list(made.offered) == ["local", "tcp"]
    theirs = tuple((name, API_VERSION) for name in ("tcp", "ucx"))
    report = made.negotiate(theirs)
    assert made.negotiate(theirs) is report
    assert report.taken == "tcp"
    there = Availability(available=True, reason="libucp")
    monkeypatch.setitem(_KNOWN, "ucx", there)
    assert list(made.offered) == ["local", "tcp", "ucx"]
    assert made.negotiate(theirs).taken == "ucx"


def test_a_peer_that_offers_ever_new_lists_fills_no_memory() -> None:
    made = selection.Selection(Config(), "tcp")
    for number in range(100):
        made.negotiate(((f"x{number}", API_VERSION),))
    assert len(made._reports) <= 16


@pytest.mark.parametrize("transport", [[], ()])
def test_a_list_of_no_transports_is_refused(transport: Sequence[str]) -> None:
    """It lifted `require`: whatever there is could carry the data."""
    with pytest.raises(
        UsageError, match="the list is empty; name a transport, or pass None"
    ):
        selection.apply_overrides(Config(require=("local",)), transport)


def test_one_transport_cannot_be_required_and_forbidden() -> None:
    with pytest.raises(ValueError, match="in both require and forbid"):
        selection.apply_overrides(Config(forbid=("tcp",)), "tcp")


# --- inside TLS -----------------------------------------------------------------------


@pytest.fixture
def mtls(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Wishes of a side with certificates, where every transport can run."""
    monkeypatch.setitem(_KNOWN, "ucx", Availability(available=True, reason="libucp"))
    monkeypatch.setitem(_CAPABILITIES, "tcp", Capabilities(lanes=True, tls=True))
    return Config(
        trust="mtls",
        tls_cert_file="cert",
        tls_key_file="key",
        tls_ca_file="ca",
        tls_peers=("*",),
    )


def taken(config: Config, *offered: str) -> str:
    return selection.negotiate(config, "tcp", [(n, API_VERSION) for n in offered]).taken


def test_what_leaves_the_host_unencrypted_has_to_be_named(mtls: Config) -> None:
    assert taken(mtls, "ucx", "tcp") == "tcp"
    assert taken(mtls, "ucx", "tcp", "local") == "local"
    (line,) = [x for x in verdicts(mtls, "ucx", "tcp") if x.startswith("ucx")]
    assert "its payload is not encrypted" in line
    assert "name it in `prefer` or `require`" in line
    assert taken(mtls.replace(prefer=("ucx",)), "ucx", "tcp") == "ucx"
    assert taken(mtls.replace(require=("ucx",)), "ucx", "tcp") == "ucx"


def test_the_client_does_not_offer_it_either(mtls: Config) -> None:
    assert "not encrypted" in selection.local_rejection(mtls, "ucx", "tcp")
    assert not selection.local_rejection(mtls, "local", "tcp")
    named = selection.apply_overrides(mtls, "ucx")
    assert not selection.local_rejection(named, "ucx", "tcp")


def test_a_control_link_that_knows_no_tls(mtls: Config) -> None:
    assert not selection.control_rejection(mtls, "tcp")
    assert "cannot be inside TLS" in selection.control_rejection(mtls, "unix")
    assert not selection.control_rejection(Config(), "unix")


def test_what_protects_payload(mtls: Config) -> None:
    assert mtls.trust == "mtls"
    said = {name: selection.protection(name) for name in ("tcp", "local", "ucx")}
    assert said == {
        "tcp": "inside TLS",
        "local": "it never leaves this host",
        "ucx": "",
    }
