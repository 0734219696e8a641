"""Gloo of torch: send and receive.

It takes whole tensors only. Small fragments are gathered into one and scattered on
arrival, some at a time, which is many times faster than a call for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from .serving import HOST, Peer

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

# Above it a tensor for each fragment was faster, below it gathering.
_GATHER_BELOW_BYTES: Final = 256 * 1024
_GATHERED_BYTES: Final = 4 * 1024 * 1024
_TIMEOUT: Final = timedelta(seconds=60)
_LEFT: Final = 0
_RIGHT: Final = 1


class Program(Peer):
    """One of two ranks."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._store: dist.TCPStore | None = None
        self._signal = torch.zeros(1, dtype=torch.uint8)

    def listen(self) -> dict[str, Any]:
        """See Peer."""
        self._store = dist.TCPStore(
            HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT
        )
        return {"address": self._store.port}

    def accept(self) -> dict[str, Any]:
        """See Peer."""
        self._join(_RIGHT)
        return {}

    def connect(self, address: Any) -> dict[str, Any]:
        """See Peer."""
        self._store = dist.TCPStore(HOST, address, is_master=False, timeout=_TIMEOUT)
        self._join(_LEFT)
        return {"torch": torch.__version__}

    def move(self) -> None:
        """See Peer; a pull begins with the right side being told."""
        if self.work["verb"] == "push":
            self._send(_RIGHT)
            dist.recv(self._signal, _RIGHT)
        else:
            dist.send(self._signal, _RIGHT)
            self._receive(_RIGHT)

    def serve(self) -> dict[str, Any]:
        """See Peer."""
        if self.work["verb"] == "push":
            self._receive(_LEFT)
            dist.send(self._signal, _LEFT)
        else:
            dist.recv(self._signal, _LEFT)
            self._send(_LEFT)
        return {}

    def _join(self, rank: int) -> None:
        dist.init_process_group(
            "gloo", store=self._store, rank=rank, world_size=2, timeout=_TIMEOUT
        )

    def _send(self, rank: int) -> None:
        fragments = self.fragments()
        if self.work["nbytes"] >= _GATHER_BELOW_BYTES:
            tensors = torch.from_numpy(fragments)
            _wait([dist.isend(tensors[row], rank) for row in self.rows])
            return
        for rows, staging in self._parts():
            np.take(fragments, rows, axis=0, out=staging)
            dist.send(torch.from_numpy(staging), rank)

    def _receive(self, rank: int) -> None:
        fragments = self.fragments()
        if self.work["nbytes"] >= _GATHER_BELOW_BYTES:
            tensors = torch.from_numpy(fragments)
            _wait([dist.irecv(tensors[row], rank) for row in self.rows])
            return
        for rows, staging in self._parts():
            dist.recv(torch.from_numpy(staging), rank)
            fragments[rows] = staging

    def _parts(self) -> Iterator[tuple[Rows, Bytes]]:
        nbytes, rows = self.work["nbytes"], self.rows
        at_once = _GATHERED_BYTES // nbytes
        staging = np.empty((at_once, nbytes), np.uint8)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            yield some, staging[: len(some)]


def _wait(pending: list[Any]) -> None:
    for request in pending:
        request.wait()
