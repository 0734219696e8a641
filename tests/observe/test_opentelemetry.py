"""What a trace shows of KV transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

import kvwire
from kvwire.observe.opentelemetry import TransferTracer
from tests.support.caches import Memory
from tests.support.pairs import connected
from tests.support.traces import Traces


def said(span: ReadableSpan) -> Mapping[str, object]:
    assert span.attributes is not None
    return span.attributes


Below = Callable[[str], AbstractContextManager[object]]


async def transferred(traces: Traces, below: Below) -> kvwire.Outcome:
    """Publish below one span, and pull below another."""
    async with connected("inproc") as pair:
        with (
            TransferTracer(pair.near, traces.provider),
            TransferTracer(pair.far, traces.provider),
        ):
            with below("answerer"):
                out = pair.far.publish("request-7", Memory().cache, [0, 1])
            out.ready()
            out.finish()
            with below("asker"):
                inc = pair.left.pull("request-7", Memory().cache, [2, 3])
            await out
            return await inc


async def test_both_ends_of_a_transfer() -> None:
    traces = Traces()
    outcome = await transferred(traces, contextlib.nullcontext)
    spans = traces.spans()
    send, receive = spans["kvwire send"], spans["kvwire receive"]
    assert (send.kind, receive.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    for span, name, peer in ((send, "far", "near"), (receive, "near", "far")):
        known = said(span)
        assert known["kvwire.transfer.id"] == "request-7"
        assert known["kvwire.communicator"] == name
        assert known["kvwire.peers"] == (peer,)
        assert known["kvwire.transports"] == ("inproc",)
        assert known["kvwire.outcome"] == "complete"
        assert known["kvwire.blocks"] == known["kvwire.landed_blocks"] == 2
        assert known["kvwire.bytes"] == outcome.nbytes
        assert known["kvwire.layers_grouped"] == outcome.layers_grouped
        assert span.status.status_code is StatusCode.UNSET
    assert said(receive)["kvwire.wire_s"] == outcome.timings.wire_s


async def test_the_context_of_another_thread_comes_along() -> None:
    traces = Traces()
    with kvwire.Engine() as engine:

        async def traced() -> TransferTracer:
            return TransferTracer(engine.communicator, traces.provider)

        engine.run(traced())
        with traces.provider.get_tracer("server").start_as_current_span("r") as request:
            out = engine.publish(b"\x00\xff", Memory().cache, [0])
        out.abort("not wanted")
        out.wait(10)
    span = traces.spans()["kvwire send"]
    assert said(span)["kvwire.transfer.id"] == "00ff"
    assert span.parent is not None
    assert span.parent.span_id == request.get_span_context().span_id


async def test_why_blocks_are_missing() -> None:
    traces = Traces()
    async with connected("inproc") as pair:
        with TransferTracer(pair.far, traces.provider):
            out = pair.far.publish(9, Memory().cache, [0])
            out.abort("evicted")
            await out
    span = traces.spans()["kvwire send"]
    assert said(span)["kvwire.outcome"] == "failed"
    assert said(span)["kvwire.peers"] == ()
    assert span.status.status_code is StatusCode.ERROR
    assert "evicted" in (span.status.description or "")


async def test_what_is_under_way_when_it_is_closed() -> None:
    traces = Traces()
    async with connected("inproc") as pair:
        before = pair.far.publish("before", Memory().cache, [0])
        tracer = TransferTracer(pair.far, traces.provider)
        out = pair.far.publish("x", Memory().cache, [0])
        before.abort()
        await before
        tracer.close()
        out.abort()
        await out
        tracer.close()
    (span,) = traces.spans().values()
    assert said(span)["kvwire.transfer.id"] == "x"
    assert span.status.description == "tracing ended before the transfer"


@pytest.mark.parametrize("where", ["neither", "asker", "answerer", "both"])
async def test_both_ends_are_one_trace(where: str) -> None:
    """Wherever a span is current: the other end goes on with it."""
    traces = Traces()
    tracer = traces.provider.get_tracer("server")
    none = contextlib.nullcontext()

    def below(side: str) -> AbstractContextManager[object]:
        return tracer.start_as_current_span(side) if where in (side, "both") else none

    await transferred(traces, below)
    spans = traces.spans()
    send, receive = spans["kvwire send"], spans["kvwire receive"]
    assert send.context is not None
    assert receive.context is not None
    same = send.context.trace_id == receive.context.trace_id
    assert same == (where != "both")
    # Where the one that answers is in a trace already, the other's comes too late.
    assert len(send.links) == (where in ("answerer", "both"))
    assert len(receive.links) == (where == "both")
    for span, side in ((send, "answerer"), (receive, "asker")):
        if side in spans:
            above = spans[side].context
            assert above is not None
            assert span.parent is not None
            assert span.parent.span_id == above.span_id
