"""What the UCX in NIXL's wheel does to its process."""

from __future__ import annotations

from tests.backends.kvwire_nixl.support import needs_nixl
from tests.support.runs import python

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
