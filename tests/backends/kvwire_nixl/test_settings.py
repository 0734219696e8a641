"""Settings: defaults, the plug-in's own, and typos that are refused."""

from __future__ import annotations

import pytest

import kvwire
from kvwire.errors import UsageError
from kvwire_nixl.settings import parse
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.support.runs import python


def test_without_any_it_is_ucx_that_notices_the_dead() -> None:
    found = parse({})
    assert (found.plugin, found.exposes_caches) == ("UCX", True)
    assert "KEEPALIVE_INTERVAL=2s" in found.params["engine_config"]
    assert parse({"plugin": "LIBFABRIC"}).params == {}


def test_a_plugin_gets_its_own_parameters() -> None:
    found = parse({"param.num_workers": "2", "param.engine_config": "TLS=tcp"})
    # A setting that comes later is the one that counts.
    default = parse({}).params["engine_config"]
    assert found.params == {"num_workers": "2", "engine_config": f"{default},TLS=tcp"}
    found.require_known({"num_workers": "1"})
    with pytest.raises(UsageError, match=r"no parameter 'num_worker'.*num_workers"):
        parse({"param.num_worker": "2"}).require_known({"num_workers": "1"})
    # Of one that lists none, nobody can say.
    parse({"plugin": "LIBFABRIC", "param.x": "2"}).require_known({})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"plugins": "UCX"}, "unknown setting 'plugins'.*plugin"),
        ({"expose": "all"}, "expose='all'"),
        ({"plugin": "POSIX"}, "moves data to storage"),
    ],
)
def test_what_is_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(given)


async def test_a_communicator_refuses_them_at_once() -> None:
    with pytest.raises(UsageError, match="unknown setting 'plugn'"):
        await kvwire.open(backends={"nixl": {"plugn": "UCX"}}).__aenter__()


# --- what the UCX in NIXL's wheel does to its process ---------------------------------


CHILD = """
import ctypes
from pathlib import Path
from kvwire_nixl import library
agent = library._bare_agent(library.load())
agent.createBackend("UCX", {})
(ucs,) = {l.split()[-1] for l in Path("/proc/self/maps").open() if "/libucs-" in l}
level = ctypes.create_string_buffer(80)
ctypes.CDLL(ucs).ucs_global_opts_get_value(b"LOG_LEVEL", level, 80)
print(level.value.decode())
caught = Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0]
print(bool(int(caught, 16) & 1 << 10))  # SIGSEGV
"""


@needs_nixl
def test_it_prints_nothing_and_leaves_crashes_to_faulthandler() -> None:
    done = python("-c", CHILD, check=True)
    assert done.stdout.lower().split() == ["fatal", "false"]
