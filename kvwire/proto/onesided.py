"""put and get: the requesting side, and the side that has granted memory.

The owner of the memory takes part in both, and checks the grant before a byte is read
or written. The bytes are payload like any other; some lanes read them in place. A put
begins without an answer, since the grant is the permission and the memory exists: its
chunks follow PUT at once, and are dropped if PUT is refused. It ends with the owner's
FIN. A get ends when its bytes have landed.
"""

from __future__ import annotations

from kvwire.errors import (
    AccessDenied,
    RequestError,
    StaleRegion,
    UnexpectedFrame,
    WireCode,
)
from kvwire.proto.chunks import ChunkMover
from kvwire.proto.events import Outbox
from kvwire.proto.records import RequestRecord
from kvwire.proto.regions import Grants
from kvwire.proto.requests import SERVING, RequestTable
from kvwire.proto.state import RequestInput, RequestKind, RequestStage
from kvwire.types import Access, RegionId
from kvwire.wire.control import AccessBody, Fin
from kvwire.wire.header import FrameType, Header


class OneSided:
    """Runs the puts and gets of both sides on one connection."""

    def __init__(
        self, outbox: Outbox, requests: RequestTable, chunks: ChunkMover, grants: Grants
    ) -> None:
        self._outbox = outbox
        self._requests = requests
        self._chunks = chunks
        self._grants = grants

    def put(self, request: RequestRecord, target: AccessBody) -> None:
        """Send PUT, and queue the request's bytes after it."""
        self._requests.start(request)
        self._put(request, target)

    def get(self, request: RequestRecord, source: AccessBody) -> None:
        """Send GET; the peer's bytes land in the request's memory."""
        self._requests.start(request)
        self._get(request, source)

    def ask(self, request: RequestRecord, where: AccessBody) -> None:
        """Send PUT or GET for a request that was started before its memory was free."""
        self._requests.number(request)
        if request.kind is RequestKind.PUT:
            self._put(request, where)
        else:
            self._get(request, where)

    def asked(self, header: Header, body: AccessBody) -> None:
        """Handle PUT and GET: the peer writes or reads this side's memory."""
        wire_id = self._requests.admit(header.request)
        put = header.type == FrameType.PUT
        if not body.nbytes:
            raise UnexpectedFrame("KVW-OS-01", "a put or get of 0 bytes")
        try:
            row = self._grants.check(
                grant=body.grant,
                generation=body.generation,
                token=body.token,
                offset=body.offset,
                nbytes=body.nbytes,
                access=Access.WRITE if put else Access.READ,
            )
        except (AccessDenied, StaleRegion) as exc:
            self._requests.send_fail(wire_id, exc.code, str(exc))
            return
        request = RequestRecord(
            kind=RequestKind.SERVE_PUT if put else RequestKind.SERVE_GET,
            wire_id=wire_id,
            buffer=row.region.buffer,
            base=row.offset + body.offset,
            nbytes=body.nbytes,
            region=row.region.id,
            state=RequestStage.MOVING,
        )
        self._requests.serve(request)
        if put:
            self._chunks.begin_receive(request)
        else:
            self._chunks.begin_send(request)

    def done_received(self, header: Header, body: Fin) -> None:
        """Handle FIN: the peer has every byte of our put."""
        request = self._requests.find(header.request)
        if request is None:
            return
        whole = request.moved == request.nbytes == body.nbytes
        if request.kind is not RequestKind.PUT or not whole or request.confirmed:
            raise UnexpectedFrame(
                "KVW-OS-02",
                f"FIN for {body.nbytes} bytes of a {request.kind.value}; "
                f"{request.moved} of {request.nbytes} were sent",
            )
        if request.state is RequestStage.MOVING:
            # Our link has not reported yet that it has finished with the memory.
            request.confirmed = True
            return
        request.advance(RequestInput.CONFIRMED)
        self._requests.finish(request)

    def region_revoked(self, region: RegionId) -> None:
        """Fail the peer's requests on a region, so that its memory drains."""
        for request in self._requests:
            if request.kind in SERVING and request.region == region:
                error: RequestError = StaleRegion("the region was closed or revoked")
                self._requests.fail(request, error, code=WireCode.STALE)

    def _put(self, request: RequestRecord, target: AccessBody) -> None:
        self._outbox.send(FrameType.PUT, target, request=request.wire_id)
        self._chunks.begin_send(request)

    def _get(self, request: RequestRecord, source: AccessBody) -> None:
        self._outbox.send(FrameType.GET, source, request=request.wire_id)
        self._chunks.begin_receive(request)
