"""What is installed beside kvwire-engines: without it, one line says what to do."""

from __future__ import annotations

import re

from tests.support.runs import WITHOUT, python

NEEDS = (
    "torch kvwire_engines.transformers",
    "mlx kvwire_engines.mlx",
    "aiohttp kvwire_engines.llamacpp.sessions",
    "lmcache kvwire_engines.lmcache",
    "sglang kvwire_engines.sglang",
    "ray kvwire_engines.ray.transport",
)


def test_a_module_names_what_it_needs() -> None:
    done = python("-c", WITHOUT, *NEEDS, check=True)
    for line, said in zip(NEEDS, done.stdout.splitlines(), strict=True):
        package = line.split()[0]
        needed = f" needs ({package}|torch).*, .* not installed: pip install .+"
        assert re.search(needed, said)
