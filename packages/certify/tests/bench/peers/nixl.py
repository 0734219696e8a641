"""NIXL over UCX: descriptor lists prepared once, a transfer of their indices each time.

That is how vLLM's connector uses it. Which transports UCX takes is said by UCX_TLS.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from nixl_cu12._api import nixl_agent, nixl_agent_config

from .serving import Offsets, Peer

_OPERATIONS: Final = {"push": "WRITE", "pull": "READ", "get": "READ"}


class Program(Peer):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config())
        self._agent.register_memory([(self.base, self.memory.size, 0, "")], "DRAM")
        self._remote = ""
        self._remote_base = 0
        self._lists: tuple[Any, ...] = ()

    def listen(self) -> Any:
        metadata = self._agent.get_agent_metadata().hex()
        return {"metadata": metadata, "base": self.base}

    def connect(self, address: Any) -> dict[str, Any]:
        metadata = bytes.fromhex(address["metadata"])
        self._remote = self._agent.add_remote_agent(metadata)
        self._remote_base = address["base"]
        return {
            "nixl": importlib.metadata.version("nixl-cu12"),
            "UCX_TLS": os.environ.get("UCX_TLS", ""),
        }

    def ready(self, theirs: Offsets) -> None:
        for old in self._lists[:2]:
            self._agent.release_dlist_handle(old)
        places = ((self.offsets, self.base, ""), (theirs, self._remote_base, "remote"))
        prepared = [
            self._agent.prep_xfer_dlist(
                self._remote if whose else "NIXL_INIT_AGENT",
                _descriptors(offsets + base, self.nbytes),
                "DRAM",
            )
            for offsets, base, whose in places
        ]
        self._lists = (*prepared, np.arange(len(self.offsets), dtype=np.int32))

    def move(self) -> None:
        ours, theirs, every = self._lists
        operation = _OPERATIONS[self.work["verb"]]
        agent = self._agent
        handle = agent.make_prepped_xfer(operation, ours, every, theirs, every)
        state = agent.transfer(handle)
        # NIXL has no way to wait.
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the {operation} ended in state {state!r}")


def _descriptors(
    addresses: npt.NDArray[np.int64], nbytes: int
) -> npt.NDArray[np.uint64]:
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = nbytes
    return rows
