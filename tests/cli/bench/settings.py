"""Requests of ``kvwire bench overlap`` that have never run."""

from __future__ import annotations

from typing import Final

from kvwire.cli.bench.overlap import Setting

MS: Final = 1e-3


def setting(
    *,
    layers: int = 10,
    compute_ms: float = 4.0,
    streamed_ms: float = 2.0,
    whole_ms: float = 20.0,
    layer_ms: float = 2.0,
    judged: bool = True,
) -> Setting:
    return Setting(
        "scripted",
        layers,
        1 << 20,
        compute_ms * MS,
        judged=judged,
        streamed_s=[streamed_ms * MS],
        whole_s=[whole_ms * MS],
        layer_s=[layer_ms * MS],
        streamed_cpu_s=[3 * MS],
        whole_cpu_s=[2 * MS],
    )
