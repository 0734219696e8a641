"""Configuration: where a value comes from, and errors that say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwire
from kvwire import Config, UsageError, limits
from kvwire.config import FIELDS, load_with_origins, local_path
from kvwire.types import Address

_NO_ENVIRONMENT: dict[str, str] = {}


def load(**arguments: Any) -> Config:
    return Config.load(environment=_NO_ENVIRONMENT, **arguments)


def written(folder: Path, text: str) -> Path:
    path = folder / "kvwire.toml"
    path.write_text(text)
    return path


# --- layers ---------------------------------------------------------------------------


def test_every_key_has_a_default_that_can_be_used() -> None:
    config = load()
    assert config.trust == "loopback"
    assert config.handshake_timeout_s == limits.HANDSHAKE_TIMEOUT_S
    assert config.ping_interval_s * config.ping_misses <= 6.5


def test_file_then_environment_then_arguments(tmp_path: Path) -> None:
    path = written(tmp_path, 'name = "file"\nping_misses = 4\nlease_s = 7.5\n')
    environment = {"KVWIRE_NAME": "environment", "KVWIRE_PING_MISSES": "5", "HOME": "/"}
    config = Config.load(path, environment=environment, name="argument")
    assert (config.name, config.ping_misses, config.lease_s) == ("argument", 5, 7.5)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWIRE_NAME", "from outside")
    assert Config.load().name == "from outside"


def test_lists_and_tables_in_the_environment() -> None:
    environment = {
        "KVWIRE_PREFER": "local, tcp",
        "KVWIRE_FORBID": "",
        "KVWIRE_PROFILE": "model=llama, revision = a=b",
        "KVWIRE_CLOSE_TIMEOUT_S": "0.5",
    }
    config = Config.load(environment=environment)
    assert config.prefer == ("local", "tcp")
    assert config.forbid == ()
    assert config.profile == {"model": "llama", "revision": "a=b"}
    assert config.close_timeout_s == 0.5


@pytest.mark.parametrize(
    ("text", "resume"),
    [("yes", True), ("On", True), ("1", True), ("no", False), ("OFF", False)],
)
def test_booleans_are_what_people_write(text: str, resume: bool) -> None:
    assert Config.load(environment={"KVWIRE_RESUME": text}).resume is resume


def test_sizes_are_what_people_write(tmp_path: Path) -> None:
    path = written(tmp_path, 'window_bytes = "2 MiB"\n')
    environment = {"KVWIRE_CHUNK_BYTES": "4MiB"}
    config = Config.load(path, environment=environment, quarantine_bytes="1GB")
    sizes = (config.chunk_bytes, config.window_bytes, config.quarantine_bytes)
    assert sizes == (4 * limits.MIB, 2 * limits.MIB, 10**9)


def test_each_value_has_an_origin(tmp_path: Path) -> None:
    path = written(tmp_path, "lanes = 2\nlease_s = 4\n")
    environment = {"KVWIRE_LEASE_S": "5"}
    config, origins = load_with_origins(path, environment=environment, name="me")
    assert (config.lanes, config.lease_s, config.name) == (2, 5.0, "me")
    assert origins == {
        "lanes": f"config file {path}",
        "lease_s": "environment variable KVWIRE_LEASE_S",
        "name": "arguments",
    }


def test_replace_changes_some_keys_and_checks_them() -> None:
    config = load(name="one")
    assert config.replace(ping_misses=9) == load(name="one", ping_misses=9)
    with pytest.raises(UsageError, match="ping_misses=0"):
        config.replace(ping_misses=0)
    assert config == load(name="one")


def test_whole_numbers_of_any_type() -> None:
    config = load(
        lanes=np.int64(2),
        lease_s=np.int32(3),
        chunk_bytes=np.uint32(2**20),
        io_cpus=[np.int64(0)],
    )
    assert config == load(lanes=2, lease_s=3, chunk_bytes=2**20, io_cpus=[0])


# --- errors that teach ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"xyzzy": 1},
            "unknown key 'xyzzy'; known are backends, checksum, chunk_bytes",
        ),
        ({"ping_interval_s": 0.1}, "ping_interval_s=0.1: Expected `float` >= 0.2"),
        ({"ping_misses": 11}, "ping_misses=11: Expected `int` <= 10"),
        ({"require": [""]}, "require=.*`str` of length >= 1"),
        ({"profile": {"model": "x" * 200}}, "profile=.*`str` of length <= 128"),
        ({"psk_accept_files": ["key"]}, 'trust must be "psk"'),
        ({"prefer": None}, "prefer=None: Expected `list`, got `None`"),
        ({"lanes": "\udcff"}, r"lanes='\\udcff': surrogates not allowed"),
        ({"io_cpus": ["0", "\udcff"]}, r"io_cpus='\\udcff': surrogates not allowed"),
        ({"backends": np.int64(2)}, "backends=.*a table of settings"),
        ({"lanes": True}, "lanes=True: Expected `int`, got `bool`"),
        ({"lanes": np.True_}, "lanes=np.True_: Expected `int`"),
        ({"profile": object()}, "profile=.*a table is needed"),
        ({"name": "half a \ud800"}, "name or profile: 'utf-8' codec can't encode"),
        ({"profile": {"model": "\udcff"}}, "name or profile: 'utf-8' codec"),
    ],
)
def test_a_wrong_value_names_itself(arguments: dict[str, Any], said: str) -> None:
    """More are on the page of wrong uses."""
    with pytest.raises(UsageError, match=said):
        load(**arguments)


def test_a_profile_must_fit_one_frame() -> None:
    wide = {f"{n:0128d}": "é" * 128 for n in range(limits.PROFILE_FIELDS_MAX)}
    with pytest.raises(UsageError, match="bytes of text"):
        load(profile=wide)
    with pytest.raises(UsageError, match="profile"):
        load(profile={str(n): "" for n in range(limits.PROFILE_FIELDS_MAX + 1)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "Invalid value"),
        ("name = 5", r"kvwire.toml: name=5: Expected `str`, got `int`"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        Config.load(written(tmp_path, text), environment=_NO_ENVIRONMENT)
    assert "kvwire.toml" in str(caught.value)


def test_a_file_may_have_passed_through_an_editor_of_windows(tmp_path: Path) -> None:
    file = tmp_path / "kvwire.toml"
    file.write_bytes('name = "it"\r\nlanes = 2\r\n'.encode("utf-8-sig"))
    found = Config.load(file, environment=_NO_ENVIRONMENT)
    assert (found.name, found.lanes) == ("it", 2)
    file.write_bytes('name = "it"\n'.encode("utf-16"))
    with pytest.raises(UsageError, match=r"kvwire\.toml is not in UTF-8: .*save it as"):
        Config.load(file)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"binary\.toml"):
        Config.load(binary)


async def test_a_config_made_by_hand_is_checked_when_it_is_used() -> None:
    with pytest.raises(UsageError, match="ping_misses=0"):
        await kvwire.open(Config(ping_misses=0))
    with pytest.raises(UsageError, match="psk_file"):
        Config(trust="psk")


@given(key=st.sampled_from(sorted(FIELDS)), value=st.text(max_size=20))
def test_any_text_is_taken_or_refused_by_name(key: str, value: str) -> None:
    """From the environment nothing but a Config or a UsageError can come."""
    found = None
    refused = ""
    try:
        found = Config.load(environment={f"KVWIRE_{key.upper()}": value})
    except UsageError as exc:
        refused = str(exc)
    assert (found is None) == (key in refused or "psk" in refused)


# --- certificates ---------------------------------------------------------------------

_TLS: dict[str, Any] = {
    "trust": "mtls",
    "tls_cert_file": "cert",
    "tls_key_file": "key",
    "tls_ca_file": "ca",
    "tls_peers": ("spiffe://a",),
}


def test_certificates_are_given_as_paths() -> None:
    assert load(**_TLS).tls_peers == ("spiffe://a",)
    paths = {k: Path(v) for k, v in _TLS.items() if k.endswith("_file")}
    assert load(**_TLS | paths) == load(**_TLS)
    keys = load(trust="psk", psk_file=Path("a"), psk_accept_files=[Path("b"), "c"])
    here = Path.cwd()
    assert keys.psk_file == f"{here}/a"
    assert keys.psk_accept_files == (f"{here}/b", f"{here}/c")


def test_a_path_stays_where_the_program_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon, a notebook or a worker may change its working directory later."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert local_path("key") == f"{tmp_path}/gone/key"
    assert local_path("/key") == "/key"
    assert not local_path("")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the working directory was removed"):
        local_path("key")
    assert local_path("/key") == "/key"


@pytest.mark.parametrize("key", ["tls_cert_file", "tls_key_file", "tls_ca_file"])
def test_a_file_that_mtls_needs(key: str) -> None:
    with pytest.raises(UsageError, match=f'trust="mtls" needs {key}'):
        load(**{k: v for k, v in _TLS.items() if k != key})


def test_everybody_is_a_choice() -> None:
    """An empty list would be a door that nobody has closed, or one nobody can open."""
    with pytest.raises(UsageError, match=r'tls_peers, the names .*\("\*",\) allows'):
        load(**{**_TLS, "tls_peers": ()})
    assert load(**{**_TLS, "tls_peers": ("*",)}).tls_peers == ("*",)


@pytest.mark.parametrize("key", sorted(set(_TLS) - {"trust"}))
@pytest.mark.parametrize("trust", ["loopback", "psk"])
def test_certificates_in_another_mode(key: str, trust: str) -> None:
    psk = {"psk_file": "key"} if trust == "psk" else {}
    with pytest.raises(UsageError, match=f'{key} is given, so trust must be "mtls"'):
        load(trust=trust, **psk, **{key: _TLS[key]})


def test_peers_in_the_environment() -> None:
    environment = {
        f"KVWIRE_{key.upper()}": value if isinstance(value, str) else "a, spiffe://b"
        for key, value in _TLS.items()
    }
    assert Config.load(environment=environment).tls_peers == ("a", "spiffe://b")


# --- what others put into an environment ----------------------------------------------


def _service(name: str, protocol: str = "tcp") -> dict[str, str]:
    """Return what Kubernetes adds to each pod of a namespace for a service."""
    prefix = name.upper().replace("-", "_")
    port = f"{prefix}_PORT_7500_{protocol.upper()}"
    return {
        f"{prefix}_SERVICE_HOST": "10.96.3.7",
        f"{prefix}_SERVICE_PORT": "7500",
        f"{prefix}_SERVICE_PORT_KVWIRE_API": "7500",
        f"{prefix}_PORT": f"{protocol}://10.96.3.7:7500",
        port: f"{protocol}://10.96.3.7:7500",
        f"{port}_PROTO": protocol,
        f"{port}_PORT": "7500",
        f"{port}_ADDR": "10.96.3.7",
    }


@pytest.mark.parametrize("name", ["kvwire", "kvwire-store", "kvwire-lanes", "kvwire2"])
@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_variables_of_a_service_are_passed_over_with_one_line(
    caplog: pytest.LogCaptureFixture, name: str, protocol: str
) -> None:
    environment = _service(name, protocol) | {"KVWIRE_LANES": "3"}
    # One line in each process: another test may have had the same variables.
    environment[f"{name.upper().replace('-', '_')}_PORT_1_TCP"] = "tcp://10.0.0.1:1"
    assert Config.load(environment=environment).lanes == 3
    assert Config.load(environment=environment).lanes == 3
    assert [record.name for record in caplog.records] == ["kvwire.config"]
    assert "enableServiceLinks: false" in caplog.text


def test_variables_of_a_link_of_docker_are_passed_over() -> None:
    environment = _service("kvwire") | {
        "KVWIRE_NAME": "/prefill/kvwire",
        "KVWIRE_ENV_PYTHON_VERSION": "3.12",
    }
    assert Config.load(environment=environment).name == ""


@pytest.mark.parametrize(
    "environment",
    [
        {"KVWIRE_PORT": "7500"},
        {"KVWIRE_ENV_LANES": "4"},
        {"KVWIRE_SERVICE": "a"},
        _service("kvwire") | {"KVWIRE_LANE": "4"},
    ],
)
def test_a_misspelt_variable_is_still_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="unknown key"):
        Config.load(environment=environment)


def test_a_name_of_a_path_is_a_name_where_there_is_no_link() -> None:
    assert Config.load(environment={"KVWIRE_NAME": "/a/b"}).name == "/a/b"


# --- what is shown, and where files are -----------------------------------------------


def test_a_shown_configuration_has_what_was_changed_and_no_password() -> None:
    config = load(directory="redis://me:hun#ter2@host:1", lanes=2)
    assert repr(config) == "Config(lanes=2, directory='redis://...@host:1')"
    with pytest.raises(UsageError) as caught:
        load(directory="redis://me:hunter2@host:1" + "x" * 2000)
    assert "hunter2" not in str(caught.value)


def test_paths_are_read_as_a_shell_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, 'trust = "psk"\npsk_file = "~/key"\ninspect = "$HOME/run"\n')
    config = Config.load("~/kvwire.toml", psk_accept_files=["${HOME}/old", Path("~/k")])
    assert config.psk_file == f"{tmp_path}/key"
    assert config.inspect == f"{tmp_path}/run"
    assert config.psk_accept_files == (f"{tmp_path}/old", f"{tmp_path}/k")
    with pytest.raises(UsageError, match=r"psk_file=.*KV_NO_SUCH"):
        load(psk_file="$KV_NO_SUCH/key", trust="psk")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have(name: str) -> None:
    with pytest.raises(UsageError, match=r"psk_file=.*no file can have this name"):
        load(psk_file=name, trust="psk")
    with pytest.raises(UsageError, match="no file can have this name"):
        local_path(name)
    with pytest.raises(UsageError, match="no file can have this name"):
        Address.parse(f"unix:///run/{name}")
