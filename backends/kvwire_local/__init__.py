"""Lanes between processes of one host: the receiver reads the sender's memory.

:mod:`kvwire_local.lane` says how, and why it is safe; docs/howto/same-host.md what a
user can choose.
"""

from kvwire_local.backend import LocalBackend

__all__ = ["LocalBackend"]
