"""Findings on whether engines share prompts, or both compute them.

A request on two engines costs only one prefill if prefill sends its KV and decode
fetches it. If an engine lacks the connector, or cannot reach the other one, decode
computes the prompt again, and the answer is the same. The signs are::

    engine is ready       its /metrics: does it have the connector, which kv_role,
    version? prefill has answered  its kv_transfer_params: missing, or from another
    connector? requests have ended   its /metrics: how many prompts moved, and why
    others did not
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvwire.backend import Finding
from kvwire.extras import needed_by
from kvwire.integrations.vllm.announce import BOTH, DECODE, PREFILL
from kvwire.integrations.vllm.metrics import REASONS

with needed_by("the proxy", extra="vllm"):
    from prometheus_client.parser import text_string_to_metric_families

MOVED: Final = "moved"
UNSENT: Final = "unsent"
FOREIGN: Final = "foreign"

# Results of this many prompts are kept; the older half counts half.
_WINDOW: Final = 20
# A finding needs this many prompts, and more than half of the recent ones.
_BAD_MIN: Final = 3

# The lines of /metrics that are read: no creation times, and of all buckets only the
# one for prompts without missing blocks. The cache's line has the size of its blocks.
_WHOLE: Final = "vllm:kvwire_missing_blocks_bucket"
_CACHE: Final = "vllm:cache_config_info"
_LINES: Final = re.compile(
    rf'^(?:{_WHOLE}{{[^\n]*le="0.0"|vllm:kvwire_(?!\w+_(?:bucket|created))|'
    rf"vllm:prompt_tokens_by_source_total|{_CACHE})[^\n]*$",
    re.MULTILINE,
)
# Other connectors, by the prefix of their metrics' names.
_OTHERS: Final = {
    "\nvllm:nixl_": "NixlConnector",
    "\nvllm:mooncake_": "MooncakeConnector",
    "\nvllm:moriio_": "MoRIIOConnector",
}
_STORE: Final = {"\nvllm:kvwire_save_s": "KvwireStoreConnector"}

_REMEDIES: Final = {
    "refused": "the engine's log names the field: the proxy needs the engines' "
    "--psk-file, or engines the others' addresses in `peers`",
    "unreachable": "compare the proxy's KV addresses (--prefill URL=KV) with the "
    "engine's `listen` and `advertise`, and open the port between the hosts",
    "unequal": "decode's log names the field: both engines need the same model, "
    "weights and cache, and releases of kvwire and vLLM that agree on them",
    "untrusted": "give both engines the same psk_file, or certificates of one CA",
    "unpublished": "prefill has restarted, has dropped it after `lease_s`, or did not "
    "compute it within decode's `load_timeout_s`: see its log",
    "missing": "decode's log has the reason for each transfer, such as a lost link",
    UNSENT: "its log has the reason, if it has the connector",
    FOREIGN: "start both engines with KvwireConnector; two engines with another "
    "connector work behind --order in-sequence",
}
_TEXTS: Final = REASONS | {
    UNSENT: "prefill has answered without kv_transfer_params",
    FOREIGN: "prefill's kv_transfer_params are those of another connector",
}
_WITH_CONNECTOR: Final = (
    'start it with --kv-transfer-config \'{"kv_connector": "KvwireConnector", '
    '"kv_role": "%s", ...}\'; beside another connector, below MultiConnector'
)
KV_ROLES: Final = {PREFILL: "kv_producer", DECODE: "kv_consumer", BOTH: "kv_both"}


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The connector's figures in an engine's ``/metrics``."""

    is_vllm: bool = False  # whether it has any of vLLM's metrics
    version: str = ""  # kvwire's release; "" without the connector
    kv_role: str = ""  # the role with which vLLM was started
    others: tuple[str, ...] = ()  # other connectors that have metrics there
    # The same for connectors that only share KV through a store.
    stores: tuple[str, ...] = ()
    sent: int = 0  # how many prompts it has sent
    # The prompts that it wanted since its start, by result.
    results: Mapping[str, int] = field(default_factory=dict)
    external: int = 0  # tokens that it got from another engine or a store
    block_tokens: int = 0  # tokens in a block of its cache; 0 if it does not say


