"""What is installed beside kvwire-vllm: without it, one line says what to do."""

from __future__ import annotations

import re

from tests.support.runs import WITHOUT, python

NEEDS = (
    "vllm kvwire_vllm.connector",
    "vllm kvwire_vllm.stats",
    "vllm kvwire_vllm.store.connector",
    "vllm kvwire_vllm.store.tier",
    "torch kvwire_vllm.connector",
    "aiohttp kvwire_vllm.proxy.client",
    "aiohttp kvwire_vllm.proxy.app",
)


def test_a_module_names_what_it_needs() -> None:
    done = python("-c", WITHOUT, *NEEDS, check=True)
    for line, said in zip(NEEDS, done.stdout.splitlines(), strict=True):
        package = "(torch|vllm)" if "connector" in line else line.split()[0]
        assert re.search(f" needs {package}.*, .* not installed: pip install .+", said)


def test_the_proxy_without_its_packages_has_help_and_one_line() -> None:
    """Nobody installs them to read what it does."""
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from kvwire_vllm.proxy.command import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for arguments, status in (["--help"], 0), (["--decode", "http://h:1=h:2"], 1):
        done = python("-c", code, *arguments)
        assert done.returncode == status, done.stderr
        assert done.stderr.count("\n") == status
        assert "pip install" in done.stderr or not status
