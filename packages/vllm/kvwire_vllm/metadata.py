"""The scheduler's messages to the workers in each step, and references to engines.

vLLM carries these objects from its scheduler process to its workers; no peer ever sends
one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

import msgspec
from msgspec import Meta

from kvwire.config import converted
from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Array
from kvwire.types import Address
from kvwire_vllm.tickets import TICKET_CHARS_MAX

# The most ranks of one engine: as many as kvwire allows shards per group.
_REMOTES_MAX: Final = 1024
NO_LIMITS: Final[Mapping[str, int]] = {}

Blocks = dict[str, list[int]]
"""Block ids in token order, by block table; by cache group once a worker has translated
them."""


@dataclass(slots=True, kw_only=True)
class PromptTransfer:
    """A prompt whose KV moves between two engines, described for a worker."""

    _BY_TABLE: ClassVar[tuple[str, ...]] = (
        "listed",
        "blocks",
        "hashes",
        "generations",
    )

    request_id: str  # vLLM's name for the request
    transfer_id: str  # the transfer's name on both engines
    # The number of tokens in each table's whole list of blocks.
    listed: dict[str, int] = field(default_factory=dict)
    # The blocks of each table that are known so far.
    blocks: Blocks = field(default_factory=dict)
    # The hashes of the blocks in each whole list.
    hashes: dict[str, list[bytes]] = field(default_factory=dict)
    # Addresses of the other engine's ranks; empty if decode connects by itself.
    remote: tuple[str, ...] = ()
    stages: int = 1  # its pipeline stages
    content: bytes = b""  # a name of the tokens
    priority: int = 0  # 0 to 255; higher goes first
    traceparent: str = ""  # the client's span in W3C's form; "" without one
    # With a ticket: the generation of each block in prefill's windows.
    generations: dict[str, Array] = field(default_factory=dict)

    def of_groups(self, tables: Mapping[str, str]) -> Self:
        """Return a copy for a worker, by cache group instead of block table."""
        given: dict[str, Any] = {
            name: {group: one[table] for group, table in tables.items() if table in one}
            for name in self._BY_TABLE
            for one in (getattr(self, name),)
        }
        return replace(self, **given)

    @property
    def options(self) -> dict[str, Any]:
        """The options that both ends of the transfer pass."""
        return {
            "tokens": self.listed,
            "hashes": self.hashes or None,
            "content": self.content or None,
            "priority": self.priority,
        }


@dataclass(slots=True, kw_only=True)
class SendPrompt(PromptTransfer):
    """A prompt whose KV is computed here and sent, described for a worker.

    With ``generations``, its blocks are only offered, and decode reads them.
    """

    tokens: int  # the number of the prompt's tokens that are computed here


@dataclass(slots=True, kw_only=True)
class ComputedTokens:
    """The part of a sent prompt that this step computes, described for a worker."""

    request_id: str  # vLLM's name for the request
    blocks: Blocks  # blocks added since the last step
    stop: int  # the number of computed tokens when the step is over


@dataclass(slots=True, kw_only=True)
class LoadPrompt(PromptTransfer):
    """A prompt whose KV comes from another engine, described for a worker."""

    _BY_TABLE: ClassVar[tuple[str, ...]] = (
        *PromptTransfer._BY_TABLE,  # noqa: SLF001
        "cached",
        "there",
    )

    # How many leading blocks of each list are already here.
    cached: dict[str, int] = field(default_factory=dict)
    # Whether nothing is needed any more, so that the other engine may free its blocks.
    declined: bool = False
    computed: bool = False  # the other engine has reported the prompt as computed
    # With a ticket: the other engine's blocks, and the ticket's seals; see `tickets`.
    there: dict[str, Ids] = field(default_factory=dict)
    seals: tuple[bytes, ...] = ()
    sealed: bytes = b""
    # Whether decode reads it by ticket and frees it by a message; otherwise it is
    # pulled.
    ticketed: bool = False
    # Whether missing blocks are first reported to the scheduler's side; see `holes`.
    fillable: bool = False


class BlockCopy(NamedTuple):
    """Blocks of an engine's only table that are to be copied into other blocks."""

    source: list[int]
    into: list[int]


@dataclass(slots=True, kw_only=True)
class WorkerStep:
    """The metadata that the workers need for one step."""

    # Prompts whose sending begins.
    sends: list[SendPrompt] = field(default_factory=list)
    # The parts of sent prompts that this step computes.
    written: list[ComputedTokens] = field(default_factory=list)
    # Prompts whose fetching begins.
    loads: list[LoadPrompt] = field(default_factory=list)
    # By table: blocks that are no longer offered and may be overwritten in this step.
    withdrawn: Blocks = field(default_factory=dict)
    # Blocks to copy within the caches, before this step computes and after it.
    lent: list[BlockCopy] = field(default_factory=list)
    filled: list[BlockCopy] = field(default_factory=list)
    # Prompts that need not wait for holes any more, with the blocks still missing.
    settled: dict[str, list[int]] = field(default_factory=dict)
    # Preempted requests, whose blocks may be overwritten in this step.
    fenced: set[str] = field(default_factory=set)
    idle: bool = False  # the step computes nothing; it only collects arrivals
    running: int = 0  # the number of requests that compute something


