"""Directories, in which members announce themselves and find each other.

A directory is an address book on a service that a site already runs: Redis, NATS, a DNS
zone, or a folder on one machine. Its records are not trusted. A false record costs its
reader one connection attempt; keys and certificates prove which process answers.
"""

from kvwire.directory.base import Directory
from kvwire.directory.members import Change, ChangeKind
from kvwire.directory.record import Record
from kvwire.directory.registry import open_directory
from kvwire.directory.selector import Selector

__all__ = [
    "Change",
    "ChangeKind",
    "Directory",
    "Record",
    "Selector",
    "open_directory",
]