def read_metrics(text: str) -> EngineReading:
    """Read the text of an engine's ``/metrics``."""
    sums: Counter[str] = Counter()
    labels: dict[str, str] = {}
    block_size = ""
    chosen = "\n".join(_LINES.findall(text))
    for family in text_string_to_metric_families(f"{chosen}\n"):
        for name, found, value, *_ in family.samples:
            if name == "vllm:kvwire_info":
                labels = found
            if name == _CACHE:
                block_size = found.get("block_size", "")
            sums[found.get("reason") or found.get("source") or name] += int(value)
    unmoved = {name: sums[name] for name in REASONS if sums[name]}
    return EngineReading(
        is_vllm="\nvllm:" in f"\n{text}",
        version=labels.get("version", ""),
        kv_role=labels.get("kv_role", ""),
        others=_named(_OTHERS, text),
        stores=_named(_STORE, text),
        sent=sums["vllm:kvwire_sent_bytes_count"],
        results=unmoved | {MOVED: sums[_WHOLE]},
        external=sums["external_kv_transfer"],
        block_tokens=int(block_size) if block_size.isdecimal() else 0,
    )


def _named(marks: Mapping[str, str], text: str) -> tuple[str, ...]:
    return tuple(name for mark, name in marks.items() if mark in f"\n{text}")


@dataclass(slots=True)
class SharedPrompts:
    """The results of the prompts that an engine shares with another one."""

    # None until the engine's metrics have been read.
    reading: EngineReading | None = None
    # Recent prompts by result: MOVED, UNSENT, FOREIGN, or one of REASONS.
    recent: Counter[str] = field(default_factory=Counter)
    findings: tuple[Finding, ...] = ()
    read_at: float = float("-inf")  # when it was read, on the fleet's clock
    answered: int = -1  # how many requests the engine had answered then

    def note(self, results: Mapping[str, int]) -> None:
        """Record prompts' results; older results lose weight over time."""
        self.recent.update({name: n for name, n in results.items() if n > 0})
        while self.recent.total() > _WINDOW:
            halves = {name: count // 2 for name, count in self.recent.items()}
            self.recent = Counter({name: n for name, n in halves.items() if n})

    def note_params(self, params: Mapping[str, Any], transfer_id: str) -> bool:
        """Record prefill's answer; return whether kvwire sends the prompt.

        Args:
            params: Its ``kv_transfer_params``.
            transfer_id: The name that the proxy gave to the transfer; "" if none.
        """
        named = params.get("transfer_id")
        right = bool(named) and transfer_id in ("", named)
        self.note({MOVED if right else FOREIGN if params else UNSENT: 1})
        return right

    def take(self, reading: EngineReading) -> None:
        """Record the changes since the last reading."""
        old = self.reading.results if self.reading else {}
        if any(reading.results.get(name, 0) < count for name, count in old.items()):
            old = {}  # the engine was started anew
        new = {name: n - old.get(name, 0) for name, n in reading.results.items()}
        self.reading = reading
        self.note(new)


def judge(shared: SharedPrompts, role: str, *, in_sequence: bool) -> Iterator[Finding]:
    """Yield the findings about an engine's part in sharing prompts.

    Args:
        shared: The numbers that engines have reported.
        role: The role in which the proxy uses it.
        in_sequence: Decode is asked when prefill has answered, which works with other
            connectors too.
    """
    reading = shared.reading
    if reading is not None and not reading.is_vllm:
        yield Finding(
            name="metrics",
            state="warn",
            text="its /metrics has no metrics of vLLM, so lost prompts are not noticed",
            remedy="start it without --disable-log-stats",
        )
    elif reading is not None and not reading.version:
        if in_sequence and (reading.others or reading.external):
            return  # another connector, or a store, handles the prompts
        names = (*reading.others, *reading.stores)
        other = f", but {' and '.join(names)}" if names else ""
        yield Finding(
            name="connector",
            state="missing",
            text=f"it has no KvwireConnector{other}: prompts are computed twice",
            remedy=_WITH_CONNECTOR % KV_ROLES.get(role, "kv_both"),
        )
        return
    elif reading is not None and {role, reading.kv_role} in _WRONG:
        yield Finding(
            name="kv_role",
            state="warn",
            text=_WRONG_ROLE.format(role, reading.kv_role),
            remedy=f"start it with kv_role {KV_ROLES[role]}, or kv_both",
        )
    yield from _lost(shared.recent)


_WRONG_ROLE: Final = (
    "it is used for {}, with kv_role {}: KV moves, but vLLM counts and frees as for "
    "the other role"
)
_WRONG: Final = ({PREFILL, "kv_consumer"}, {DECODE, "kv_producer"})


def _lost(recent: Counter[str]) -> Iterator[Finding]:
    total = recent.total()
    bad = total - recent[MOVED]
    if bad < _BAD_MIN or 2 * bad <= total:
        return
    names = [name for name in _TEXTS if recent[name]]
    # The engine's own reason explains more than its answer does.
    for name in [name for name in names if name != UNSENT] or names:
        yield Finding(
            name="prompts",
            state="missing",
            text=f"{recent[name]} of {total} were computed twice: {_TEXTS[name]}",
            remedy=_REMEDIES[name],
        )
