"""Certificates: which files are used, who a peer is, and what is refused and why."""

from __future__ import annotations

import builtins
import errno
import logging
import os
import re
import ssl
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvwire import AuthenticationFailed, Config, UsageError
from kvwire.proto.handshake import BINDING_BYTES
from kvwire.security import tls as tls_module
from kvwire.security.tls import CredentialFiles, Credentials
from kvwire.types import PeerIdentity, Role
from kvwire_tcp.tls_errors import explained
from tests.support.certificates import (
    FAR,
    NEAR,
    Authority,
    Issued,
    chained,
    issue,
    locked,
)
from tests.support.logs import warned


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


def credentials(**config: Any) -> Credentials:
    return Credentials(Config(**config))


def as_far(authority: Authority, issued: Issued, *peers: str) -> dict[str, Any]:
    """Keys of Config for whoever shows this certificate."""
    return authority.config(FAR, *peers) | issued.config


class Ends:
    """Both ends of one TLS connection, in memory."""

    def __init__(self, client: Credentials, server: Credentials) -> None:
        self._bios = {role: (ssl.MemoryBIO(), ssl.MemoryBIO()) for role in Role}
        self._credentials = {Role.CLIENT: client, Role.SERVER: server}
        self.tls = {
            role: self._credentials[role].wrap(role, *self._bios[role]) for role in Role
        }

    def shake(self) -> dict[Role, ssl.SSLError]:
        """Pass everything on until nothing is left; the error of each side."""
        errors: dict[Role, ssl.SSLError] = {}
        for _ in range(4):
            for role, tls in self.tls.items():
                try:
                    if role not in errors:
                        tls.do_handshake()
                        tls.read()
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError as exc:
                    errors[role] = exc
                self._bios[role.other][0].write(self._bios[role][1].read())
        return errors

    def proven(self, role: Role) -> PeerIdentity:
        """What this side knows of the other."""
        return self._credentials[role].proven(self.tls[role], role)


def shaken(client: dict[str, Any], server: dict[str, Any]) -> Ends:
    ends = Ends(credentials(**client), credentials(**server))
    assert ends.shake() == {}
    return ends


# --- who is there ---------------------------------------------------------------------


def test_both_know_each_other_and_the_certificates_in_use(authority: Authority) -> None:
    ends = shaken(authority.config(NEAR, FAR), authority.config(FAR, NEAR))
    at_client, at_server = ends.proven(Role.CLIENT), ends.proven(Role.SERVER)
    assert (at_client.identity, at_server.identity) == (FAR, NEAR)
    assert at_client.binding == at_server.binding
    assert len(at_client.binding) == BINDING_BYTES
    for tls in ends.tls.values():
        assert tls.version() == "TLSv1.3"
    again = shaken(authority.config(NEAR, FAR), authority.config(FAR, NEAR))
    assert again.proven(Role.CLIENT).binding != at_client.binding


def test_a_name_that_is_listed_is_who_it_is(authority: Authority) -> None:
    for names, peers, identity in [
        (("decode-0",), ("decode-0",), "decode-0"),
        (("Decode-0.Example",), ("decode-0.EXAMPLE",), "decode-0.example"),
        ((NEAR, "decode-0"), ("decode-0",), "decode-0"),
        ((NEAR, "decode-0"), ("decode-0", NEAR), NEAR),
        ((NEAR,), ("*",), NEAR),
        (("*.example",), ("*.example",), "*.example"),
    ]:
        config = authority.config(FAR) | authority.issue(*names).config
        ends = shaken(config, authority.config(FAR, *peers))
        assert ends.proven(Role.SERVER).identity == identity


