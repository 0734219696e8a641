"""An engine's records in a directory, by which a proxy finds it.

Each rank is a member of its own, with :class:`EngineLabels`; a proxy uses an engine
when all of its ranks are listed. In a data-parallel group only the first engine
announces itself, as the server's port belongs to all of them. Changes are published at
most once a second.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvwire import Communicator, Engine
from kvwire.directory.dialable import check_dialable
from kvwire.errors import ClosedOK, UsageError, shown, without_password
from kvwire.kv.paged import PagedCache
from kvwire.limits import NAME_CHARS_MAX
from kvwire.types import Address

PREFILL: Final = "prefill"
DECODE: Final = "decode"
BOTH: Final = "both"
ROLES: Final = (PREFILL, DECODE, BOTH)

_OF_VLLM: Final = {"kv_producer": PREFILL, "kv_consumer": DECODE, "kv_both": BOTH}
_SLOTS_MAX: Final = 1_000_000
# Load and labels are published at most once in this time.
_PAUSE_S: Final = 1.0
# Load is rounded to this many steps, so that small changes need no new record.
_STEPS: Final = 20
# The most ranks of one engine in a directory's records.
_RANKS_MAX: Final = 64


class EngineLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The labels of an engine's record, each within its bounds."""

    http: str  # URL of the engine's HTTP server
    rank: Annotated[int, Meta(ge=0)] = 0  # the number of this rank
    ranks: Annotated[int, Meta(ge=1, le=_RANKS_MAX)] = 1  # the number of ranks
    stages: Annotated[int, Meta(ge=1)] = 1  # their pipeline stages
    # The most requests it can run at once; 0 if unknown.
    slots: Annotated[int, Meta(ge=0, le=_SLOTS_MAX)] = 0
    carrying: str = ""  # the transports that its connections use for KV now


class Announcer:
    """Keeps one rank of an engine announced until it is closed."""

    def __init__(
        self, http: str, role: str, vllm_config: Any, rank: int, model: str
    ) -> None:
        self.running: int = 0  # requests of the last step; set by the caller
        parallel = vllm_config.parallel_config
        stages = getattr(parallel, "pipeline_parallel_size", 1)
        ranks = parallel.tensor_parallel_size * stages
        self._role = role or _OF_VLLM.get(vllm_config.kv_transfer_config.kv_role, BOTH)
        self._model = model
        self._slots: int = vllm_config.scheduler_config.max_num_seqs
        labels = EngineLabels(
            http=http_url(http),
            rank=rank,
            ranks=ranks,
            stages=stages,
            slots=self._slots,
        )
        pairs = msgspec.structs.asdict(labels).items()
        self._labels = {name: str(value) for name, value in pairs if value != ""}
        self._keeping: concurrent.futures.Future[None] | None = None

    def start(self, engine: Engine, address: str, cache: PagedCache) -> None:
        """Begin to announce."""
        self._keeping = engine.start(self._keep(engine.communicator, address, cache))

    def close(self) -> None:
        """Stop announcing changes; closing the engine withdraws the record."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def _keep(
        self, communicator: Communicator, address: str, cache: PagedCache
    ) -> None:
        announced: object = None
        while True:
            load = min(1.0, self.running / max(1, self._slots))
            load = round(load * _STEPS) / _STEPS
            labels = self._labels | {"carrying": _carrying(communicator)}
            if announced != (load, labels):
                announced = load, labels
                try:
                    communicator.announce(
                        role=self._role,
                        model=self._model,
                        cache=cache,
                        labels=labels,
                        load=load,
                        address=address,
                    )
                except ClosedOK:
                    return
            await asyncio.sleep(_PAUSE_S)


def http_url(text: str) -> str:
    """Return a base URL rebuilt from scheme, host and port only."""
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        port = parts.port
    except ValueError as exc:
        raise UsageError(f"http={shown(without_password(text))}: {exc}") from None
    more = (parts.username, parts.password, parts.query, parts.fragment)
    if not host or any(more) or parts.path.strip("/") or parts.scheme not in _PORTS:
        raise UsageError(
            f"http={shown(without_password(text))} is not an http://host:port"
        )
    address = Address("http", host, port or _PORTS[parts.scheme])
    check_dialable(address)
    return f"{parts.scheme}://{str(address).removeprefix('http://')}"


_PORTS: Final = {"http": 80, "https": 443}


def _carrying(communicator: Communicator) -> str:
    """Return the number of connections per transport, as text."""
    live = collections.Counter(one.transport for one in communicator.live_connections)
    return " ".join(f"{name}:{n}" for name, n in sorted(live.items()))[:NAME_CHARS_MAX]
