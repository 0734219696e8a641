"""Contexts: what UCX finds under which settings, and that RDMA can be required."""

from __future__ import annotations

import pytest

from kvwire.errors import BackendUnavailable
from kvwire_ucx.context import Context, Resource
from tests.backends.kvwire_ucx.support import SHARED_MEMORY, TCP, needs_ucx

pytestmark = needs_ucx


def transports(given: dict[str, str]) -> set[str]:
    context = Context(given)
    try:
        return {resource.transport for resource in context.resources}
    finally:
        context.close()


def is_rdma(transport: str) -> bool:
    return Resource(transport, "a device").is_rdma


def test_it_lists_what_the_settings_leave() -> None:
    assert transports({"TLS": TCP}) == {"tcp"}
    assert {"tcp", "self", "sysv", "posix"} <= transports({"TLS": SHARED_MEMORY})


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    assert transports({"TLS": TCP}) == {"self"}


def test_requiring_rdma_says_what_was_found_instead() -> None:
    if any(is_rdma(transport) for transport in transports({})):
        pytest.skip("this machine has RDMA, and UCX uses it")
    words = r"require_rdma: UCX 1\.\d+\.\d+ .* finds no RDMA device, only .*tcp/lo"
    with pytest.raises(BackendUnavailable, match=words):
        Context({"require_rdma": "yes"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"KEEPALIVE_INTERVAL": "soon"}, "does not take the setting KEEPALIVE"),
        ({"TLS": "pigeons"}, "no context: No such device"),
    ],
)
def test_ucx_says_what_is_wrong_with_settings(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(BackendUnavailable, match=words):
        Context(given)


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        *((name, True) for name in ("rc_mlx5", "rc_verbs", "dc_mlx5", "ud_verbs")),
        *((name, True) for name in ("rc", "srd", "gga_mlx5")),
        *((name, False) for name in ("tcp", "sysv", "posix", "cma", "self", "xpmem")),
        *((name, False) for name in ("cuda_copy", "cuda_ipc", "rdmacm")),
    ],
)
def test_rdma_is_told_by_the_transport(transport: str, expected: bool) -> None:
    assert is_rdma(transport) is expected
