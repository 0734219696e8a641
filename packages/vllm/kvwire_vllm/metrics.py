"""A worker's figures about its transfers, for vLLM's log and Prometheus.

After each step vLLM collects a plain dictionary from every worker and merges them. It
passes the result to a logger, and to Prometheus in another process. So the figures are
lists of observations, and everything here is a function on such a dictionary.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvwire import Outcome

Observed = dict[str, list[float]]

# Observations per transfer, by their names in the dictionary.
FIELDS: Final = {
    "sent_bytes": "KV bytes of a prompt that were sent.",
    "received_bytes": "KV bytes of a prompt that were fetched.",
    "wait_s": "Seconds until the other engine was ready for a transfer.",
    "wire_s": "Seconds during which a transfer's payload was on the wire.",
    "missing_blocks": "Blocks of a fetched prompt that did not arrive.",
}
# Reasons why a prompt's KV did not move, by the names of their counts in the
# dictionary. In ``vllm:kvwire_unmoved_prompts`` they are values of the label
# ``reason``.
REASONS: Final = {
    "refused": "the request's kv_transfer_params cannot be used here",
    "unreachable": "there is no connection to the other engine",
    "unequal": "the other engine has another model, weights, blocks or protocol",
    "untrusted": "the other engine has another key, certificate or kind of trust",
    "unpublished": "the other engine has no such prompt, or has it no longer",
    "missing": "blocks of it did not arrive",
}
# Observations of the store connector: per save, or per step for `behind_blocks`.
STORE_FIELDS: Final = {
    "save_s": "Seconds from the step that filled blocks until the store had them.",
    "behind_blocks": "Blocks that are filled but not stored yet.",
    "skipped_blocks": "Blocks of a request that were not saved: the store is slow.",
}
# Buckets double, from one small block, and from the finest time that a loop resolves.
BUCKETS: Final = {
    "bytes": tuple(float(2**power) for power in range(16, 36, 2)),
    "s": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "blocks": (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0),
}


def observe(into: Observed, name: str, value: float) -> None:
    """Record one observation."""
    into.setdefault(name, []).append(float(value))  # collected after each step


def observe_sent(into: Observed, nbytes: Iterable[int]) -> None:
    """Record the bytes of each transfer of a prompt."""
    for one in nbytes:
        observe(into, "sent_bytes", one)


def observe_received(
    into: Observed, outcomes: Sequence[Outcome], missing: int, reason: str = ""
) -> None:
    """Record that a prompt was fetched, or why it was not."""
    observe(into, "missing_blocks", missing)
    if reason:
        observe(into, reason, 1)
    for outcome in outcomes:
        observe(into, "received_bytes", outcome.nbytes)
        observe(into, "wait_s", outcome.timings.queue_s)
        observe(into, "wire_s", outcome.timings.wire_s)


def added(
    first: Mapping[str, list[float]], second: Mapping[str, list[float]]
) -> Observed:
    """Merge the observations of two workers, or of two steps."""
    return {
        name: [*first.get(name, ()), *second.get(name, ())]
        for name in first.keys() | second.keys()
    }


def summary(observed: Mapping[str, list[float]]) -> dict[str, int | float]:
    """Return the figures for one log line."""
    sent = observed.get("sent_bytes", [])
    received = observed.get("received_bytes", [])
    found: dict[str, int | float] = {
        "prompts sent": len(sent),
        "prompts fetched": len(received),
        "MB sent": round(sum(sent) / 1e6, 1),
        "MB fetched": round(sum(received) / 1e6, 1),
        "blocks missing": int(sum(observed.get("missing_blocks", []))),
    }
    for name in ("wait_s", "wire_s"):
        if values := observed.get(name):
            found[f"median {name}"] = round(statistics.median(values), 4)
    unmoved = {f"not moved, {name}": len(observed.get(name, ())) for name in REASONS}
    return found | {name: count for name, count in unmoved.items() if count}


def store_summary(observed: Mapping[str, list[float]]) -> dict[str, int | float]:
    """Return the store connector's figures for one log line."""
    saved = observed.get("save_s", [])
    found: dict[str, int | float] = {
        "saves": len(saved),
        "most blocks behind": int(max(observed.get("behind_blocks", []), default=0)),
        "blocks not saved": int(sum(observed.get("skipped_blocks", []))),
    }
    if saved:
        found["median save_s"] = round(statistics.median(saved), 4)
        found["longest save_s"] = round(max(saved), 4)
    return found


def buckets(name: str) -> tuple[float, ...]:
    """Return the histogram buckets of a field."""
    return BUCKETS[name.rpartition("_")[2]]
