"""Every test runs on both event loops and leaves nothing behind.

Property tests take the same examples in every run and are not timed: what fails once
fails again, on any machine.
"""

from hypothesis import settings

pytest_plugins = [
    "tests.support.leaks",
    "tests.support.loops",
    # Named, since the settings turn the loading of installed plugins off.
    "kvwire.testing.pytest_plugin",
]

settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("same")
