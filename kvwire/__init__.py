"""kvwire: awaitable transport for LLM KV cache.

``kvwire.open`` gives a :class:`Communicator`; ``connect`` and ``listen`` give
connections; a :class:`Connection` has ``send``, ``recv``, ``put`` and ``get``. See
docs/index.md.
"""

from kvwire.communicator import Communicator, open  # noqa: A004 - the public name
from kvwire.config import Config
from kvwire.connection import Connection
from kvwire.engine import Engine
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
from kvwire.incoming import Incoming
from kvwire.join import Joined, join
from kvwire.kv.outcome import Outcome, Timings
from kvwire.kv.paged import PagedCache
from kvwire.kv.pool import BlockPool
from kvwire.kv.prefill_plan import PrefillPlan, PrefillRequest, plan_prefill
from kvwire.kv.spec import KVSpec
from kvwire.outgoing import Outgoing
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
    "BlockPool",
    "Candidate",
    "ClosedOK",
    "Communicator",
    "Config",
    "Connection",
    "ConnectionClosed",
    "ConnectionLost",
    "DeadlineExceeded",
    "Engine",
    "FlowControlViolation",
    "FrameTooLarge",
    "Grant",
    "HandshakeError",
    "HandshakeTimeout",
    "Incoming",
    "IntegrityError",
    "Joined",
    "KVSpec",
    "KVWireError",
    "MalformedFrame",
    "MessageTooLarge",
    "Outcome",
    "Outgoing",
    "PagedCache",
    "PeerCancelled",
    "PeerError",
    "PeerInfo",
    "PeerUnresponsive",
    "PrefillPlan",
    "PrefillRequest",
    "ProfileMismatch",
    "ProtocolError",
    "Region",
    "Request",
    "RequestCancelled",
    "RequestError",
    "StaleRegion",
    "Timings",
    "TransportReport",
    "UnexpectedFrame",
    "UsageError",
    "VersionMismatch",
    "__version__",
    "join",
    "open",
    "plan_prefill",
]
