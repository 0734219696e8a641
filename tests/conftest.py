"""Every test runs on both event loops and leaves nothing behind."""

pytest_plugins = ["tests.support.leaks", "tests.support.loops"]
