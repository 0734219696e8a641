"""An engine says in a directory that it is there, so that a proxy finds it.

Each rank is a member of its own, with the labels below: a proxy takes an engine when
all of its ranks are there. Only the first engine of a data-parallel group does it, as
the server's port is that of all of them. What changes is said at most once a second.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
from typing import Any, Final
from urllib.parse import urlsplit

from kvwire import Communicator, Engine
from kvwire.errors import ClosedOK, UsageError, shown
from kvwire.kv.paged import PagedCache
from kvwire.limits import NAME_CHARS_MAX
from kvwire.types import Address

HTTP: Final = "http"
RANK: Final = "rank"
RANKS: Final = "ranks"
STAGES: Final = "stages"
SLOTS: Final = "slots"
CARRYING: Final = "carrying"
KV_EVENTS: Final = "kv_events"
"""Labels: where the engine serves, which rank of how many this is, how many pipeline
stages they are, how many requests it computes at once, and by which transports its
connections carry KV now, and where it says which blocks its cache has."""

PREFILL: Final = "prefill"
DECODE: Final = "decode"
BOTH: Final = "both"
ROLES: Final = (PREFILL, DECODE, BOTH)

_OF_VLLM: Final = {"kv_producer": PREFILL, "kv_consumer": DECODE, "kv_both": BOTH}
# Load and labels are said anew so often at most.
_PAUSE_S: Final = 1.0
# Less of a change in load is not worth a record.
_STEPS: Final = 20


class Announcer:
    """Announces one rank of an engine until it is closed."""

    def __init__(
        self, http: str, role: str, vllm_config: Any, rank: int, model: str
    ) -> None:
        self.running: int = 0  # requests of the last step; set by whoever runs steps
        parallel = vllm_config.parallel_config
        stages = getattr(parallel, "pipeline_parallel_size", 1)
        ranks = parallel.tensor_parallel_size * stages
        said = vllm_config.kv_transfer_config.kv_role
        self._role = role or _OF_VLLM.get(said, BOTH)
        self._model = model
        self._slots: int = vllm_config.scheduler_config.max_num_seqs
        self._labels = {
            HTTP: http_url(http),
            RANK: str(rank),
            RANKS: str(ranks),
            STAGES: str(stages),
            SLOTS: str(self._slots),
        }
        if events := _events(vllm_config, self._labels[HTTP]):
            self._labels[KV_EVENTS] = events
        self._keeping: concurrent.futures.Future[None] | None = None

    def start(self, engine: Engine, address: str, cache: PagedCache) -> None:
        """Begin to announce."""
        if Address.parse(address).host in ("0.0.0.0", "::"):  # noqa: S104 - not bound
            raise UsageError(
                f"kv_connector_extra_config: {HTTP} announces this engine, and nobody "
                f'can dial {address}: set "advertise" to the host that others dial'
            )
        self._keeping = engine.start(lambda one: self._keep(one, address, cache))

    def close(self) -> None:
        """Say nothing new; the engine takes the record back when it is closed."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def _keep(
        self, communicator: Communicator, address: str, cache: PagedCache
    ) -> None:
        said: object = None
        while True:
            load = min(1.0, self.running / max(1, self._slots))
            load = round(load * _STEPS) / _STEPS
            labels = self._labels | {CARRYING: _carrying(communicator)}
            if said != (load, labels):
                said = load, labels
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
    """Return a base URL, made of its parts: nothing else of it is used."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as exc:
        raise UsageError(f"{HTTP}={shown(text)}: {exc}") from None
    more = (parts.username, parts.password, parts.query, parts.fragment)
    if not host or any(more) or parts.path.strip("/") or parts.scheme not in _PORTS:
        raise UsageError(f"{HTTP}={shown(text)} is no http://host:port")
    where = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{where}:{port or _PORTS[parts.scheme]}"


_PORTS: Final = {"http": 80, "https": 443}


def _events(vllm_config: Any, url: str) -> str:
    """Return where vLLM publishes its blocks, as others reach it; "" if it does not."""
    said = getattr(vllm_config, "kv_events_config", None)
    if said is None or not said.enable_kv_cache_events or said.publisher != "zmq":
        return ""
    where, _, port = str(said.endpoint).rpartition(":")
    # Where it names a host it connects to that, and nobody can listen here.
    if where not in ("tcp://*", "tcp://[::]"):
        return ""
    return f"tcp://{url.partition('://')[2].rpartition(':')[0]}:{port}"


def _carrying(communicator: Communicator) -> str:
    """Return how many connections each transport carries."""
    live = collections.Counter(one.transport for one in communicator.live_connections)
    return " ".join(f"{name}:{n}" for name, n in sorted(live.items()))[:NAME_CHARS_MAX]
