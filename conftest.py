"""Every test leaves nothing behind; options choose event loops and thoroughness."""

import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.pairs import SCHEMES, Pair, connected
from tests.support.simulated_device import SimulatedDevice

pytest_plugins = [
    "tests.support.depth",
    "tests.support.leaks",
    "tests.support.loops",
    "tests.support.rerun",
    # Named, since the settings turn the loading of installed plugins off.
    "kvwire.testing.pytest_plugin",
]

# What the developer's shell says to kvwire is not what the tests are about.
for _name in [name for name in os.environ if name.startswith("KVWIRE_")]:
    if _name != "KVWIRE_PREFER":
        del os.environ[_name]

# Tests that connect over tcp speak of tcp: through proxies, with frames cut, sealed.
# Both ends are on one host, so payload would go past all that, from memory to memory.
# Those that are about another transport name it, which comes before this.
os.environ.setdefault("KVWIRE_PREFER", "tcp")

# UCX opens every network device of a machine, and ends the process where one goes away
# meanwhile, as those do that tests beside this one make.
os.environ.setdefault("UCX_NET_DEVICES", "lo")

# What computes with NumPy shares the cores with the other processes of a run; threads
# of BLAS that wait for each other there take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# In debug mode asyncio logs each callback that took long. On a busy machine that may be
# any, and a test that counts what was logged would fail by chance.
logging.getLogger("asyncio").addFilter(
    lambda record: not str(record.msg).startswith("Executing %")
)

# A shell starts what runs in the background with Ctrl-C ignored, and the processes that
# tests end by it would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Hook of pytest-xdist: one process more than cores, since many tests wait."""
    return min((os.cpu_count() or 1) + 1, 8)


@pytest.fixture(params=SCHEMES)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two connected communicators, over a socket and in this process."""
    async with connected(request.param) as found:
        yield found


def _device() -> Iterator[SimulatedDevice]:
    """A device that the processor plays."""
    made = SimulatedDevice()
    yield made
    made.close()


device = pytest.fixture(name="device")(_device)
# Those of the two sides of a pair.
near = pytest.fixture(name="near")(_device)
far = pytest.fixture(name="far")(_device)
