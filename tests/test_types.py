"""Sizes as people say them, and addresses that are none."""

from __future__ import annotations

import pytest

from kvwire.errors import UsageError
from kvwire.limits import GIB, TIB
from kvwire.types import Address, in_bytes


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4096, "4 KiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (2 * TIB, "2 TiB"),
    ],
)
def test_sizes(count: int, said: str) -> None:
    assert in_bytes(count) == said


@pytest.mark.parametrize("user", ["user:", ":", "", "user:more:"])
@pytest.mark.parametrize("scheme", ["", "tcp://", "redis://"])
@pytest.mark.parametrize("sign", ["", "#", "?", "/", "[", "@"])
def test_a_password_in_an_address_is_not_shown(
    scheme: str, user: str, sign: str
) -> None:
    with pytest.raises(UsageError, match="without a user name") as caught:
        Address.parse(f"{scheme}{user}secret{sign}word@host:7400")
    assert "secret" not in str(caught.value)
    assert "host:7400" in str(caught.value)


def test_a_path_may_have_an_at_sign() -> None:
    assert Address.parse("unix:///run/a@b").host == "/run/a@b"
