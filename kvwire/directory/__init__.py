"""Directories, in which members announce themselves and find each other.

A directory is an address book that people run already: a Redis, a NATS, a DNS zone, a
folder of one machine. What it says is not believed. A record costs its reader one
attempt to connect, and who answers there is a matter of keys and certificates.
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
