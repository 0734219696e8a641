"""The tests of kvwire; a package, so that they can share `tests.support`."""
