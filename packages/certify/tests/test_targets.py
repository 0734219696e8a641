"""Targets that come with kvwire: what is offered lands, and kvwire breaks nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvwire_certify.runner import Stage, certify
from kvwire_certify.schedule import Schedule, Step, make
from kvwire_certify.transport import TARGETS
from tests.support.depth import sample
from tests.support.servers import redis_server
from tests.support.tree import ROOT

TRANSPORTS = ("kvwire:tcp", "kvwire:local", "kvwire:ucx")
# An engine is loaded within three times as long.
LIMIT_S = 60.0
# They have no puts.
STORES = {"llamacpp", "vllm"}
ONCE = Schedule(
    seed=0,
    slots=4,
    slot_bytes=64 << 10,
    steps=(
        Step("offer", 0, 1, 2),
        Step("get", 0, 2),
        Step("put", 0, 0),
        Step("get", 0, 2),
        Step("withdraw", 0),
    ),
)

REPORTS = """
from kvwire_certify.targets.llamacpp import LlamaCppEnd

class Reports(LlamaCppEnd):
    async def restore(self, name):
        pass
"""

# Its server is a program that prints nothing.
SILENT = """
import sys
from pathlib import Path
from kvwire_certify.targets.llamacpp import LlamaCppEnd

class Silent(LlamaCppEnd):
    async def start(self):
        sys.executable = str(Path(__file__).with_name("silent"))
        return await super().start()
"""


def installed(target: str) -> str:
    """The target, if what it needs is installed.

    It is not loaded here: libraries leave descriptors and threads in a process.
    """
    needs = TARGETS["ucx" if target == "kvwire:ucx" else target.partition(":")[0]]
    try:
        needs.found()
    except ModuleNotFoundError as exc:
        pytest.skip(f"{exc} here; `kvwire certify` has the command")
    return target


@pytest.mark.parametrize("target", sorted(TARGETS))
async def test_what_is_offered_lands(target: str) -> None:
    async with Stage(installed(target), LIMIT_S) as stage:
        try:
            played = await stage.play(ONCE)
        except ImportError as exc:
            if "cannot open shared object file" not in str(exc):
                raise
            pytest.skip(str(exc))  # it needs a library of the system
    assert (played.rule, played.text) == ("", "")
    assert played.operations == (2 if target in STORES else 3)


async def test_a_restore_that_is_reported_and_has_not_happened(tmp_path: Path) -> None:
    """llama.cpp#26676: the server reports success, and its slot is as before."""
    installed("llamacpp")
    (tmp_path / "reports.py").write_text(REPORTS)
    target = f"{tmp_path / 'reports.py'}:Reports"
    async with Stage(target, LIMIT_S) as stage:
        played = await stage.play(ONCE)
    assert played.rule == "hole"
    assert "bytes that landed were never written" in played.text


async def test_a_server_that_never_comes_up_is_ended(tmp_path: Path) -> None:
    """Closing waited for its port, without a limit."""
    installed("llamacpp")
    (tmp_path / "silent.py").write_text(SILENT)
    (tmp_path / "silent").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "silent").chmod(0o755)
    steps = Step("offer", 0, 1, 2), Step("get", 0, 2, way="timeout", after_s=0.2)
    async with Stage(f"{tmp_path / 'silent.py'}:Silent", LIMIT_S) as stage:
        played = await stage.play(msgspec.structs.replace(ONCE, steps=steps))
    assert (played.rule, played.text, played.operations) == ("", "", 0)


@pytest.fixture(scope="module")
def redis_address() -> Iterator[str]:
    with redis_server() as server:
        yield f"127.0.0.1:{server.port}"


async def test_the_example_of_the_page(
    redis_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "howto" / "certify.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    port = redis_address.partition(":")[2]
    (tmp_path / "my_store.py").write_text(code.replace("6379", port))
    monkeypatch.chdir(tmp_path)
    found = await certify("my_store.py:MyStore", seeds=range(1, 5))
    assert found.breaches == ()
    assert found.operations


@pytest.mark.parametrize("target", TRANSPORTS)
async def test_kvwire_breaks_nothing(target: str) -> None:
    """Of 300 schedules in a thorough run, some in another."""
    first = 1000 * TRANSPORTS.index(target)
    found = await certify(
        installed(target), seeds=sample(range(first, first + 100), 25)
    )
    assert found.breaches == ()
    assert found.operations


async def test_a_get_whose_await_is_cancelled() -> None:
    """It was released too early, and written to memory that was in use."""
    async with Stage("kvwire:tcp") as stage:
        assert (await stage.play(make(1))).rule == ""
