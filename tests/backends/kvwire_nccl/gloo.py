"""gloo in NCCL's place: host memory, sockets, no GPU. For tests and for trying out.

A process group of two is built for each direction, without the global one of
``torch.distributed``, by way of a store that the client serves on loopback.
"""

from __future__ import annotations

import queue
import secrets
import threading
from datetime import timedelta
from typing import Any

from kvwire.backend import Payload
from kvwire.errors import BackendUnavailable
from kvwire.extras import install_command
from kvwire.memory.copy import copy
from kvwire.types import MemoryKind
from kvwire_nccl.library import (
    CollectiveLibrary,
    Move,
    MoveFailed,
    MoveProgress,
    Pipe,
)

_HOST = "127.0.0.1"


class Gloo(CollectiveLibrary):
    """See Library."""

    kinds = frozenset({MemoryKind.HOST})

    def __init__(self) -> None:
        try:
            import torch
            from torch import distributed
        except ImportError:
            raise BackendUnavailable(
                f"communicator gloo: torch is not installed; {install_command('torch')}"
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

    def open(self, name: bytes, sends: bool) -> Pipe:
        port, _, prefix = name.decode("ascii", "replace").partition("/")
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            raise BackendUnavailable("the peer's name of a direction is none of gloo's")
        return GlooPipe(self, int(port), prefix, sends=sends)

    def close(self) -> None:
        self._store = None


class GlooPipe(Pipe):
    """See OneWay.

    gloo knows that a movement is done only once somebody has waited for it, so a thread
    does that, one movement after the other.
    """

    def __init__(self, gloo: Gloo, port: int, prefix: str, *, sends: bool) -> None:
        self._gloo = gloo
        self._port = port
        self._prefix = prefix
        self._sends = sends
        self._group: Any = None
        self._waited: queue.SimpleQueue[GlooMove | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(
            target=self._wait, name="kvwire gloo", daemon=True
        )

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
        self._waiter.start()

    def is_up(self) -> bool:
        return self._group is not None

    def move(self, payload: Payload | None, nbytes: int) -> Move:
        packed = memoryview(bytearray(nbytes))
        if self._sends and payload is not None:
            copy(payload, packed)
        tensor = self._gloo.torch.frombuffer(packed, dtype=self._gloo.torch.uint8)
        if self._sends:
            work = self._group.send([tensor], 1, 0)
        else:
            work = self._group.recv([tensor], 0, 0)
        move = GlooMove(work, packed, None if self._sends else payload)
        self._waited.put(move)
        return move

    def check(self) -> None:
        """See OneWay: gloo's movements report all errors themselves."""

    def abort(self) -> None:
        """See OneWay.

        Nothing ends a movement of gloo but the peer's end or its timeout, so this is
        as late as that; what is under way is in quarantine meanwhile.
        """
        if self._group is None:
            return
        self._waited.put(None)
        self._waiter.join()
        self._group.abort()
        self._group = None

    def _wait(self) -> None:
        timeout = timedelta(seconds=self._gloo.move_timeout_s)
        while (move := self._waited.get()) is not None:
            try:
                move.work.wait(timeout)
            except RuntimeError as exc:
                move.error = str(exc)
            move.over.set()


class GlooMove(Move):
    """See Move."""

    def __init__(self, work: Any, packed: memoryview, into: Payload | None) -> None:
        self.work = work
        self.over = threading.Event()
        self.error = ""
        self._packed = packed
        self._into = into

    def progress(self) -> MoveProgress:
        if not self.over.is_set():
            return MoveProgress.LAUNCHED
        if self.error:
            raise MoveFailed(f"gloo: {self.error}")
        if self._into is not None:
            # Here, in the direction's own thread: after an abort it is not touched.
            copy(self._packed, self._into)
            self._into = None
        return MoveProgress.DONE
