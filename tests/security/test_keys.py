"""Key files and addresses: what may be used, and what is refused with the reason."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tomllib
from pathlib import Path

import pytest

import kvwire
from kvwire import Address, Config, UsageError
from kvwire.security import keys
from kvwire.security.keys import PSK_BYTES_MAX, PSK_BYTES_MIN
from kvwire.types import TrustMode, is_loopback
from tests.support.names import Zone
from tests.support.runs import ran

GROUP = os.getegid()
OTHERS = (0o640, 0o604, 0o660, 0o620, 0o601)


def key_file(folder: Path, name: str = "key") -> Path:
    path = folder / name
    keys.write_key_file(path)
    return path


# --- key files ------------------------------------------------------------------------


def test_a_new_key_is_random_and_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        one, other = key_file(tmp_path, "one"), key_file(tmp_path, "other")
    finally:
        os.umask(before)
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    key = keys.read_key_file(str(one))
    assert len(key) == PSK_BYTES_MIN
    assert key != keys.read_key_file(str(other))


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="never overwrites"):
        keys.write_key_file(path)
    assert path.read_bytes() == before


def test_a_key_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        keys.write_key_file(tmp_path / "no folder" / "key")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8-sig"])
@pytest.mark.parametrize("nbytes", [PSK_BYTES_MIN, PSK_BYTES_MAX])
def test_a_key_may_have_passed_through_an_editor_of_windows(
    nbytes: int, encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_bytes(f"{'ab' * nbytes}\r\n".encode(encoding))
    path.chmod(0o600)
    assert keys.read_key_file(str(path)) == b"\xab" * nbytes


def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path) -> None:
    for content, said in [
        (b"", "0 bytes.*kvwire keygen"),
        (b"ab" * (PSK_BYTES_MIN - 1), "31 bytes; it needs 32 to 1024"),
        (b"ab" * (PSK_BYTES_MAX + 1), "not contain a hexadecimal key|1025 bytes"),
        (b"secret words, not hexadecimal", "not contain a hexadecimal key"),
        (b"\xff" * PSK_BYTES_MIN, "not contain a hexadecimal key"),
        (("ab" * PSK_BYTES_MIN).encode("utf-16"), "is in UTF-16; save it as ASCII"),
    ]:
        path = tmp_path / "key"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(UsageError, match=said) as caught:
            keys.read_key_file(str(path))
        assert str(path) in str(caught.value)
        assert "secret words" not in str(caught.value)


def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        keys.read_key_file(str(tmp_path / "none"))
    path = key_file(tmp_path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"mode 0640 .*chmod 600"):
        keys.read_key_file(str(path))


async def test_a_key_file_is_read_once(tmp_path: Path) -> None:
    """A communicator keeps its key until it is opened anew, whatever the file holds."""
    config = Config(trust="psk", psk_file=str(key_file(tmp_path)))
    async with kvwire.open(config) as old:
        address = await old.listen("127.0.0.1:0")
        async with kvwire.open(config) as same:
            await same.connect(address)
        key_file(tmp_path, "new").replace(config.psk_file)
        async with kvwire.open(config) as other:
            with pytest.raises(kvwire.AuthenticationFailed, match="the same key"):
                await other.connect(address)


def test_loopback_has_no_keys() -> None:
    assert keys.load_keys(Config()) == (TrustMode.LOOPBACK, b"", {})


# --- addresses ------------------------------------------------------------------------

MALFORMED = ("", "a..b")
UNKNOWN = ("eth0", "127.0.0.1.", "1.2.3.4.5", "a b")
LOOPBACK = ("127.0.0.1", "127.8.9.10", "127.1", "[::1]", "[::ffff:127.0.0.1]")


async def test_what_names_no_host_is_refused_in_every_mode() -> None:
    for host in [*MALFORMED, *UNKNOWN]:
        address = Address("tcp", host, 0)
        expected = UsageError if host in MALFORMED else OSError
        for trust in TrustMode:
            with pytest.raises(expected, match=r".+"):
                await keys.resolve(address, trust)


async def test_this_host_alone_needs_no_key() -> None:
    for host in LOOPBACK:
        address = Address.parse(f"{host}:7")
        (found,) = await keys.resolve(address, TrustMode.LOOPBACK)
        assert is_loopback(found.host)
        assert found.port == 7


async def test_a_name_stands_for_its_numeric_addresses() -> None:
    found = await keys.resolve(Address("tcp", "localhost", 7), TrustMode.LOOPBACK)
    assert {address.host for address in found} <= {"127.0.0.1", "::1"}
    assert len(set(found)) == len(found)


async def test_a_name_for_an_address_of_one_link_says_of_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Zone(monkeypatch, "fe80::1%2")
    addresses = await keys.resolve(Address("tcp", "neighbour", 7), TrustMode.PSK)
    assert addresses == [Address("tcp", "fe80::1%2", 7)]


def test_only_numbers_are_loopback() -> None:
    for host in ["", "localhost", "fe80::1%lo", "nonsense"]:
        assert not is_loopback(host)


# --- files with secrets ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "owner", "group", "user", "is_read"),
    [
        (0o600, 1000, GROUP, 1000, True),
        (0o400, 1000, GROUP, 1000, True),
        (0o440, 0, GROUP, 1000, True),  # a Secret of Kubernetes, with fsGroup
        (0o440, 0, GROUP + 100_000, 1000, False),
        (0o440, 1000, GROUP, 1000, False),
        (0o440, 0, GROUP, 0, False),
        (0o460, 0, GROUP, 1000, False),
        (0o444, 0, GROUP, 1000, False),
        *((mode, 1000, GROUP, 1000, False) for mode in OTHERS),
    ],
)
def test_who_may_reach_a_private_file(
    mode: int, owner: int, group: int, user: int, is_read: bool
) -> None:
    status = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 6, 0, 0, 0))
    assert keys.is_private(status, user) is is_read


def test_a_file_that_others_reach_is_read_if_it_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"secret")
    for mode in (0o600, 0o640):
        path.chmod(mode)
        assert keys.read_file("tls_ca_file", str(path), 3) == b"sec"
        if mode == 0o600:
            assert keys.read_file("psk_file", str(path), 9, private=True) == b"secret"
    with pytest.raises(UsageError, match=r"psk_file .* mode 0640 .*chmod"):
        keys.read_file("psk_file", str(path), 9, private=True)


# --- the guide to certificates, done as it says: its commands, and its configuration


GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "tls.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def made(folder: Path) -> None:
    """The CA, and the certificates of two workers."""
    ca, worker = blocks("sh")
    scripts = [ca, worker, worker.replace("decode-0", "prefill-0")]
    for script in scripts:
        done = ran("bash", "-ec", script, cwd=folder)
        assert done.returncode == 0, done.stderr


def configured(folder: Path, name: str, peer: str) -> kvwire.Config:
    """The guide's configuration, for one of the two."""
    (text,) = blocks("toml")
    values = tomllib.loads(text.replace("/etc/kvwire", str(folder)))
    values["tls_peers"] = [f"spiffe://example.org/{peer}"]
    for key in ("tls_cert_file", "tls_key_file"):
        values[key] = values[key].replace("decode-0", name)
    return kvwire.Config(**values)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
async def test_the_guide_connects_two_workers(tmp_path: Path) -> None:
    made(tmp_path)
    async with (
        kvwire.open(configured(tmp_path, "decode-0", "prefill-0")) as decode,
        kvwire.open(configured(tmp_path, "prefill-0", "decode-0")) as prefill,
    ):
        address = await decode.listen("127.0.0.1:0")
        connection = await prefill.connect(address, transport="tcp")
        assert connection.peer.identity == "spiffe://example.org/decode-0"
        assert "inside TLS" in str(connection.transport_report)
        assert (await decode.accept()).peer.identity == "spiffe://example.org/prefill-0"
