"""Lanes between processes of one host: the receiver reads the sender's memory.

:mod:`kvwire_local.lane` explains how, and why it is safe; docs/howto/same-host.md lists
the settings.
"""

from kvwire_local.backend import LocalBackend

__all__ = ["LocalBackend"]
