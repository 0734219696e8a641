"""Settings: defaults, then the user's, and the environment over both."""

from __future__ import annotations

import pytest

from kvwire.errors import UsageError
from kvwire.limits import KIB
from kvwire_ucx.settings import DEFAULTS, DEFAULTS_OF_OLD, OLD, parse

NEW = (1, 22, 0)


@pytest.mark.parametrize("key", ["TLS", "UCX_TLS"])
def test_the_users_win_over_defaults_with_and_without_prefix(key: str) -> None:
    settings = parse({key: "tcp", "RNDV_THRESH": "1k"}, NEW, {})
    assert settings.ucx == {**DEFAULTS, "TLS": "tcp", "RNDV_THRESH": "1k"}
    assert settings.named == {"TLS", "RNDV_THRESH"}


def test_the_environment_wins_over_both() -> None:
    environment = {"UCX_TLS": "all", "UCX_KEEPALIVE_INTERVAL": "9s", "TLS": "x"}
    settings = parse({"TLS": "tcp", "PROTOS": "all"}, NEW, environment)
    assert "TLS" not in settings.ucx
    assert "KEEPALIVE_INTERVAL" not in settings.ucx
    assert settings.named == {"PROTOS"}


def test_an_old_library_sends_copies() -> None:
    before, since = (OLD[0], OLD[1] - 1, 9), (*OLD, 0)
    assert parse({}, before, {}).ucx == {**DEFAULTS, **DEFAULTS_OF_OLD}
    assert parse({}, since, {}).ucx == DEFAULTS
    assert parse({"ZCOPY_THRESH": "0"}, before, {}).ucx["ZCOPY_THRESH"] == "0"


def test_keys_of_windows_do_not_outlive_them() -> None:
    """UCX keeps no registrations of its own then, unless somebody wants it to."""
    assert parse({}, NEW, {}, keys_end=True).ucx == {**DEFAULTS, "RCACHE_ENABLE": "n"}
    wanted = {"RCACHE_ENABLE": "y"}
    assert parse(wanted, NEW, {}, keys_end=True).ucx["RCACHE_ENABLE"] == "y"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"require_rdma": "maybe"}, 'use "yes" or "no"'),
        ({"tls": "tcp"}, "unknown setting 'tls'"),
        ({"Require_Rdma": "yes"}, "use require_rdma, or one of UCX's own"),
        ({"one_sided": "yes"}, "setting 'one_sided' was removed"),
        ({"registrations": "5"}, 'with one_sided_windows="peers"'),
    ],
)
def test_what_is_no_setting_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(given, NEW, {})


def test_a_segment_of_shared_memory_has_a_length_of_16_bits() -> None:
    """UCX takes larger ones, and then every payload is damaged."""
    kib = int(DEFAULTS["MM_SEG_SIZE"].removesuffix("K"))
    assert kib * KIB < 2**16
