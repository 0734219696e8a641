"""Lanes whose library makes TCP sockets by itself take the pacing from them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvwire.backend import Backend, pacing
from kvwire.limits import KIB
from kvwire_certify.conformance.rig import LaneRig
from kvwire_nixl import NixlBackend, driver
from kvwire_ucx import UcxBackend, worker
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.kvwire_ucx.support import TCP, needs_ucx
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("backend", "settings", "module"),
    [
        pytest.param(UcxBackend, {"TLS": TCP}, worker, marks=needs_ucx, id="ucx"),
        pytest.param(
            NixlBackend,
            {"param.engine_config": f"TLS={TCP}"},
            driver,
            marks=needs_nixl,
            id="nixl",
        ),
    ],
)
async def test_both_sides_of_a_lane_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
    backend: type[Backend],
    settings: dict[str, str],
    module: ModuleType,
) -> None:
    found: list[int] = []

    def unpace(epolls: Any) -> None:
        found.append(pacing.unpace(epolls))

    monkeypatch.setattr(module, "unpace", unpace)
    test = LaneRig(backend, settings, PATIENCE_S)
    left, right = await test.pair()
    left.send(64 * KIB)
    await test.moved(left, right, 1)
    left.abort()
    right.abort()
    await test.aclose()
    assert len(found) == 2
    assert min(found) >= 1
