"""Plans the local prefill of blocks that are missing after transfers.

After waiting for KV, a decode engine must decide for each request: start decoding, or
compute a part of the prompt here? The answer depends on blocks, not on requests,
because requests share blocks: the common prefix of two prompts is in the same blocks,
and only one of the two transfers carried it.

Theory ------ Each block has a number of *valid* tokens: all of its tokens if it landed;
the cached tokens if no transfer listed it; none if any transfer reports it missing. If
a block landed in one transfer and is missing in another, it counts as lost: computing
it again is always correct, and reading it might not be.

The *usable prefix* of a request is its tokens up to the first invalid one. A token's KV
depends on every token before it, so an engine prefills from the end of the prefix. A
group whose list has fewer tokens than the request is a *window*, which holds only the
last tokens. If a window has a gap, shorter prefixes cannot be used either, since their
windows are not in the list; the prefix is empty.

*Holes.* KV behind a hole is still correct: its producer computed it from the complete
prompt. To fill a hole, an engine needs only the KV before it. So an engine that can
compute tokens in the middle of a prompt fills the holes in order, and keeps the KV
behind them. This does not work with a window: its list lacks the blocks that filling a
hole would need.

Blocks are shared as prefixes: two requests that share a block share every block before
it. So two requests that share a lost block have the same usable prefix, and neither can
decode before the block is recomputed. The first of these requests, in the caller's
order, *owns* the recomputation. The others wait for the owner, and prefill from the end
of the shared part. This applies to each group. A window is computed from the first
token on, so a request with a window waits for another one only if the two share the
window as well; it cannot recompute a block that another request computes or reads.

vLLM PR #12285 has the same goal; vLLM #49250 shows the failure without owners.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from kvwire.errors import UsageError, wrong_type
from kvwire.kv.blocks import (
    DEFAULT_GROUP,
    Bits,
    Blocks,
    Ids,
    among,
    block_lists,
    distinct,
)
from kvwire.kv.outcome import Outcome
from kvwire.types import whole

Id = TypeVar("Id", bound=Hashable)


class TokenRange(NamedTuple):
    """A range of a request's tokens: from ``start`` to before ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest(Generic[Id]):
    """A request whose KV should have arrived by transfer.

    Attributes:
        id: The caller's name for the request.
        num_tokens: The number of tokens that need KV before decoding.
        blocks: The blocks that hold them, in token order; for a cache with groups,
            {group: ids}.
        block_tokens: Tokens per block, for all groups or as {group: tokens}.
        cached_tokens: The number of leading tokens that were valid before the
            transfers.
    """

    id: Id
    num_tokens: int
    blocks: Blocks
    block_tokens: int | Mapping[str, int]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan(Generic[Id]):
    """The requests that can decode, must prefill, or wait for another request.

    Attributes:
        ready: Requests that go straight to decode.
        prefill: For each other request the token ranges to compute, ascending; empty if
            other requests compute all its missing tokens.
        waits: For each request that has to wait before it computes its own ranges, the
            owner that it waits for. An owner may have to wait too; the chain has no
            cycle.
    """

    ready: tuple[Id, ...] = ()
    prefill: Mapping[Id, tuple[TokenRange, ...]] = field(default_factory=dict)
    waits: Mapping[Id, Id] = field(default_factory=dict)


