"""kvwire: awaitable transport for LLM KV cache.

``kvwire.open`` returns a :class:`Communicator`. Its ``connect`` and ``listen`` make
connections, and a :class:`Connection` has ``send``, ``recv``, ``put`` and ``get``. See
docs/index.md.

Public names, and NumPy, are imported on first use. So programs that need little of
kvwire start fast, such as the command's help, or a pytest run in which the plugin is
merely installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import (
    AccessDenied,
    AuthenticationFailed,
    BackendUnavailable,
    ClosedOK,
    ConnectError,
    ConnectionClosed,
    ConnectionLost,
    DeadlineExceeded,
    HandshakeError,
    HandshakeTimeout,
    IntegrityError,
    KVWireError,
    ListenError,
    MessageTooLarge,
    NotAwaited,
    PeerCancelled,
    PeerError,
    PeerUnresponsive,
    ProfileMismatch,
    ProtocolError,
    RequestCancelled,
    RequestError,
    StaleRegion,
    UsageError,
    VersionMismatch,
)
from kvwire.errors import with_remedy as _with_remedy
from kvwire.types import (
    Access,
    Address,
    Grant,
    Instant,
    PeerInfo,
    TransportReport,
)

if TYPE_CHECKING:
    from kvwire.config import Config
    from kvwire.endpoint.communicator import (
        Communicator,
        open,  # noqa: A004 - the public name
    )
    from kvwire.endpoint.connection import Connection
    from kvwire.endpoint.engine import Engine
    from kvwire.endpoint.engine_ends import (
        EngineIncoming,
        EngineOutgoing,
    )
    from kvwire.endpoint.peer import Peer
    from kvwire.endpoint.region import Region
    from kvwire.endpoint.remote_window import RemoteWindow
    from kvwire.endpoint.request import Request
    from kvwire.endpoint.snapshot import (
        Snapshot,
    )
    from kvwire.endpoint.windows.window import Window
    from kvwire.kv.outcome import Outcome, Timings
    from kvwire.kv.paged import PagedCache
    from kvwire.kv.pool import BlockPool
    from kvwire.kv.prefill_plan import PrefillPlan, PrefillRequest, plan_prefill
    from kvwire.kv.spec import KVSpec
    from kvwire.transfers.incoming import Incoming, Joined, join
    from kvwire.transfers.outgoing import Outgoing

__version__ = "0.1.0"

__all__ = [
    "Access",
    "AccessDenied",
    "Address",
    "AuthenticationFailed",
    "BackendUnavailable",
    "BlockPool",
    "ClosedOK",
    "Communicator",
    "Config",
    "ConnectError",
    "Connection",
    "ConnectionClosed",
    "ConnectionLost",
    "DeadlineExceeded",
    "Engine",
    "EngineIncoming",
    "EngineOutgoing",
    "Grant",
    "HandshakeError",
    "HandshakeTimeout",
    "Incoming",
    "Instant",
    "IntegrityError",
    "Joined",
    "KVSpec",
    "KVWireError",
    "ListenError",
    "MessageTooLarge",
    "NotAwaited",
    "Outcome",
    "Outgoing",
    "PagedCache",
    "Peer",
    "PeerCancelled",
    "PeerError",
    "PeerInfo",
    "PeerUnresponsive",
    "PrefillPlan",
    "PrefillRequest",
    "ProfileMismatch",
    "ProtocolError",
    "Region",
    "RemoteWindow",
    "Request",
    "RequestCancelled",
    "RequestError",
    "Snapshot",
    "StaleRegion",
    "Timings",
    "TransportReport",
    "UsageError",
    "VersionMismatch",
    "Window",
    "__version__",
    "join",
    "open",
    "plan_prefill",
]

# The homes of the names that `import kvwire` does not load.
_HOMES: Final = {
    "Communicator": "kvwire.endpoint.communicator",
    "open": "kvwire.endpoint.communicator",
    "Config": "kvwire.config",
    "Connection": "kvwire.endpoint.connection",
    "Snapshot": "kvwire.endpoint.snapshot",
    "Engine": "kvwire.endpoint.engine",
    "EngineIncoming": "kvwire.endpoint.engine_ends",
    "EngineOutgoing": "kvwire.endpoint.engine_ends",
    "Incoming": "kvwire.transfers.incoming",
    "Joined": "kvwire.transfers.incoming",
    "join": "kvwire.transfers.incoming",
    "Outcome": "kvwire.kv.outcome",
    "Timings": "kvwire.kv.outcome",
    "PagedCache": "kvwire.kv.paged",
    "BlockPool": "kvwire.kv.pool",
    "PrefillPlan": "kvwire.kv.prefill_plan",
    "PrefillRequest": "kvwire.kv.prefill_plan",
    "plan_prefill": "kvwire.kv.prefill_plan",
    "KVSpec": "kvwire.kv.spec",
    "Outgoing": "kvwire.transfers.outgoing",
    "Peer": "kvwire.endpoint.peer",
    "Region": "kvwire.endpoint.region",
    "RemoteWindow": "kvwire.endpoint.remote_window",
    "Request": "kvwire.endpoint.request",
    "Window": "kvwire.endpoint.windows.window",
}


if not TYPE_CHECKING:  # a type checker would believe that every name exists

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'kvwire' has no attribute {name!r}")
        try:
            found = getattr(importlib.import_module(_HOMES[name]), name)
        except OSError as exc:  # a file of the package cannot be opened
            raise UsageError(f"kvwire.{name}: {_with_remedy(exc)}") from exc
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return __all__
