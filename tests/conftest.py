"""Every test runs on both event loops and leaves nothing behind.

Property tests take the same examples in every run and are not timed: what fails once
fails again, on any machine.
"""

import os
import signal

from hypothesis import settings

pytest_plugins = [
    "tests.support.leaks",
    "tests.support.loops",
    # Named, since the settings turn the loading of installed plugins off.
    "kvwire.testing.pytest_plugin",
]

# Tests that connect over tcp speak of tcp: through proxies, with frames cut, sealed.
# Both ends are on one host, so payload would go past all that, from memory to memory.
# Those that are about another transport name it, which comes before this.
os.environ.setdefault("KVWIRE_PREFER", "tcp")

# A shell starts what runs in the background with Ctrl-C ignored, and the processes that
# tests end by it would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("same")
