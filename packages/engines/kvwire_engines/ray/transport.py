"""The tensor transport that Ray calls, on top of a :class:`TensorExchange`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from dataclasses import dataclass
from typing import Any, Final

import kvwire
from kvwire.extras import needed_by
from kvwire_engines.ray.address import listen_address
from kvwire_engines.ray.exchange import Bytes, TensorExchange

with needed_by("kvwire_engines.ray", extra="ray", distribution="kvwire-engines"):
    import ray
    import torch
    from ray.exceptions import RayDirectTransportError
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.tensor_transport_manager import (
        CommunicatorMetadata,
        FetchRequest,
        TensorTransportManager,
        TensorTransportMetadata,
    )
    from ray.experimental.rdt.util import get_tensor_transport_manager

NAME: Final = "KVWIRE"


def register() -> None:
    """Register the transport with Ray; call it before this process makes actors.

    Repeated calls are harmless.
    """
    with contextlib.suppress(ValueError):  # already registered
        register_tensor_transport(
            NAME, ["cpu", "cuda"], KvwireTensorTransport, torch.Tensor
        )


@dataclass
class KvwireTensors(TensorTransportMetadata):
    """The metadata by which Ray finds an object's tensors."""

    # The address of the offering exchange; empty if there are no tensors.
    address: str = ""


class KvwireFetch(FetchRequest):
    """An object that is being fetched."""

    def __init__(
        self,
        obj_id: str,
        tensors: list[torch.Tensor],
        landing: list[torch.Tensor],
        fetched: concurrent.futures.Future[None] | None,
    ) -> None:
        super().__init__(obj_id, tensors)
        self.landing: list[torch.Tensor] = landing
        self.fetched: concurrent.futures.Future[None] | None = fetched


class KvwireTensorTransport(TensorTransportManager):
    """Moves tensors from actor to actor through kvwire.

    Ray calls this one-sided: the actor that needs an object reads it, and no task runs
    at its owner. A fetch can be aborted, so Ray need not kill an actor. Once Ray has
    been notified that an object is freed, nothing reads its memory any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchange: TensorExchange | None = None

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return whether an actor can open its exchange, by running a task on it."""

        def has_exchange(self: object) -> bool:
            register()  # for an asyncio actor, Ray's own call may come later
            return bool(get_tensor_transport_manager(NAME).exchange().address)

        call = actor.__ray_call__.options(concurrency_group="_ray_system")
        return bool(ray.get(call.remote(has_exchange)))

    def exchange(self) -> TensorExchange:
        """Return this process's exchange, opened at its first use."""
        with self._lock:
            if self._exchange is None:
                self._exchange = TensorExchange(listen_address(), name=_name())
            return self._exchange

    # --- the actor that owns an object ------------------------------------------------

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[torch.Tensor]
    ) -> KvwireTensors:
        """Offer an object's tensors; GPU tensors as a copy in host memory."""
        kinds = {one.device.type for one in rdt_object}
        if len(kinds) > 1:
            found = " and ".join(sorted(kinds))
            raise ValueError(
                f"the object's tensors are on {found}: put all tensors of an object "
                "on one device"
            )
        if not rdt_object:
            return KvwireTensors(tensor_meta=[])
        exchange = self.exchange()
        exchange.offer(obj_id, [_bytes_of(one.detach().cpu()) for one in rdt_object])
        return KvwireTensors(
            tensor_meta=[(one.shape, one.dtype) for one in rdt_object],
            tensor_device=kinds.pop(),
            address=exchange.address,
        )

    def send_multiple_tensors(
        self,
        tensors: list[torch.Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Raise NotImplementedError: Ray never calls it for a one-sided transport."""
        raise NotImplementedError("kvwire never sends: the receiver reads the tensors")

    def garbage_collect(
        self,
        obj_id: str,
        tensor_transport_meta: TensorTransportMetadata,
        tensors: list[torch.Tensor],
    ) -> None:
        """Wait until nothing reads the tensors any more."""
        if tensors:
            self.exchange().withdraw(obj_id)

    # --- the actor that fetches it ----------------------------------------------------

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Return empty metadata: the two sides need no agreement."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        return self.wait_fetch_complete(
            self.fetch_multiple_tensors(
                obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
            )
        )

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> KvwireFetch:
        """Start fetching an object, into its target buffers if it has any."""
        meta = tensor_transport_metadata
        assert isinstance(meta, KvwireTensors)
        if not meta.tensor_meta:
            return KvwireFetch(obj_id, [], [], None)
        tensors = target_buffers or [
            torch.empty(shape, dtype=dtype, device=meta.tensor_device)
            for shape, dtype in meta.tensor_meta
        ]
        landing = [
            one
            if one.device.type == "cpu"
            else torch.empty_like(one, device="cpu", pin_memory=True)
            for one in tensors
        ]
        into = [_bytes_of(one.detach()) for one in landing]
        fetched = self.exchange().fetch(meta.address, obj_id, into)
        return KvwireFetch(obj_id, tensors, landing, fetched)

    def wait_fetch_complete(
        self, fetch_request: FetchRequest, timeout: float = -1
    ) -> list[torch.Tensor]:
        """Wait for an object; on timeout, abort its fetch and free its memory."""
        fetch = fetch_request
        assert isinstance(fetch, KvwireFetch)
        tensors: list[torch.Tensor] = fetch.tensors
        if fetch.fetched is None:
            return tensors
        done, _ = concurrent.futures.wait(
            [fetch.fetched], None if timeout < 0 else timeout
        )
        if not done:
            self.exchange().abort(fetch.obj_id)
            concurrent.futures.wait([fetch.fetched])
            raise TimeoutError(
                f"object {fetch.obj_id} did not arrive within {timeout:g} s"
            )
        try:
            fetch.fetched.result()
        except (kvwire.KVWireError, concurrent.futures.CancelledError) as exc:
            raise RayDirectTransportError(
                f"object {fetch.obj_id} could not be fetched through kvwire: {exc!r}"
            ) from exc
        for tensor, landed in zip(tensors, fetch.landing, strict=True):
            if tensor is not landed:
                tensor.copy_(landed)
        return tensors

    def abort_transport(
        self, obj_id: str, communicator_metadata: CommunicatorMetadata
    ) -> None:
        """Abort all fetches of an object."""
        self.exchange().abort(obj_id)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a tensor, or of a contiguous copy."""
    flat = tensor.contiguous().reshape(-1)
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def _name() -> str:
    return f"ray-{ray.get_runtime_context().get_actor_id() or 'driver'}"
