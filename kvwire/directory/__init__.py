"""Directories, in which members announce themselves and find each other.

A directory is an address book that people run already: a Redis, a NATS, a DNS zone, a
folder of one machine. Its records are not trusted. A false one costs its reader one
attempt to connect; keys and certificates prove which process answers there.
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
