"""A worker's side: an engine of kvwire, and the prompts that it sends and receives.

In every step, with every version of vLLM, the calls come in this order: ``fence``
before anything is written, ``begin_step``, the forward pass with ``layer_written``
after each layer, ``start_loads`` before or after the pass, ``step_written``,
``finished``. In a step without a forward pass the calls for layers are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final

import numpy as np

from kvwire import Communicator, Engine, Window
from kvwire.config import Config
from kvwire.directory.dialable import warn_of_unknown_name
from kvwire.errors import BackendUnavailable
from kvwire.kv.spec import KVSpec
from kvwire.types import Address
from kvwire_vllm.announce import Announcer
from kvwire_vllm.caches import CacheShape, LayerCaches, layer_caches
from kvwire_vllm.config import LAYER, VllmSettings
from kvwire_vllm.device import CacheDevice
from kvwire_vllm.holes import Reports
from kvwire_vllm.metadata import (
    BlockCopy,
    ComputedTokens,
    LoadPrompt,
    SendPrompt,
    WorkerStep,
)
from kvwire_vllm.metrics import (
    Observed,
    observe_received,
    observe_sent,
)
from kvwire_vllm.offering import PromptOffer, PromptOffers
from kvwire_vllm.peers import Peers
from kvwire_vllm.receiving import Patience, PromptReceive
from kvwire_vllm.sending import (
    NOTHING_WRITTEN,
    ForwardPass,
    PromptBlocks,
    PromptSend,
)
from kvwire_vllm.tickets import WINDOW
from kvwire_vllm.topology import OwnRank, rank_route

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# While vLLM only waits for KV it runs a step per millisecond, and each step takes the
# interpreter lock from the thread that moves KV. So a step waits, which delays a new
# request by at most this time.
IDLE_WAIT_S: Final = 0.01


class WorkerSide:
    """The connector's part in a worker's process."""

    def __init__(
        self,
        settings: VllmSettings,
        config: Config,
        shapes: Sequence[CacheShape],
        announcer: Announcer | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._settings = settings
        self._patience = patience or Patience(settings.load_timeout_s)
        self._announcer = announcer
        self._shapes = tuple(shapes)
        self._rank = shapes[0].index
        # Each cache group's block table; the scheduler's side identifies groups by
        # table.
        self._tables = {shape.name: str(shape.table) for shape in shapes}
        self.engine = Engine(config)
        self._peers = Peers()
        self.address: str = settings.advertised(
            self.engine.listen(settings.address(self._rank)), self._rank
        )
        if settings.advertise:
            address = Address.parse(self.address)
            self.engine.start(warn_of_unknown_name(address))
        # Set when vLLM registers its caches.
        self._caches: LayerCaches
        self._tensors: list[Any] = []  # one per layer, indexed by block
        self._specs: dict[str, KVSpec] = {}  # by cache group
        self._own: OwnRank
        self._device = CacheDevice(self.engine, None)
        # The window through which decode reads computed prompts; b"" and None without
        # one.
        self.serial: bytes = b""
        self._window: Window | None = None
        self._offers = PromptOffers(config.lease_s)
        self.departures: dict[str, PromptSend | PromptOffer] = {}
        self._arrivals: dict[str, PromptReceive] = {}
        # Requests that the scheduler considers finished but that have not drained yet.
        self._leaving: set[str] = set()
        # Prompts that other ranks send.
        self._unsent: set[str] = set()
        self._errors: set[int] = set()
        # Requests that lack blocks, for engines with several block tables.
        self._failed: set[str] = set()
        # Prompts that arrived with holes and are not settled yet; and reports of
        # arrivals that the scheduler has not got yet.
        self._landed: set[str] = set()
        self._reports: Reports = {}
        self._workers = shapes[0].ranks * shapes[0].stage[1]
        # Requests whose blocks were reported as permanently lost.
        self._quarantined: set[str] = set()
        self._observed: Observed = {}
        self._step = WorkerStep()
        self._forward_pass = NOTHING_WRITTEN

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Register the caches of this worker."""
        caches = layer_caches(tensors, self._shapes)
        self._device = CacheDevice(self.engine, caches.cache.device)
        self._caches = caches
        if not any(shape.state for shape in self._shapes):
            self._tensors = [tensors[name] for name in caches.layers]
        if caches.cache.device is None and not self._settings.codec:
            self._window = self.engine.expose(WINDOW, self._caches.cache)
            self.serial = self._window.serial
            self.engine.start(self._offers.serve(self.engine.communicator))
        groups = caches.cache.groups.items()
        self._specs = {name: group.spec for name, group in groups}
        # The spec with the most heads, and the stage, determine which ranks exchange
        # KV.
        widest = max(self._specs.values(), key=lambda spec: spec.total_kv_heads)
        self._own = OwnRank(widest, self._shapes[0].stage)
        logger.info("rank %d: %r in %s", self._rank, caches.cache, self._device)
        if self._announcer is not None:
            self._announcer.start(self.engine, self.address, caches.cache)

    def trace(self, provider: Any = None) -> None:
        """Trace transfers, each as a child of its request's span.

        Args:
            provider: OpenTelemetry's provider; None for the provider that vLLM has set.
        """
        from kvwire.observe.opentelemetry import (  # noqa: PLC0415 - an extra
            TransferTracer,
        )

        async def begin() -> None:
            TransferTracer(self.engine.communicator, provider)

        self.engine.run(begin())

    def fence(self, step: WorkerStep) -> None:
        """Wait until no link can touch the blocks that a step may overwrite.

        Blocks that are still being fetched are not waited for: they are kept until they
        are reported. A link that does not release its blocks in time is dropped; its
        other transfers resume on another link.
        """
        if step.withdrawn and self._window is not None:
            tables = self._tables.items()
            self._window.withdraw({name: step.withdrawn[one] for name, one in tables})
        for request_id in step.fenced:
            self._unsent.discard(request_id)
            departure = self.departures.pop(request_id, None)
            if departure and departure.abort("the request was preempted"):
                self._drain(request_id, departure)

    def begin_step(self, step: WorkerStep) -> None:
        """Begin a step: its metadata is known, and its KV is computed next."""
        self._step = step
        if self._announcer is not None:
            self._announcer.running = step.running
        for send in step.sends:
            self._send(send)
        parts = [
            self._extend(departure, one)
            for one in step.written
            if isinstance(departure := self.departures.get(one.request_id), PromptSend)
        ]
        self._forward_pass = NOTHING_WRITTEN
        if parts:
            self._forward_pass = ForwardPass(
                parts, self._specs, self._settings.group_bytes, self._device.recorded
            )

    def start_loads(self) -> None:
        """Begin this step's fetches, without waiting.

        If the step computes a hole, it is called before the forward pass.
        """
        if self._step.lent:
            self._copy(self._step.lent)
            self._step.lent = []
        loads = self._step.loads
        self._step.loads = []
        # Kernels of requests that used these blocks before may still be queued.
        after = self._device.recorded() if loads else None
        for load in loads:
            self._load(load, after)

    def layer_written(self, name: str) -> None:
        """Mark a layer that the pass has written or queued."""
        writing = self._forward_pass
        if writing.over or self._settings.stream != LAYER:
            return
        layer = self._caches.layers.get(name)
        if layer is not None:
            writing.layer(*layer)

    def step_written(self) -> None:
        """Mark the remaining layers after the forward pass."""
        if not self._forward_pass.over:
            self._forward_pass.rest()
        if self._step.filled:
            self._copy(self._step.filled)
            self._step.filled = []

    def finished(self, over: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks have drained, and the fetched requests."""
        unsent = self._unsent.intersection(over)
        self._unsent -= unsent
        for request_id in over:
            self._end(request_id)
        if self._step.idle and not unsent:
            self._wait_idle()
        if self._device.failed:
            self._log_quarantined()
        self._offers.end_leases()
        sent = {r for r in self._leaving if self.departures[r].done.done()}
        for request_id in sent:
            self._leaving.discard(request_id)
            departure = self.departures.pop(request_id)
            observe_sent(self._observed, departure.done.result())
        received = self._received() if self._arrivals else set()
        if self._landed:
            received |= self._settled(over)
        return sent | unsent, received

    def take_errors(self) -> set[int]:
        """Return the blocks that did not arrive, each once."""
        errors = self._errors
        self._errors = set()
        return errors

    def take_failed(self) -> set[str]:
        """Return the requests that lack blocks of several tables, each once."""
        failed = self._failed
        self._failed = set()
        return failed

    def take_reports(self) -> Reports:
        """Return the reports of prompts that arrived, each once."""
        reports = self._reports
        self._reports = {}
        return reports

    def take_observed(self) -> Observed:
        """Return the observations for metrics since the last call."""
        observed = self._observed
        self._observed = {}
        return observed

    def close(self) -> None:
        """End every transfer, and withdraw this rank's announcement."""
        if self._announcer is not None:
            self._announcer.close()
        for end in self._ends().values():
            if self._device.failed and end.quarantined:
                end.done.cancel()  # otherwise it would never complete
        self.engine.close()

    # --- sending ----------------------------------------------------------------------

    def _send(self, send: SendPrompt) -> None:
        route = rank_route(send, self._own)
        if not route.peers:
            # Other ranks send the same heads, so this one has nothing to do.
            self._unsent.add(send.request_id)
            return
        moved = send.of_groups(self._tables)
        if moved.generations:
            # Offered before they are computed: nobody has the ticket until the step is
            # over.
            assert self._window is not None
            drawn = [moved.generations[name] for name in self._caches.cache.groups]
            self._window.offer(moved.blocks, np.concatenate(drawn))
            self.departures[send.request_id] = self._offers.add(
                send.transfer_id, len(route.peers)
            )
            return
        self.departures[send.request_id] = PromptSend(
            self.engine,
            moved,
            self._caches.cache,
            route,
            self._settings.codec,
        )

    def _extend(self, departure: PromptSend, written: ComputedTokens) -> PromptBlocks:
        """Send a prompt's new blocks; return the blocks that this step completes."""
        if new := written.blocks:
            tables = self._tables.items()
            departure.extend({name: new[one] for name, one in tables if one in new})
        last = written.stop >= departure.tokens
        if not last:
            departure.renew()
        parts: dict[str, range] = {}
        for shape in self._shapes:
            needed = shape.needed(departure.tokens)
            whole = needed.stop if last else written.stop // shape.block_tokens
            start = departure.written.get(shape.name, 0)
            stop = max(start, whole - needed.start)
            departure.written[shape.name] = stop
            parts[shape.name] = range(start, stop)
        return PromptBlocks(departure, parts, last)

    # --- fetching ---------------------------------------------------------------------

    def _load(self, load: LoadPrompt, after: object | None) -> None:
        route = rank_route(load, self._own)
        arrival = PromptReceive(
            self.engine,
            load.of_groups(self._tables),
            self._caches.cache,
            self._peers,
            route,
            self._patience,
            after,
            self._settings.codec,
        )
        if not load.declined:
            self._arrivals[load.request_id] = arrival

    def _received(self) -> set[str]:
        received = {r for r, arrival in self._arrivals.items() if arrival.done.done()}
        for request_id in received:
            self._note_missing(request_id, self._arrivals.pop(request_id))
        return received - self._landed

    def _settled(self, over: Iterable[str]) -> set[str]:
        """Return the prompts that no longer wait for holes."""
        settled = self._landed.intersection(self._step.settled)
        for request_id in settled:
            self._errors.update(self._step.settled[request_id])
        settled |= self._landed.intersection(over)
        self._landed -= settled
        return settled

    def _copy(self, copies: Iterable[BlockCopy]) -> None:
        for source, into in copies:
            for tensor in self._tensors:
                tensor[into] = tensor[source]

    def _note_missing(self, request_id: str, arrival: PromptReceive) -> None:
        arrived = arrival.done.result()
        missing = sum(ids.size for ids in arrived.missing.values())
        observe_received(self._observed, arrived.outcomes, missing, arrived.reason)
        lost = set[int]().union(*(ids.tolist() for ids in arrived.missing.values()))
        if arrival.load.fillable and not arrival.reason:
            if lost:
                self._landed.add(request_id)
            # The scheduler waits for the reports of all workers.
            if lost or self._workers > 1:
                self._reports[request_id] = 1, sorted(lost)
        # With several block tables, vLLM cannot tell in which table a block has failed.
        elif lost and len(set(self._tables.values())) > 1:
            self._failed.add(request_id)
        else:
            self._errors |= lost

    def _wait_idle(self) -> None:
        """Release the interpreter lock for a short time, or until a transfer ends."""
        waiting: list[Future[Any]] = [a.done for a in self._arrivals.values()]
        waiting += [self.departures[request_id].done for request_id in self._leaving]
        if waiting:
            wait(waiting, IDLE_WAIT_S, return_when=FIRST_COMPLETED)

    # --- ending -----------------------------------------------------------------------

    def _end(self, request_id: str) -> None:
        departure = self.departures.get(request_id)
        if departure is not None:
            self._leaving.add(request_id)
            if not departure.finished:
                departure.abort("the request ended before its prompt was computed")
        arrival = self._arrivals.get(request_id)
        if arrival is not None:
            arrival.abort("the request ended before its prompt was here")

    def _drain(self, request_id: str, end: PromptSend | PromptOffer) -> None:
        """Wait until nothing can touch the blocks of an aborted prompt."""
        dropped = False
        over = [end.done]
        while not wait(over, self._settings.fence_s).done:
            if end.quarantined and self._device.failed:
                raise BackendUnavailable(
                    f"{self._device} has failed ({self._device.failed}) while it "
                    f"copied blocks of request {request_id}: the blocks stay in "
                    f"quarantine, but vLLM wants to use them now; restart the engine"
                )
            if not dropped:
                logger.warning(
                    "dropping all links: one of them does not release its blocks"
                )
                self.engine.run(_drop_links(self.engine.communicator))
                dropped = True

    def _log_quarantined(self) -> None:
        for request_id, end in self._ends().items():
            if end.quarantined and request_id not in self._quarantined:
                # bounded by the requests whose blocks are lost
                self._quarantined.add(request_id)
                logger.error(
                    "%s has failed (%s): blocks of request %s stay in quarantine and "
                    "are never returned to vLLM; restart the engine",
                    self._device,
                    self._device.failed,
                    request_id,
                )

    def _ends(self) -> dict[str, PromptSend | PromptOffer | PromptReceive]:
        """Return all transfers by request."""
        return {**self.departures, **self._arrivals}


async def _drop_links(communicator: Communicator) -> None:
    for connection in communicator.live_connections:
        connection.abort("blocks of a preempted request must be free")