def test_a_name_that_is_not_listed_is_told(authority: Authority) -> None:
    for names, peers, said in [
        ((NEAR,), (FAR,), repr(NEAR)),
        ((NEAR,), (NEAR + "/more",), repr(NEAR)),
        ((NEAR + "/more",), (NEAR,), "/more"),
        ((NEAR.upper(),), (NEAR,), repr(NEAR.upper())),
        # What looks like a pattern is a name.
        (("a.example",), ("*.example",), "'a.example'"),
        (("*.example",), ("a.example",), "'*.example'"),
        ((), ("*",), "no URI or DNS name"),
        ((), (NEAR,), "no URI or DNS name"),
    ]:
        config = authority.config(FAR) | authority.issue(*names).config
        ends = shaken(config, authority.config(FAR, *peers))
        with pytest.raises(AuthenticationFailed, match="tls_peers") as caught:
            ends.proven(Role.SERVER)
        assert said in str(caught.value)
        assert caught.value.fields == ("tls_peers",)


def test_the_common_name_is_nobodys_identity(authority: Authority) -> None:
    issued = authority.issue()
    title = issued.certificate.subject.rfc4514_string().removeprefix("CN=")
    ends = shaken(as_far(authority, issued), authority.config(FAR, title))
    with pytest.raises(AuthenticationFailed, match="no URI or DNS name"):
        ends.proven(Role.SERVER)


# --- whose signature counts -----------------------------------------------------------


def judged(client: dict[str, Any], server: dict[str, Any]) -> dict[Role, str]:
    """What each side says about a handshake that fails."""
    errors = Ends(credentials(**client), credentials(**server)).shake()
    said = {role: explained(exc, role, opened=False) for role, exc in errors.items()}
    assert all(isinstance(exc, AuthenticationFailed) for exc in said.values())
    return {role: str(exc) for role, exc in said.items()}


_USAGES = {
    Role.CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH,
    Role.SERVER: ExtendedKeyUsageOID.SERVER_AUTH,
}


@pytest.mark.parametrize("role", Role)
def test_what_a_side_may_not_show(
    authority: Authority, folder: Path, role: Role
) -> None:
    """Out of its time, signed by itself, or meant for the other role alone."""
    refused = "the peer does not accept our tls_cert_file"
    other = (_USAGES[role.other],)
    name = "clientAuth" if role is Role.CLIENT else "serverAuth"
    for shown, here, there in (
        (authority.config(NEAR, days=(-3, -1)), f"{refused}: expired", "a clock is"),
        (
            authority.config(NEAR, days=(1, 3)),
            f"{refused}: not valid yet",
            "a clock is",
        ),
        (issue(folder, NEAR).config, refused, "no CA in tls_ca_file has signed it"),
        (authority.config(NEAR, usages=other), f"must have {name}", f"have {name}"),
    ):
        sides = [authority.config(NEAR), authority.config(FAR)]
        sides[role] |= shown
        said = judged(*sides)
        assert here in said[role]
        assert there in said[role.other]


def test_a_usage_for_each_role_is_enough(authority: Authority) -> None:
    both = tuple(_USAGES.values())
    client, server = ((one,) for one in both)
    for near, far in ((both, both), (client, server)):
        configs = authority.config(NEAR, usages=near), authority.config(FAR, usages=far)
        assert shaken(*configs).proven(Role.SERVER).identity == NEAR


def test_who_may_sign_makes_nobody_else(authority: Authority, folder: Path) -> None:
    """A CA:TRUE certificate of our CA, and a name that it has made itself."""
    greedy = issue(folder, "greedy", by=authority.root, ca=True)
    made_up = chained(folder, issue(folder, FAR, by=greedy), greedy)
    ends = shaken(as_far(authority, made_up), authority.config(NEAR, FAR))
    with pytest.raises(AuthenticationFailed, match="a CA that it brought along"):
        ends.proven(Role.SERVER)


