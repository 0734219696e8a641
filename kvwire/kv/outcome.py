"""A transfer's outcome: landed blocks, missing blocks with reasons, and timings.

A partial transfer is an outcome, not an exception. A block's name is (group, block id),
because ids in different groups collide. Sets and mappings are backed by arrays: a
transfer of 100,000 blocks creates no object per block unless you iterate over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import (
    UNNAMED,
    Bits,
    Blocks,
    BlockSet,
    Codes,
    Ids,
    MissingBlocks,
    MissingOfGroup,
    among,
    join_missing,
    missing_blocks,
    named_of,
)
from kvwire.kv.geometry import Tokens, describe
from kvwire.kv.landed import Landed
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The seconds that one end of a transfer waited, by reason.

    An end waits for one thing at a time, so the phases add up to the time from the call
    to the outcome. The two ends may have different timings, since each counts its own
    waits.

    Attributes:
        queue_s: For the peer to start its end of the transfer.
        handshake_s: For a plan, including the time to make it.
        memory_wait_s: In a push, for memory at the consumer.
        mark_wait_s: For the producer's next mark (so for its compute), while no data
            was in flight.
        wire_s: For the payload in flight. The consumer of a small part notices it when
            it is whole, and counts the wait as ``mark_wait_s``.
        commit_s: For the final confirmation, once everything had landed.
        lost_s: For a peer that was silent, or whose connection was lost.
    """

    queue_s: float = 0.0
    handshake_s: float = 0.0
    memory_wait_s: float = 0.0
    mark_wait_s: float = 0.0
    wire_s: float = 0.0
    commit_s: float = 0.0
    lost_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the sum: the time from the call to the outcome."""
        return math.fsum(getattr(self, phase.name) for phase in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one transfer.

    Attributes:
        complete: Whether every block landed.
        landed: The blocks that landed and were verified in every layer.
        missing: The other blocks, with reasons. In a growing transfer, positions that
            never got a block are not included; see :attr:`unnamed`.
        usable_prefix: The number of leading blocks that landed in every layer and
            group; see :attr:`kvwire.kv.landed.Landed.usable_prefix`.
        usable_tokens: The same, counted in tokens.
        lists: The block list of each group; -1 at positions without a block.
        tokens: The number of tokens that each group's list covers.
        timings: The seconds that this end waited, by reason.
        layers_grouped: The number of layers that were sent together; 1 means layer by
            layer.
        nbytes: Payload bytes that landed.
    """

    complete: bool
    landed: BlockSet
    missing: MissingBlocks
    usable_prefix: int
    usable_tokens: int
    lists: Mapping[str, Ids]
    tokens: Mapping[str, int]
    timings: Timings = Timings()
    layers_grouped: int = 1
    nbytes: int = 0

    @property
    def unnamed(self) -> int:
        """Return the number of a growing transfer's positions without a block."""
        return sum(int(np.add.reduce(ids == UNNAMED)) for ids in self.lists.values())

    @property
    def state(self) -> Literal["complete", "partial", "failed"]:
        """Summarise the result: everything, some bytes, or nothing landed."""
        if self.complete:
            return "complete"
        return "partial" if self.nbytes else "failed"


def outcome_of(
    landed: Landed,
    *,
    otherwise: str,
    reasons: Sequence[tuple[str, Mapping[str, Bits]]] = (),
    timings: Timings | None = None,
    layers_grouped: int = 1,
) -> Outcome:
    """Return the outcome of a transfer that has ended.

    Each item of ``reasons`` is a text and, per group, a mask of shape (blocks,). A
    missing position gets the first text whose mask covers it, or else ``otherwise``.
    """
    plan = landed.plan
    if landed.complete:
        return outcome_of_all(
            plan.template, plan.lists, timings, layers_grouped, plan.nbytes
        )
    here, groups = _divided(landed, [bits for _, bits in reasons])
    return Outcome(
        complete=False,
        landed=BlockSet(here),
        missing=missing_blocks(groups, [*(text for text, _ in reasons), otherwise]),
        usable_prefix=landed.usable_prefix,
        usable_tokens=landed.usable_tokens,
        lists=plan.lists,
        tokens=plan.template.tokens,
        timings=timings or Timings(),
        layers_grouped=layers_grouped,
        nbytes=landed.nbytes,
    )


# A frozen dataclass sets each field by a call. For the outcomes of transfers that are
# complete, and for timings, this takes a twentieth of the time: an object with the same
# slots is filled, and then becomes an instance of the class.
class _OutcomeFields:
    __slots__ = tuple(field.name for field in fields(Outcome))


class _TimingsFields:
    __slots__ = tuple(field.name for field in fields(Timings))


def timings_of(
    queue_s: float,
    wire_s: float,
    commit_s: float,
    *,
    handshake_s: float = 0.0,
    memory_wait_s: float = 0.0,
    mark_wait_s: float = 0.0,
    lost_s: float = 0.0,
) -> Timings:
    """Return timings; see :class:`Timings`."""
    made: Any = _TimingsFields()
    made.queue_s = queue_s
    made.handshake_s = handshake_s
    made.memory_wait_s = memory_wait_s
    made.mark_wait_s = mark_wait_s
    made.wire_s = wire_s
    made.commit_s = commit_s
    made.lost_s = lost_s
    made.__class__ = Timings
    timings: Timings = made
    return timings


