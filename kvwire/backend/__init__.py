"""The contract between kvwire and a transport: links, lanes, and choosing a backend.

A backend imports from here, from ``kvwire.errors``, ``limits``, ``types`` and
``memory``, and from nothing else in kvwire. :mod:`kvwire.backend.link` lists the
promises of a backend, and :mod:`kvwire.backend.lane` those of its lanes.
"""

from kvwire.backend.forks import keep_from_children
from kvwire.backend.landing import Landing
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.backend.link import (
    API_VERSION,
    Availability,
    Backend,
    Capabilities,
    Finding,
    LaneArrived,
    Link,
    LinkHandler,
    Listener,
    TlsCredentials,
    TlsFiles,
)
from kvwire.backend.window import BlockRead, WindowMemory, WindowReader
from kvwire.kv.fragments import Payload

__all__ = [
    "API_VERSION",
    "Availability",
    "Backend",
    "BlockRead",
    "Capabilities",
    "Finding",
    "Landing",
    "Lane",
    "LaneArrived",
    "LaneContext",
    "LaneHandler",
    "Link",
    "LinkHandler",
    "Listener",
    "Payload",
    "TlsCredentials",
    "TlsFiles",
    "WindowMemory",
    "WindowReader",
    "keep_from_children",
]
