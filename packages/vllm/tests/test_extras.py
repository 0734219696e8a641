"""What is installed beside kvwire-vllm: without it, one line says what to do."""

from __future__ import annotations

import re

from tests.support.runs import WITHOUT, python

NEEDS = (
    "vllm kvwire_vllm.connector",
    "vllm kvwire_vllm.stats",
    "vllm kvwire_vllm.store.connector",
    "torch kvwire_vllm.connector",
)


def test_a_module_names_what_it_needs() -> None:
    done = python("-c", WITHOUT, *NEEDS, check=True)
    for line, said in zip(NEEDS, done.stdout.splitlines(), strict=True):
        package = "(torch|vllm)" if "connector" in line else line.split()[0]
        assert re.search(f" needs {package}.*, .* not installed: pip install .+", said)