def test_a_ca_below_another_counts_if_it_is_in_the_file(
    authority: Authority, folder: Path
) -> None:
    below = issue(folder, "below", by=authority.root, ca=True)
    mine = issue(folder, NEAR, by=below).config
    alone = authority.config(FAR, NEAR) | {"tls_ca_file": str(below.cert_file)} | mine
    ends = shaken(alone, alone)
    assert ends.proven(Role.SERVER).identity == NEAR


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        (ssl.TLSVersion.TLSv1_3, "the peer shows no certificate"),
        (ssl.TLSVersion.TLSv1_2, "speaks no TLS 1.3"),
    ],
)
def test_a_client_of_somebody_else(
    authority: Authority, newest: ssl.TLSVersion, said: str
) -> None:
    """One without a certificate, and one that speaks an older TLS."""
    server = credentials(**authority.config(FAR))
    ends = Ends(server, server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = newest
    context.check_hostname = False
    context.load_verify_locations(authority.root.cert_file)
    ends.tls[Role.CLIENT] = context.wrap_bio(*ends._bios[Role.CLIENT])
    assert said in str(explained(ends.shake()[Role.SERVER], Role.SERVER, opened=False))


def test_no_tickets_are_given(authority: Authority) -> None:
    ends = shaken(authority.config(NEAR), authority.config(FAR))
    assert not ends.tls[Role.CLIENT].session_reused
    session = ends.tls[Role.CLIENT].session
    assert session is None or not session.has_ticket


# --- files ----------------------------------------------------------------------------


def expect_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        credentials(**config)


def test_a_file_of_something_else(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    begin, end = b"-----BEGIN CERTIFICATE--", b"---\n!\n-----END CERTIFICATE-----\n"
    for key in ("tls_cert_file", "tls_key_file", "tls_ca_file"):
        config = authority.config(FAR) | {key: str(path)}
        for content in (b"", b"\xff\0 no PEM", begin, begin + end):
            path.write_bytes(content)
            expect_refused(config, f"{key} {path}")
        expect_refused(config | {key: "/no/such"}, f"{key} /no/such: No such")


def test_a_key_that_others_can_reach(authority: Authority) -> None:
    config = authority.config(FAR)
    Path(config["tls_key_file"]).chmod(0o640)
    expect_refused(config, r"tls_key_file .* mode 0640 .*chmod 600")


def test_a_key_of_another_certificate(authority: Authority) -> None:
    other = authority.issue(NEAR).config["tls_key_file"]
    config = authority.config(FAR) | {"tls_key_file": other}
    expect_refused(config, f"{other} does not belong to tls_cert_file")


def test_an_encrypted_key_asks_nobody(authority: Authority, folder: Path) -> None:
    issued = locked(folder, authority.issue(FAR), b"secret")
    expect_refused(as_far(authority, issued), "is encrypted")


def test_a_ca_file_without_a_ca(authority: Authority) -> None:
    config = authority.config(FAR)
    expect_refused(
        config | {"tls_ca_file": config["tls_cert_file"]}, "no certificate of a CA"
    )


def test_nothing_of_a_key_is_shown(authority: Authority) -> None:
    config = authority.config(FAR)
    ends = shaken(config, config)
    key = Path(config["tls_key_file"]).read_text().splitlines()[1]
    shown = [credentials(**config), CredentialFiles(Config(**config))]
    for thing in (*shown, ends.proven(Role.CLIENT), Config(**config)):
        assert key[:16] not in repr(thing)
    assert "binding" not in repr(ends.proven(Role.CLIENT))


# --- files that change ----------------------------------------------------------------


def replaced(path: str, content: bytes) -> None:
    """As a careful rotation does it: the new file takes the place of the old one."""
    new = Path(path + ".new")
    new.touch(mode=0o600)
    new.write_bytes(content)
    new.replace(path)


def test_files_that_have_changed_are_read_again(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvwire")
    config = authority.config(FAR)
    files = CredentialFiles(Config(**config))
    before = files.current()
    assert files.current() is before
    new = authority.issue(NEAR)
    replaced(config["tls_cert_file"], new.cert_file.read_bytes())
    assert files.current() is before
    assert "does not belong to" in caplog.text
    caplog.clear()
    assert files.current() is before
    assert not caplog.records  # once
    replaced(config["tls_key_file"], new.key_file.read_bytes())
    after = files.current()
    assert after is not before
    assert "new connections use them" in caplog.text
    ends = Ends(after, credentials(**authority.config(FAR)))
    assert ends.shake() == {}
    assert ends.proven(Role.SERVER).identity == NEAR


@pytest.mark.parametrize("role", list(Role))
def test_files_that_change_while_they_are_read(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """One handshake uses one reading of them: the proof fits what is shown."""
    config, new = authority.config(FAR), authority.issue(FAR)
    load = tls_module._load_own

    def rotated(*arguments: Any) -> None:
        replaced(config["tls_cert_file"], new.cert_file.read_bytes())
        replaced(config["tls_key_file"], new.key_file.read_bytes())
        load(*arguments)

    monkeypatch.setattr(tls_module, "_load_own", rotated)
    changed = credentials(**config)
    monkeypatch.undo()
    other = credentials(**authority.config(NEAR))
    pair = (changed, other) if role is Role.CLIENT else (other, changed)
    ends = Ends(*pair)
    assert ends.shake() == {}
    assert ends.proven(Role.CLIENT).binding == ends.proven(Role.SERVER).binding


def test_a_file_that_is_gone_for_a_moment(authority: Authority) -> None:
    config = authority.config(FAR)
    files = CredentialFiles(Config(**config))
    before = files.current()
    path = Path(config["tls_ca_file"])
    path.rename(path.with_suffix(".away"))
    try:
        assert files.current() is before
    finally:
        path.with_suffix(".away").rename(path)
    assert files.current() is not before


def test_a_key_that_nobody_else_may_read_any_more(authority: Authority) -> None:
    """A key that was refused for its mode is used after chmod, which dates no file."""
    config, new = authority.config(FAR), authority.issue(NEAR)
    files = CredentialFiles(Config(**config))
    before = files.current()
    replaced(config["tls_cert_file"], new.cert_file.read_bytes())
    replaced(config["tls_key_file"], new.key_file.read_bytes())
    key = Path(config["tls_key_file"])
    key.chmod(0o644)
    assert files.current() is before
    key.chmod(0o600)
    assert files.current() is not before


@pytest.mark.parametrize(
    ("module", "call"), [(builtins, "open"), (tls_module, "_as_file")]
)
def test_without_a_descriptor_for_a_moment(
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: ModuleType,
    call: str,
) -> None:
    """It ends no connection, and the new files are used when there is one again."""

    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    config, new = authority.config(FAR), authority.issue(NEAR)
    files = CredentialFiles(Config(**config))
    before = files.current()
    replaced(config["tls_cert_file"], new.cert_file.read_bytes())
    replaced(config["tls_key_file"], new.key_file.read_bytes())
    with monkeypatch.context() as patched:
        patched.setattr(module, call, exhausted)
        for _ in range(2):
            assert files.current() is before
    assert caplog.text.count("cannot be used") == 1
    assert files.current() is not before


# --- what has run out -----------------------------------------------------------------


def test_what_peers_will_not_accept_is_said_at_start_and_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    for days, words in [
        (
            (-30, -3),
            "expired on .* 3 days ago: renew it, or this host's clock is wrong",
        ),
        ((3, 30), "is not valid before .* in 3 days: wait, or this host's clock"),
        ((-87, 3), "expires on .* in 3 days: renew it"),
        ((-0.9, 0.1), "expires on .* in 2.4 hours: renew it"),
    ]:
        config = authority.config(FAR, days=days)
        caplog.clear()
        files = CredentialFiles(Config(**config))
        files.current()
        (line,) = warned(caplog)
        assert re.search(f"tls_cert_file {config['tls_cert_file']} {words}", line)
    caplog.clear()
    for fine in ((-1, 80), (-0.5, 0.5)):
        CredentialFiles(Config(**authority.config(FAR, days=fine)))
    assert not warned(caplog)


def test_a_certificate_that_expires_while_it_is_in_use(
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = authority.config(FAR, days=(-0.5, 0.5))
    files, now = CredentialFiles(Config(**config)), time.time()
    for days, lines in ((0.2, 0), (0.35, 1), (0.45, 1), (0.55, 2), (0.9, 2)):
        monkeypatch.setattr(time, "time", lambda: now + days * 86_400)  # noqa: B023
        files.current()
        assert len(warned(caplog)) == lines
    new = authority.issue(FAR, days=(-1, 4))
    replaced(config["tls_key_file"], new.key_file.read_bytes())
    replaced(config["tls_cert_file"], new.cert_file.read_bytes())
    assert files.current().trouble()[0] == ""
    assert len(warned(caplog)) == 2


def test_a_ca_that_has_expired_is_named(tmp_path: Path, authority: Authority) -> None:
    old = issue(tmp_path, "an old CA", ca=True, days=(-30, -3))
    config = authority.config(FAR)
    both = tmp_path / "both.pem"
    new = Path(config["tls_ca_file"]).read_bytes()
    for content, state in ((old.cert_file.read_bytes(), "expired"), (new, "soon")):
        both.write_bytes(old.cert_file.read_bytes() + content)
        found, said = credentials(**config | {"tls_ca_file": str(both)}).trouble()
        assert found == state
        assert "the CA 'an old CA' expired on" in said


def test_a_ca_that_expires_soon_is_named(tmp_path: Path) -> None:
    """With it ends what it has signed; the same CA renewed is trusted for longer."""
    old, new = (
        issue(tmp_path, "one CA", ca=True, days=days) for days in ((-97, 3), (-1, 99))
    )
    config = Authority(tmp_path).config(FAR)
    mine = issue(tmp_path, FAR, by=old, days=(-1, 90))
    config |= mine.config | {"tls_ca_file": str(old.cert_file)}
    found, said = credentials(**config).trouble()
    assert found == "soon"
    assert re.search(r"the CA 'one CA' expires on .* in 3 days: renew it", said)
    both = old.cert_file.read_bytes() + new.cert_file.read_bytes()
    old.cert_file.write_bytes(both)
    assert credentials(**config).trouble()[0] == ""


def test_what_is_for_neither_role_is_refused(authority: Authority) -> None:
    code = (ExtendedKeyUsageOID.CODE_SIGNING,)
    expect_refused(
        authority.config(FAR, usages=code), "neither serverAuth nor clientAuth"
    )


def test_who_has_signed_our_own_certificate_is_known(
    authority: Authority, tmp_path: Path
) -> None:
    config = authority.config(FAR)
    assert credentials(**config).is_signed_by_ours
    stranger = Authority(tmp_path, "another CA").issue(FAR).config
    assert not credentials(**config | stranger).is_signed_by_ours


# --- OpenSSL's words ------------------------------------------------------------------


def error(reason: str | None) -> ssl.SSLError:
    made = ssl.SSLError(1, "[SSL] said so (_ssl.c:1)")
    made.reason = reason  # type: ignore[assignment]
    return made


def test_what_is_not_known_is_passed_on() -> None:
    for reason in ["SOMETHING_NEW", None]:
        said = explained(error(reason), Role.CLIENT, opened=False)
        assert isinstance(said, AuthenticationFailed)
        assert (reason or "said so") in str(said)


def test_a_refusal_names_the_key_to_look_at() -> None:
    for reason, field in [
        ("TLSV1_ALERT_UNKNOWN_CA", "tls_ca_file"),
        ("TLSV1_ALERT_DECRYPT_ERROR", "tls_ca_file"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "tls_cert_file"),
        ("SSLV3_ALERT_CERTIFICATE_UNKNOWN", "tls_cert_file"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "tls_cert_file"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "tls_cert_file"),
        ("TLSV1_ALERT_ACCESS_DENIED", "tls_cert_file"),
        ("SSLV3_ALERT_UNSUPPORTED_CERTIFICATE", "tls_cert_file"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "trust"),
        ("WRONG_VERSION_NUMBER", "trust"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "trust"),
    ]:
        # The client hears of its certificate after its own handshake is over.
        for opened in (False, True) if "ALERT" in reason else (False,):
            said = explained(error(reason), Role.CLIENT, opened=opened)
            assert isinstance(said, AuthenticationFailed)
            assert said.fields == (field,)
