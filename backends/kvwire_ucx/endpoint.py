"""An endpoint: this worker's way to one peer, in UCX's peer error mode."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Final, final

from kvwire_ucx.bootstrap import UcxBootstrap
from kvwire_ucx.context import printed
from kvwire_ucx.worker import Worker

# "lane[2]:  5:cma/memory.0 md[4] -> ... rma_bw#0", as ucp_ep_print_info says.
_LANE: Final = re.compile(r"lane\[\d+\]:\s+\d+:(\S+?)\.\d+ .*->(.*)")
# What a lane of UCX is for, the one that moves bulk first.
_USES: Final = ("rma_bw", "am", "rma", "tag")

_numbers = itertools.count(1)


@final
class UcxEndpoint:
    """Owns a UCX endpoint, which leads to a peer's worker."""

    def __init__(
        self, worker: Worker, peer: UcxBootstrap, on_failed: Callable[[int], None]
    ) -> None:
        self._worker = worker
        self._on_failed = on_failed
        self._number = next(_numbers)
        self._transports: tuple[str, ...] = ()
        self.failed = False
        self.gone = False
        self.handle = worker.connect(peer.padded_address, self._number, self._fail)

    @property
    def transports(self) -> tuple[str, ...]:
        """Return the transports in use, such as ``cma`` and ``sysv``; bulk first."""
        if self.handle and not self.failed:
            text = printed(self._worker.context.library.ucp.ep_print_info, self.handle)
            self._transports = _transports(text)
        return self._transports

    def close(self, on_gone: Callable[[], None]) -> None:
        """Close it by force: what is under way on it ends."""
        handle, self.handle = self.handle, 0
        if not handle:
            return

        def done(_status: int, _nbytes: int) -> None:
            self.gone = True
            on_gone()

        self._worker.disconnect(handle, self._number, done, force=True)

    def _fail(self, status: int) -> None:
        self.failed = True
        self._on_failed(status)


def _transports(text: str) -> tuple[str, ...]:
    found: list[tuple[int, str]] = []
    for name, uses in _LANE.findall(text):
        ranks = [rank for rank, use in enumerate(_USES) if f" {use}" in uses]
        if ranks:
            found.append((min(ranks), name.removesuffix("/memory")))
    return tuple(dict.fromkeys(name for _, name in sorted(found)))
