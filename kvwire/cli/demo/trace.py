"""The run as a trace: Chrome's event format, which https://ui.perfetto.dev opens.

Compute is drawn as slices on one track for each process. Transfers of neighbouring
layers overlap, so they are asynchronous events, with a track for each request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvwire.cli.demo.lines import LayerSpan
from kvwire.cli.demo.record import RequestTimes

PREFILL, DECODE = 1, 2


def trace(records: Sequence[RequestTimes]) -> dict[str, Any]:
    """All events; times in microseconds from the beginning of the first prefill."""
    zero = min(record.began for record in records)
    events = [
        _named("process_name", PREFILL, "prefill process"),
        _named("process_name", DECODE, "decode process"),
        _named("thread_name", PREFILL, "compute"),
        _named("thread_name", DECODE, "compute"),
    ]
    for record in records:
        events += _events(record, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(record: RequestTimes, zero: float) -> Iterator[dict[str, Any]]:
    name = record.request
    for span in record.spans:
        yield _slice(PREFILL, f"{name} layer {span.layer}", "prefill", span, zero)
    for bar in record.bars():
        if bar.kind == "transfer":
            label = record.rows[bar.row]
            yield from _transfer(name, label, bar.start - zero, bar.stop - zero)
    for span in record.recomputed:
        yield _slice(DECODE, f"{name} layer {span.layer}", "recompute", span, zero)
    for index, token in enumerate(record.tokens):
        whole = LayerSpan(0, 1, token.start, token.stop)
        yield _slice(DECODE, f"{name} token {index}", "decode", whole, zero)


def _slice(
    process: int, name: str, category: str, span: LayerSpan, zero: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": 1,
        "ts": (span.start - zero) * 1e6,
        "dur": (span.stop - span.start) * 1e6,
        "args": {"tokens": span.tokens},
    }


def _transfer(
    request: str, label: str, start: float, stop: float
) -> Iterator[dict[str, Any]]:
    for phase, at in (("b", start), ("e", stop)):
        yield {
            "ph": phase,
            "name": label,
            "cat": f"KV of {request}",
            "id": f"{request}/{label}",
            "pid": DECODE,
            "tid": 1,
            "ts": at * 1e6,
        }


def _named(what: str, process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": 1, "args": {"name": name}}
