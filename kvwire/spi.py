"""The names that packages on kvwire use besides its public ones.

A package of this repository imports public names of kvwire, the rooms of plug-ins
(``kvwire.kv``, ``memory``, ``backend``, ``directory``, ``security``, ``observe`` and
the small ones below them), and these.

========================  ============================================================
``show_part``             adds an object to snapshots, and so to ``kvwire top``, as a
                          ``PartSnapshot`` with a ``CallSnapshot`` for each call
``RINGS``                 the loops whose events ``kvwire trace`` shows
``memory_here``           the memory of a window of plain bytes, if it is mapped here
``each_message``          calls a function with each message, in the callback
``send_now``              sends a small message, if it need not wait
``when_released``         calls back once a request's memory is free
``common_version``        chooses a version of a protocol; ``version_mismatch`` refuses
``key_id``                names a pre-shared key without revealing it
``DECODE_ERRORS``         the errors of bytes that are not a message
``copy_engine``           the queue on which a communicator copies to and from a device
``certificate_of``        the validity of a communicator's certificate
========================  ============================================================
"""

from kvwire.driver.trace_ring import RINGS
from kvwire.endpoint.communicator import certificate_of, copy_engine
from kvwire.endpoint.connection import send_now
from kvwire.endpoint.message_sink import each_message
from kvwire.endpoint.remote_window import memory_here
from kvwire.endpoint.request import when_released
from kvwire.endpoint.snapshot import CallSnapshot, PartSnapshot, show_part
from kvwire.wire.control import DECODE_ERRORS
from kvwire.wire.handshake_messages import (
    VersionRange,
    common_version,
    key_id,
    version_mismatch,
)

__all__ = [
    "DECODE_ERRORS",
    "RINGS",
    "CallSnapshot",
    "PartSnapshot",
    "VersionRange",
    "certificate_of",
    "common_version",
    "copy_engine",
    "each_message",
    "key_id",
    "memory_here",
    "send_now",
    "show_part",
    "version_mismatch",
    "when_released",
]
