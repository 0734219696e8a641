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


def test_one_sided_is_off_until_it_is_asked_for() -> None:
    """And then UCX keeps no registrations of its own, for their keys would live on."""
    off, on = parse({}, NEW, {}), parse({"one_sided": "true"}, NEW, {})
    assert (off.one_sided, off.registrations) == (False, 0)
    assert on.one_sided
    assert on.ucx == {**DEFAULTS, "RCACHE_ENABLE": "n"}
    wanted = {"one_sided": "yes", "RCACHE_ENABLE": "y", "registrations": "512"}
    assert parse(wanted, NEW, {}).ucx["RCACHE_ENABLE"] == "y"
    assert parse(wanted, NEW, {}).registrations == 512


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"require_rdma": "maybe"}, 'it is "yes" or "no"'),
        ({"tls": "tcp"}, "no setting 'tls'"),
        ({"Require_Rdma": "yes"}, "there are require_rdma, one_sided"),
        ({"one_sided": "both"}, 'it is "yes" or "no"'),
        ({"registrations": "many"}, "a number up to 65536"),
        ({"registrations": "65537"}, "a number up to 65536"),
    ],
)
def test_what_is_no_setting_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(given, NEW, {})


def test_a_segment_of_shared_memory_has_a_length_of_16_bits() -> None:
    """UCX takes larger ones, and then every payload is damaged."""
    kib = int(DEFAULTS["MM_SEG_SIZE"].removesuffix("K"))
    assert kib * KIB < 2**16
