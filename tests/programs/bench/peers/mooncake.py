"""Mooncake's transfer engine over TCP: all fragments in one batch, or in several.

BENCH_BATCH says how many fragments are in one; without it, all of them are.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
from typing import Any

from mooncake.engine import TransferEngine

from .serving import HOST, Offsets, Peer


class Program(Peer):
    """One engine; the left one reads and writes the right one's memory."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engine = TransferEngine()
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        where = f"{HOST}:{port}"
        if self._engine.initialize(where, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"the engine cannot listen at {where}")
        if self._engine.register_memory(self.base, self.memory.size):
            raise RuntimeError(f"cannot register {self.memory.size} bytes")
        self._remote = ""
        self._remote_base = 0
        self._lists: tuple[list[int], list[int], list[int]] = ([], [], [])

    def listen(self) -> Any:
        return {"where": f"{HOST}:{self._engine.get_rpc_port()}", "base": self.base}

    def connect(self, address: Any) -> dict[str, Any]:
        self._remote, self._remote_base = address["where"], address["base"]
        name = "mooncake-transfer-engine-non-cuda"
        return {"mooncake": importlib.metadata.version(name)}

    def ready(self, theirs: Offsets) -> None:
        """See Peer; the lists it takes are made here, outside of what is timed."""
        ours, there = self.offsets + self.base, theirs + self._remote_base
        lengths = [self.nbytes] * len(self.offsets)
        self._lists = (ours.tolist(), there.tolist(), lengths)

    def move(self) -> None:
        ours, theirs, lengths = self._lists
        engine = self._engine
        push = self.work["verb"] == "push"
        call = (
            engine.batch_transfer_sync_write
            if push
            else engine.batch_transfer_sync_read
        )
        batch = int(os.environ.get("BENCH_BATCH", len(ours)))
        for first in range(0, len(ours), batch):
            part = slice(first, first + batch)
            status = call(self._remote, ours[part], theirs[part], lengths[part])
            if status:
                count = len(ours[part])
                raise RuntimeError(f"a batch of {count} fragments returned {status}")