_Text = Annotated[str, Meta(max_length=256, pattern=r"^[ -~]*\Z")]


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """A request's ``kv_transfer_params``, with the fields that this engine uses."""

    # Its KV goes to another engine.
    sends: bool = msgspec.field(default=False, name="do_remote_decode")
    # Its KV comes from another engine.
    loads: bool = msgspec.field(default=False, name="do_remote_prefill")
    # True if prefill has answered, so the prompt is published. Otherwise prefill may be
    # busy with other prompts, and only the proxy knows whether it is alive.
    computed: bool = False
    transfer_id: _Text = ""  # the transfer's name on both engines; "" if none was given
    # Addresses of the other engine's ranks, in rank order, stage by stage.
    remote: Annotated[tuple[_Text, ...], Meta(max_length=_REMOTES_MAX)] = ()
    stages: Annotated[int, Meta(ge=1)] = 1  # pipeline stages of that engine
    signature: _Text = ""  # signature over the reference; "" without one
    # A ticket grants the right to read the computed blocks; "" if they are pulled.
    ticket: Annotated[str, Meta(max_length=TICKET_CHARS_MAX)] = ""

    @classmethod
    def read(cls, params: Mapping[str, Any] | None) -> TransferParams:
        """Parse the parameters that a client, usually a proxy, sent with a request."""
        # A field that is null or empty counts as missing.
        given = {name: value for name, value in (params or {}).items() if value}
        if isinstance(given.get("remote"), str):
            given["remote"] = given["remote"].split(",")
        try:
            made = converted(given, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as exc:
            raise UsageError(f"kv_transfer_params: {exc}") from None
        if made.stages > max(1, len(made.remote)):
            raise UsageError(
                "kv_transfer_params: stages must be the number of pipeline stages of "
                f"the {len(made.remote)} addresses in remote"
            )
        remote = tuple(map(_written_out, made.remote))
        return msgspec.structs.replace(made, remote=remote)

    def check(self) -> None:
        """Refuse parameters that are incomplete."""
        if self.loads and not self.transfer_id:
            raise UsageError("kv_transfer_params: do_remote_prefill needs transfer_id")
        if self.loads and not self.remote:
            raise UsageError(
                "kv_transfer_params: remote is missing; it lists the addresses of "
                "the other engine's ranks"
            )


@functools.lru_cache
def _written_out(address: str) -> str:
    """Return an address in canonical form; cached, since the same ones recur."""
    return str(Address.parse(address))


class ScheduledRequest(NamedTuple):
    """One request's part in a step of vLLM's scheduler."""

    id: str  # vLLM's name for the request
    new: bool  # it is new in this step, so `tables` has all its blocks
    tables: Any  # its new blocks, by vLLM's block tables; None if there are none
    computed: int  # tokens computed before the step
    stop: int  # tokens computed after it


def scheduled_requests(
    output: Any, known: Collection[str], due: Mapping[str, int] = NO_LIMITS
) -> Iterator[ScheduledRequest]:
    """Yield the parts of a ``SchedulerOutput`` that concern known requests.

    A step has hundreds of other requests, which must not be visited one by one.

    Args:
        output: The step.
        known: The requests.
        due: For each of them that may be left out: the number of tokens from which on
            it matters. Any that gets blocks matters.
    """
    if not known:
        return
    counts = output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    rows = [
        (one.req_id, True, one.block_ids, one.num_computed_tokens)
        for one in output.scheduled_new_reqs
        if one.req_id in known
    ]
    later = zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    )
    rows += [
        (name, False, tables, computed)
        for name, tables, computed in later
        if name in known
        and (tables is not None or computed + counts.get(name, 0) >= due.get(name, 0))
    ]
    for name, new, tables, computed in rows:
        count = counts.get(name, 0)
        yield ScheduledRequest(name, new, tables, computed, computed + count)


def answer(
    transfer_id: str,
    remote: tuple[str, ...],
    stages: int = 1,
    *,
    computed: bool = True,
    ticket: str = "",
    limits: Mapping[str, int] = NO_LIMITS,
) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` by which decode finds prefill's KV.

    `limits` are this engine's own limits of an answer's tokens.
    """
    more: dict[str, Any] = {"stages": stages} if stages > 1 else {}
    if ticket:
        more["ticket"] = ticket
    more |= limits
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "computed": computed,
        "transfer_id": transfer_id,
        "remote": list(remote),
        **more,
    }
