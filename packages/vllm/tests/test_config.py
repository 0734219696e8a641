"""The keys of kv_connector_extra_config, of both connectors."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from kvwire.errors import UsageError
from kvwire.kv.row_codec import ROW_CODECS
from kvwire.types import Address
from kvwire_vllm.config import VllmSettings, read_keys, read_settings
from kvwire_vllm.store.config import StoreSettings


def test_what_is_not_ours_is_for_kvwire() -> None:
    extra = {"stream": "chunk", "lease_s": 5, "profile": {"site": "a"}}
    settings, config = read_settings(extra, {"vllm_model": "m"})
    assert settings.stream == "chunk"
    assert config.lease_s == 5
    assert config.profile == {"vllm_model": "m", "site": "a"}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"stream": "chunks"}, "stream='chunks': .*did you mean 'chunk'"),
        ({"stream": 1}, "stream=1"),
        ({"listen": "7400"}, "no port"),
        ({"listen": 7400}, "listen=7400"),
        ({"group_bytes": -1}, "group_bytes=-1"),
        ({"group_bytes": 1.5}, "group_bytes=1.5"),
        ({"group_bytes": True}, "group_bytes=True"),
        ({"fence_s": 0}, "fence_s=0"),
        ({"peers": "a:1"}, "peers='a:1': Expected `list`"),
        ({"peers": ["a"]}, "no port"),
        ({"http": "h:1"}, "http='h:1'"),
        ({"http": 7}, "http=7"),
        ({"http": "http://0.0.0.0:8000"}, "nobody can dial http://0.0.0.0:8000"),
        ({"peers": ["0.0.0.0:7400"]}, "nobody can dial"),
        ({"role": "prefil"}, "did you mean 'prefill'"),
        ({"lease": 5}, "did you mean 'lease_s'"),
        ({"group_byte": 1}, "did you mean 'group_bytes'"),
        ({"profile": "x"}, "profile='x'"),
    ],
)
def test_what_cannot_be(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_settings(extra, {})


def test_codecs_are_those_of_transfers() -> None:
    codec = get_type_hints(VllmSettings)["codec"]
    assert get_args(codec) == ("", *ROW_CODECS)


def test_ranks_listen_beside_each_other() -> None:
    settings = VllmSettings(listen="127.0.0.1:7400")
    assert str(settings.address(3)) == "tcp://127.0.0.1:7403"
    assert str(VllmSettings().address(3)) == "tcp://127.0.0.1:0"
    assert str(settings.beside(4).address(3)) == "tcp://127.0.0.1:7407"


def test_what_peers_are_told() -> None:
    bound = Address("tcp", "0.0.0.0", 7401)

    def told(**extra: str) -> tuple[str, str]:
        settings, _ = read_settings(
            {"listen": "0.0.0.0:7400", "trust": "psk", "psk_file": "key", **extra}, {}
        )
        return settings.advertised(bound, 1), settings.beside(4).advertised(bound, 1)

    assert told(advertise="node-7") == ("tcp://node-7:7401",) * 2
    assert told(advertise="node-7:17400") == (
        "tcp://node-7:17401",
        "tcp://node-7:17405",
    )
    assert told(advertise="fd00::7") == ("tcp://[fd00::7]:7401",) * 2
    assert VllmSettings().advertised(Address("tcp", "127.0.0.1", 5)) == (
        "tcp://127.0.0.1:5"
    )


@pytest.mark.parametrize("listen", ["0.0.0.0:7400", "[::]:7400", "0.0.0.0:0"])
@pytest.mark.parametrize("advertise", ["", "0.0.0.0", "[::]:9", "224.0.0.1", "a b"])
def test_what_nobody_can_dial_is_refused_at_start(listen: str, advertise: str) -> None:
    with pytest.raises(UsageError, match=r'nobody can dial .*set "advertise"|both'):
        read_settings({"listen": listen, "advertise": advertise}, {})


def test_ports_of_ranks_end_at_the_last_one() -> None:
    settings = VllmSettings(listen="10.0.0.1:65535")
    with pytest.raises(UsageError, match="rank 1 would get port 65536"):
        settings.address(1)
    with pytest.raises(UsageError, match="rank 1 would get port 65536"):
        settings.beside(1)


# --- what may stand in ``kv_connector_extra_config`` ----------------------------------


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tier": []}, "unknown key 'tier'; did you mean 'tiers'"),
        ({"tiers": "memory:1GiB"}, "tiers='memory:1GiB'"),
        ({"tiers": []}, "tiers"),
        ({"tiers": ["8GiB"]}, "8GiB"),
        ({"write": "never"}, "write='never'"),
        ({"fingerprint": 3}, "fingerprint=3"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s=0"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_keys(extra, StoreSettings)


def test_ranks_do_not_share_a_directory() -> None:
    shared = read_keys({"tiers": ["memory:1GiB", "disk:/kv?size=1GiB"]}, StoreSettings)
    assert shared.tiers_of(0, 1) == list(shared.tiers)
    with pytest.raises(UsageError, match="rank"):
        shared.tiers_of(0, 2)
    own = read_keys(
        {"tiers": ["memory:1GiB", "disk:/kv{rank}?size=1GiB"]}, StoreSettings
    )
    assert own.tiers_of(1, 2) == ["memory:1GiB", "disk:/kv1?size=1GiB"]
