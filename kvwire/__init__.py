"""kvwire: awaitable transport for LLM KV cache.

``kvwire.open`` gives a :class:`Communicator`; ``connect`` and ``listen`` give
connections; a :class:`Connection` has ``send``, ``recv``, ``put`` and ``get``. See
docs/index.md.
"""

from kvwire.communicator import Communicator, open  # noqa: A004 - the public name
from kvwire.config import Config
from kvwire.connection import Connection
from kvwire.errors import (
    AccessDenied,
    AuthenticationFailed,
    BackendUnavailable,
    ClosedOK,
    ConnectionClosed,
    ConnectionLost,
    DeadlineExceeded,
    FlowControlViolation,
    FrameTooLarge,
    HandshakeError,
    HandshakeTimeout,
    IntegrityError,
    KVWireError,
    MalformedFrame,
    MessageTooLarge,
    PeerCancelled,
    PeerError,
    PeerUnresponsive,
    ProfileMismatch,
    ProtocolError,
    RequestCancelled,
    RequestError,
    StaleRegion,
    UnexpectedFrame,
    UsageError,
    VersionMismatch,
)
from kvwire.grant import Grant
from kvwire.region import Region
from kvwire.request import Request
from kvwire.types import Access, Address, Candidate, PeerInfo, TransportReport

__version__ = "0.1.0"

__all__ = [
    "Access",
    "AccessDenied",
    "Address",
    "AuthenticationFailed",
    "BackendUnavailable",
    "Candidate",
    "ClosedOK",
    "Communicator",
    "Config",
    "Connection",
    "ConnectionClosed",
    "ConnectionLost",
    "DeadlineExceeded",
    "FlowControlViolation",
    "FrameTooLarge",
    "Grant",
    "HandshakeError",
    "HandshakeTimeout",
    "IntegrityError",
    "KVWireError",
    "MalformedFrame",
    "MessageTooLarge",
    "PeerCancelled",
    "PeerError",
    "PeerInfo",
    "PeerUnresponsive",
    "ProfileMismatch",
    "ProtocolError",
    "Region",
    "Request",
    "RequestCancelled",
    "RequestError",
    "StaleRegion",
    "TransportReport",
    "UnexpectedFrame",
    "UsageError",
    "VersionMismatch",
    "__version__",
    "open",
]
