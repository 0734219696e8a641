"""gloo in NCCL's place: host memory, sockets, no GPU. For tests and for trying out.

A process group of two is built for each direction, without the global one of
``torch.distributed``, by way of a store that the client serves on loopback.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from kvwire.backend import Payload
from kvwire.errors import BackendUnavailable
from kvwire.memory.copy import copy
from kvwire.types import MemoryKind
from kvwire_nccl.library import Library
from kvwire_nccl.one_way import Move, MoveFailed, OneWay, Progress

_HOST = "127.0.0.1"


class Gloo(Library):
    """See Library.

    Raises:
        BackendUnavailable: There is no torch, or it was built without gloo.
    """

    kinds = frozenset({MemoryKind.HOST})

    def __init__(self) -> None:
        try:
            import torch  # noqa: PLC0415 - optional, and heavy
            from torch import distributed  # noqa: PLC0415
        except ImportError:
            raise BackendUnavailable(
                "communicator gloo: torch is not installed; pip install 'kvwire[torch]'"
            ) from None
        if not distributed.is_gloo_available():
            raise BackendUnavailable("communicator gloo: this torch has no gloo")
        self.version = f"gloo of torch {torch.__version__}"
        self.torch: Any = torch
        self._store: Any = None

    def name(self) -> bytes:
        """See Library: where the store is, and a prefix in it."""
        if self._store is None:
            self._store = self.torch.distributed.TCPStore(
                _HOST, 0, is_master=True, wait_for_workers=False
            )
        return f"{self._store.port}/{secrets.token_hex(8)}".encode()

    def open(self, name: bytes, sends: bool) -> OneWay:
        """See Library."""
        port, _, prefix = name.decode("ascii", "replace").partition("/")
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            raise BackendUnavailable("the peer's name of a direction is none of gloo's")
        return GlooOneWay(self, int(port), prefix, sends=sends)


class GlooOneWay(OneWay):
    """See OneWay."""

    kinds = Gloo.kinds

    def __init__(self, gloo: Gloo, port: int, prefix: str, *, sends: bool) -> None:
        self._gloo = gloo
        self._port = port
        self._prefix = prefix
        self._sends = sends
        self._group: Any = None

    def begin(self) -> None:
        """See OneWay; here this waits for the peer, at most the start's timeout."""
        distributed = self._gloo.torch.distributed
        timeout = timedelta(seconds=self._gloo.start_timeout_s)
        store = distributed.TCPStore(
            _HOST, self._port, is_master=False, timeout=timeout
        )
        self._group = distributed.ProcessGroupGloo(
            distributed.PrefixStore(self._prefix, store),
            0 if self._sends else 1,
            2,
            timeout,
        )

    def is_up(self) -> bool:
        """See OneWay."""
        return self._group is not None

    def move(self, payload: Payload | None, nbytes: int) -> Move:
        """See OneWay."""
        packed = memoryview(bytearray(nbytes))
        if self._sends and payload is not None:
            copy(payload, packed)
        tensor = self._gloo.torch.frombuffer(packed, dtype=self._gloo.torch.uint8)
        if self._sends:
            return GlooMove(self._group.send([tensor], 1, 0), packed, None)
        return GlooMove(self._group.recv([tensor], 0, 0), packed, payload)

    def check(self) -> None:
        """See OneWay: gloo's movements report all errors themselves."""

    def abort(self) -> None:
        """See OneWay."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class GlooMove(Move):
    """See Move."""

    def __init__(self, work: Any, packed: memoryview, into: Payload | None) -> None:
        self._work = work
        self._packed = packed
        self._into = into
        self._done = False

    def progress(self) -> Progress:
        """See Move."""
        if self._done:
            return Progress.DONE
        if not self._work.is_completed():
            return Progress.LAUNCHED
        error = self._work.exception()
        if error is not None:
            raise MoveFailed(f"gloo: {error}")
        if self._into is not None:
            copy(self._packed, self._into)
        self._done = True
        return Progress.DONE