def plan_prefill(
    requests: Iterable[PrefillRequest[Id]],
    outcomes: Mapping[Id, Outcome] | Iterable[Outcome],
    *,
    holes: bool = False,
) -> PrefillPlan[Id]:
    """Decide the token ranges that each request prefills, and their order.

    Args:
        requests: The requests, most urgent first: if several share a lost block, the
            first computes it.
        outcomes: The outcomes of their transfers, by request id or in any order; blocks
            are looked up by (group, block id). A request whose blocks were in no
            transfer has its cached tokens only.
        holes: Whether to compute only the lost tokens and keep the KV behind them; the
            engine must support this. By default each range ends at the request's last
            token.

    Raises:
        UsageError: A request's blocks do not hold its tokens, an id occurs twice, or
            requests share lost blocks that are not a common prefix.
    """
    known = [_Request.read(request) for request in requests]
    ids = [request.id for request in known]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise UsageError(f"plan_prefill: request {twice!r} appears twice")
    ends = list(outcomes.values() if isinstance(outcomes, Mapping) else outcomes)
    for end in ends:
        if not isinstance(end, Outcome):
            raise wrong_type("plan_prefill: outcomes", end, "an Outcome")
    blocks = _Blocks(known, ends)
    usable = [blocks.usable_tokens(request) for request in known]
    done = [u >= r.num_tokens for u, r in zip(usable, known, strict=True)]
    for request, ready in zip(known, done, strict=True):
        if ready:
            blocks.read(request)
    prefill: dict[Id, tuple[TokenRange, ...]] = {}
    waits: dict[Id, Id] = {}
    for request, tokens, ready in zip(known, usable, done, strict=True):
        if ready:
            continue
        lost = blocks.lost(request, tokens, only_holes=holes)
        prefill[request.id], owner = blocks.claim(request, lost)
        if owner is not None:
            waits[request.id] = owner.id
    return PrefillPlan(
        ready=tuple(name for name, ready in zip(ids, done, strict=True) if ready),
        prefill=prefill,
        waits=waits,
    )