def outcome_of_all(
    template: PlanTemplate,
    lists: Mapping[str, Ids],
    timings: Timings | None,
    layers_grouped: int,
    nbytes: int,
) -> Outcome:
    """Return the outcome of a complete transfer."""
    return complete_outcome(
        BlockSet(named_of(lists)),
        template.missing,
        template.landed,
        lists,
        template.tokens,
        timings or Timings(),
        layers_grouped,
        nbytes,
    )


def complete_outcome(
    landed: BlockSet,
    missing: MissingBlocks,
    usable: tuple[int, int],
    lists: Mapping[str, Ids],
    tokens: Mapping[str, int],
    timings: Timings,
    layers_grouped: int,
    nbytes: int,
) -> Outcome:
    """Return an outcome without missing blocks; see :class:`Outcome`.

    ``usable`` is the usable prefix, and the usable tokens.
    """
    made: Any = _OutcomeFields()
    made.complete = True
    made.landed = landed
    made.missing = missing
    made.usable_prefix, made.usable_tokens = usable
    made.lists = lists
    made.tokens = tokens
    made.timings = timings
    made.layers_grouped = layers_grouped
    made.nbytes = nbytes
    made.__class__ = Outcome
    outcome: Outcome = made
    return outcome


def nothing_landed(
    cache: PagedCache,
    blocks: Blocks,
    reason: str,
    *,
    tokens: Tokens = None,
    timings: Timings | None = None,
) -> Outcome:
    """Return the outcome of a transfer that ended before there was a plan."""
    lists = cache.block_lists(blocks)
    # Many waiting transfers may end in one turn of the loop: what they have in common
    # is made once.
    geometry = describe(cache, lists, tokens)
    missing = {
        name: MissingOfGroup(
            ids,
            np.zeros(ids.size, np.uint16),
            cache.groups[name].spec.layer_indices,
            np.ones((cache.groups[name].spec.layers, ids.size), np.bool_),
        )
        for name, ids in lists.items()
    }
    return Outcome(
        complete=False,
        landed=geometry.no_blocks,
        missing=missing_blocks(missing, [reason]),
        usable_prefix=0,
        usable_tokens=0,
        lists=lists,
        tokens=geometry.capacities,
        timings=timings or Timings(),
    )


def join_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of transfers that each carried a share of the same blocks.

    A block has landed if all its shares have. The transfers ran concurrently, so the
    slowest one's timings are returned.

    Raises:
        UsageError: There is no outcome, or their block lists differ.
    """
    if not outcomes:
        raise UsageError("join: pass at least one outcome")
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    for outcome in outcomes:
        _require_same_lists(first, outcome)
    missing = join_missing([outcome.missing for outcome in outcomes])
    landed = {
        group: ids[~among(ids, missing.ids(group)) & (ids != UNNAMED)]
        for group, ids in first.lists.items()
    }
    return Outcome(
        complete=all(outcome.complete for outcome in outcomes),
        landed=BlockSet(landed),
        missing=missing,
        usable_prefix=min(outcome.usable_prefix for outcome in outcomes),
        usable_tokens=min(outcome.usable_tokens for outcome in outcomes),
        lists=first.lists,
        tokens=first.tokens,
        timings=max((one.timings for one in outcomes), key=attrgetter("total_s")),
        layers_grouped=max(outcome.layers_grouped for outcome in outcomes),
        nbytes=sum(outcome.nbytes for outcome in outcomes),
    )


def _require_same_lists(first: Outcome, other: Outcome) -> None:
    if first.lists.keys() != other.lists.keys():
        raise UsageError(
            f"join: one outcome has the groups {', '.join(first.lists)}, another "
            f"{', '.join(other.lists)}"
        )
    for group, ids in first.lists.items():
        if not np.array_equal(ids, other.lists[group]):
            raise UsageError(f"join: the block lists of group {group!r} differ")
        if first.tokens[group] != other.tokens[group]:
            raise UsageError(
                f"join: group {group!r} has tokens={first.tokens[group]} in one "
                f"outcome and tokens={other.tokens[group]} in another"
            )


def _divided(
    landed: Landed, named: Sequence[Mapping[str, Bits]]
) -> tuple[dict[str, Ids], dict[str, MissingOfGroup]]:
    """Return the ids that landed in every layer, and the missing blocks, by group."""
    here: dict[str, Ids] = {}
    missing: dict[str, MissingOfGroup] = {}
    for index, walk in enumerate(landed.plan.groups):
        by_layer = landed.by_layer(index)
        whole = np.logical_and.reduce(by_layer, axis=0)
        ids = landed.plan.lists[walk.group]
        codes = _codes(ids.size, walk.group, named)
        here[walk.group] = ids[whole & (ids != UNNAMED)]
        missing[walk.group] = MissingOfGroup(
            ids[~whole], codes[~whole], walk.layers, ~by_layer[:, ~whole]
        )
    return here, missing


def _codes(blocks: int, group: str, named: Sequence[Mapping[str, Bits]]) -> Codes:
    """Return for each position the index of its first reason, or ``len(named)``."""
    codes = np.full(blocks, len(named), np.uint16)
    for code in reversed(range(len(named))):
        if group in named[code]:
            codes[named[code][group]] = code
    return codes