@dataclass(frozen=True, slots=True)
class _Request(Generic[Id]):
    """A checked request: its block lists as arrays, cut to its tokens."""

    id: Id
    num_tokens: int
    cached_tokens: int
    lists: Mapping[str, Ids]
    block_tokens: Mapping[str, int]

    @classmethod
    def read(cls, request: PrefillRequest[Id]) -> _Request[Id]:
        if not isinstance(request, PrefillRequest):
            raise wrong_type("plan_prefill: requests", request, "a PrefillRequest")
        where = f"plan_prefill: request {request.id!r}"
        tokens = whole(request.num_tokens)
        cached = whole(request.cached_tokens)
        if tokens is None or cached is None or not 0 <= cached <= tokens or not tokens:
            raise UsageError(
                f"{where}: num_tokens={request.num_tokens!r} and "
                f"cached_tokens={request.cached_tokens!r}: num_tokens must be at "
                "least 1 and larger than cached_tokens"
            )
        given = request.blocks
        names = tuple(given) if isinstance(given, Mapping) else (DEFAULT_GROUP,)
        try:
            lists: dict[str, Ids] = block_lists(given, dict.fromkeys(names, _ANY_POOL))
        except UsageError as exc:
            raise UsageError(f"{where}: {exc}") from None
        asked = request.block_tokens
        if not isinstance(asked, Mapping):
            asked = dict.fromkeys(names, asked)
        sizes = {name: whole(size) or 0 for name, size in asked.items()}
        if sizes.keys() != lists.keys() or min(sizes.values()) < 1:
            raise UsageError(f"{where}: block_tokens={request.block_tokens!r}")
        if all(lists[n].size * sizes[n] < tokens for n in names):
            raise UsageError(
                f"{where}: num_tokens={tokens}, but its blocks hold "
                f"{max(lists[n].size * sizes[n] for n in names)}"
            )
        lists = {name: ids[: -(-tokens // sizes[name])] for name, ids in lists.items()}
        return cls(request.id, tokens, cached, lists, sizes)

    def tokens_in(self, group: str) -> Ids:
        """Return the number of the request's tokens in each block of a group."""
        size = self.block_tokens[group]
        counts = np.full(self.lists[group].size, size, np.int64)
        counts[-1:] -= -self.num_tokens % size
        return counts

    def first_tokens(self, group: str) -> Ids:
        """Return the position of each block's first token; a window holds the last."""
        skipped = self.num_tokens - int(self.tokens_in(group).sum())
        steps = np.arange(self.lists[group].size, dtype=np.int64)
        return skipped + steps * self.block_tokens[group]

    @property
    def has_window(self) -> bool:
        """Return whether some group holds only the last tokens."""
        held = (ids.size * self.block_tokens[name] for name, ids in self.lists.items())
        return min(held) < self.num_tokens


class _Claims(NamedTuple):
    """The claims of earlier requests on a request's tokens, in one group.

    Attributes:
        group: The group.
        places: The place of each token's block in the list; negative if a window does
            not hold the token.
        owners: The owner of each token's block.
        theirs: The tokens that earlier requests compute, or that are not held.
        taken: The tokens that this request must not compute.
    """

    group: str
    places: Ids
    owners: Ids
    theirs: Bits
    taken: Bits


class _Blocks(Generic[Id]):
    """Each block's valid tokens, and the request that computes the rest.

    A table has one entry for each block that a request names, sorted by id; so large
    ids do not enlarge it.
    """

    def __init__(
        self, requests: Sequence[_Request[Id]], ends: Sequence[Outcome]
    ) -> None:
        self._block_tokens = _common_sizes(requests)
        self._ids = {
            name: distinct(
                np.concatenate([r.lists[name] for r in requests if name in r.lists])
            )
            for name in self._block_tokens
        }
        self._valid = self._table(0)
        self._owner = self._table(_NOBODY)
        self._until = self._table(0)  # number of tokens that the owner computes
        self._position = self._table(0)
        self._claimants: list[_Request[Id]] = []
        for request in requests:
            self._add_cached(request)
        shared = [(end, n) for end in ends for n in self._ids.keys() & end.lists.keys()]
        for end, name in shared:
            self._add_landed(end, name)
        for end, name in shared:
            at, _ = self._find(name, end.missing.ids(name))
            self._valid[name][at] = 0

    def usable_tokens(self, request: _Request[Id]) -> int:
        """Return the number of a request's usable leading tokens."""
        usable = request.num_tokens
        for name, ids in request.lists.items():
            at, _ = self._find(name, ids)
            valid = self._valid[name][at]
            short = valid < request.tokens_in(name)
            if not short.any():
                continue
            first = int(short.argmax())
            size = request.block_tokens[name]
            usable = min(usable, first * size + int(valid[first]))
        return 0 if request.has_window and usable < request.num_tokens else usable

    def read(self, request: _Request[Id]) -> None:
        """Record that a request decodes from its blocks, so they must not change."""
        for name, ids in request.lists.items():
            at, _ = self._find(name, ids)
            self._owner[name][at] = _READ

    def lost(self, request: _Request[Id], usable: int, *, only_holes: bool) -> Bits:
        """Return for each token of a request whether it must be computed."""
        lost: Bits = np.arange(request.num_tokens) >= usable
        if not only_holes or request.has_window:
            return lost
        lost = np.zeros(request.num_tokens, np.bool_)
        for name, ids in request.lists.items():
            at, _ = self._find(name, ids)
            inside = np.arange(request.block_tokens[name])
            invalid = inside >= self._valid[name][at][:, None]
            lost |= invalid.ravel()[: request.num_tokens]
        return lost

    def claim(
        self, request: _Request[Id], lost: Bits
    ) -> tuple[tuple[TokenRange, ...], _Request[Id] | None]:
        """Assign a request the lost tokens that no earlier request computes.

        Returns the ranges to compute, and the owner to wait for.

        Raises:
            UsageError: A lost block is shared but not part of a common prefix.
        """
        # Before: the tables have, for each block, its owner among the earlier requests,
        # the token of the owner up to which that owner computes, and the position of
        # the block's first token in the owner. A block is shared as part of a prefix if
        # it has the same position in this request.
        claims = [
            self._claims(request, name, lost)
            for name, ids in request.lists.items()
            if ids.size
        ]
        theirs = lost & np.logical_and.reduce([held.theirs for held in claims])
        mine = lost & ~theirs
        if request.has_window and mine.any():
            mine = lost
            theirs = np.zeros_like(lost)
        for held in claims:
            taken = held.places[mine & held.taken]
            if taken.size:
                raise self._not_shared(request, held.group, int(taken[0]))
        last = np.flatnonzero(theirs)[-1:]
        # After: this request is the owner of every block with a token in `mine`.
        owner = None
        if last.size:
            owners = [int(held.owners[last[0]]) for held in claims]
            owner = self._claimants[max(owners)]
        if mine.any():
            for held in claims:
                places = distinct(held.places[mine & (held.places >= 0)])
                at, _ = self._find(held.group, request.lists[held.group][places])
                self._owner[held.group][at] = len(self._claimants)
                self._until[held.group][at] = request.num_tokens
                first = request.first_tokens(held.group)
                self._position[held.group][at] = first[places]
            self._claimants.append(request)
        return _runs(mine), owner

    def _claims(self, request: _Request[Id], group: str, lost: Bits) -> _Claims:
        """Return the earlier claims on the blocks of a request's tokens in a group."""
        ids = request.lists[group]
        at, _ = self._find(group, ids)
        first = request.first_tokens(group)
        tokens = np.arange(request.num_tokens)
        places = (tokens - int(first[0])) // request.block_tokens[group]
        places[tokens < first[0]] = _NOBODY
        inside = places >= 0
        owners = self._owner[group][at]
        shared = (owners >= 0) & (self._position[group][at] == first)
        # Behind a lost block that is not shared, no lost block is part of a prefix.
        lacking = distinct(places[lost & inside])
        shared[lacking] = np.logical_and.accumulate(shared[lacking])
        until = np.where(shared, self._until[group][at], 0)
        free = (owners == _NOBODY) | shared
        return _Claims(
            group=group,
            places=places,
            owners=np.where(inside, owners[places], _NOBODY),
            theirs=~inside | (tokens < until[places]),
            taken=inside & (~free[places] | (tokens < until[places])),
        )

    @staticmethod
    def _not_shared(request: _Request[Id], group: str, place: int) -> UsageError:
        name = int(request.lists[group][place])
        where = f"plan_prefill: request {request.id!r} lacks block {name} of group"
        if request.has_window:
            return UsageError(
                f"{where} {group!r}, or needs it computed again for its window, and "
                "another request has it too; give a request with a window blocks of "
                "its own, unless they share all of its blocks"
            )
        return UsageError(
            f"{where} {group!r}, which another request has after other blocks or with "
            "other blocks in another group; requests can share blocks only as a common "
            "prefix, in each group"
        )

    def _table(self, value: int) -> dict[str, Ids]:
        return {name: np.full(ids.size, value) for name, ids in self._ids.items()}

    def _add_cached(self, request: _Request[Id]) -> None:
        for name, ids in request.lists.items():
            size = request.block_tokens[name]
            tokens = request.cached_tokens - request.first_tokens(name)
            tokens = np.clip(tokens, 0, size)
            at, _ = self._find(name, ids)
            self._valid[name][at] = np.maximum(self._valid[name][at], tokens)

    def _add_landed(self, end: Outcome, name: str) -> None:
        listed = end.lists[name]
        size = self._block_tokens[name]
        tokens = np.full(listed.size, size)
        tokens[-1:] -= listed.size * size - end.tokens[name]
        landed = ~among(listed, end.missing.ids(name))
        at, known = self._find(name, listed[landed])
        valid = self._valid[name]
        valid[at] = np.maximum(valid[at], tokens[landed][known])

    def _find(self, name: str, ids: Ids) -> tuple[Ids, Bits]:
        """Return the known ids' places in the table, and a mask of known ``ids``."""
        # The table is ascending; sorting it for each request would take too long.
        table = self._ids[name]
        at = np.searchsorted(table, ids)
        if not table.size:
            return at[:0], np.zeros(ids.size, np.bool_)
        known: Bits = table.take(at, mode="clip") == ids
        return at[known], known


def _runs(tokens: Bits) -> tuple[TokenRange, ...]:
    """Return the ranges of set tokens, ascending."""
    edges = np.flatnonzero(np.diff(np.pad(tokens, 1).astype(np.int8))).tolist()
    return tuple(map(TokenRange, edges[::2], edges[1::2]))


def _common_sizes(requests: Sequence[_Request[Id]]) -> dict[str, int]:
    """Return the block size of each group.

    Raises:
        UsageError: Two requests have different block sizes.
    """
    sizes: dict[str, int] = {}
    for request in requests:
        for name, size in request.block_tokens.items():
            if sizes.setdefault(name, size) != size:
                raise UsageError(
                    f"plan_prefill: request {request.id!r} has block_tokens={size} in "
                    f"group {name!r}, and another request has {sizes[name]}"
                )
    return sizes


# Only the form of the ids is checked here, because the pool belongs to the caller.
_ANY_POOL: Final = 2**62
# The owner of a block without one; owners are indices of requests with claims.
_NOBODY: Final = -1
_READ: Final = -2
