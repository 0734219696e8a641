"""Bugs that free memory too early or reach a wrong place, planted in the core (Q6).

Each test changes one method of the core, and the simulator finds it within a few seeds.
Small changes of every line are `make mutants`, which asks the tests of these rooms
alone; what is here are the mistakes that only a whole connection shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from msgspec.structs import replace as replaced

from kvwire.errors import StaleRegion, WireCode
from kvwire.proto.chunks import ChunkMover
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.holds import Holds
from kvwire.proto.lanes import LaneTable
from kvwire.proto.messages import Messages
from kvwire.proto.onesided import OneSided
from kvwire.proto.regions import Grants
from kvwire.proto.state import RequestInput, RequestKind, RequestStage
from kvwire.proto.transfers import Transfers
from kvwire.proto.windows import WindowReads
from tests.backends.planted import planted_in
from tests.programs.sim.run import run_seed

SEEDS: Final = 3000
"""Every bug is found within so many seeds from 0, most within 1000."""

_REACH = ("access", "memory-range", "place", "stale")
_FREED = ("AssertionError", "KeyError", "drained", "memory-reuse")


def expect_found_as(
    right: Any, *rules: str
) -> Callable[[Callable[..., Any]], Callable[[pytest.MonkeyPatch], None]]:
    """Make a test of what a bug makes of a method: a seed fails by one of the rules."""

    def made(bug: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
        def test(monkeypatch: pytest.MonkeyPatch) -> None:
            with monkeypatch.context() as patch:
                planted_in(right, bug)(patch)
                failed = next(
                    (found for found in map(run_seed, range(SEEDS)) if found.error),
                    None,
                )
            assert failed is not None, f"not found in {SEEDS} seeds"
            assert failed.rule in rules, f"found as {failed.rule}: {failed.error}"

        test.__name__ = bug.__name__
        return test

    return made


def begins_at_the_beginning(check: Any, grants: Any, **asked: Any) -> Any:
    """Of its region, whatever a grant says: a put goes beside its place."""
    return replace(check(grants, **asked), offset=0)


test_a_grant_that_begins_at_the_beginning_of_its_region = expect_found_as(
    Grants.check, *_REACH
)(begins_at_the_beginning)


@expect_found_as(Messages.message_landed, "completion")
def test_a_message_is_passed_to_a_receive_that_ended_while_it_arrived(
    landed: Any, messages: Any, arrival: Any, body: Any, *, intact: bool
) -> None:
    request = arrival.request
    if request is None or not request.stays:
        landed(messages, arrival, body, intact=intact)
        return
    state = request.state
    request.state = RequestStage.POSTED
    landed(messages, arrival, body, intact=intact)
    request.state = state


@expect_found_as(Grants.check, "KeyError", *_REACH)
def test_a_closed_region_can_still_be_reached(
    check: Any,
    grants: Any,
    **asked: Any,
) -> Any:
    try:
        return check(grants, **asked)
    except StaleRegion:
        return grants._rows[asked["grant"]]


@expect_found_as(OneSided.region_revoked, "stale", *_FREED)
def test_a_closed_region_goes_on_being_written_and_read(*_: Any) -> None:
    pass


@expect_found_as(LaneTable.look, "detection", "stuck", "left-open")
def test_a_lane_that_has_lost_its_path_is_not_noticed(*_: Any) -> None:
    pass


@expect_found_as(Holds.retire, *_FREED)
def test_retired_memory_drains_although_it_is_held(
    retire: Any, holds: Any, buffer: Any
) -> None:
    if holds.held(buffer):
        holds._counts[buffer] = 0
    retire(holds, buffer)


@expect_found_as(ChunkMover.land, *_FREED)
def test_memory_is_not_held_while_a_payload_lands_in_it(
    land: Any, chunks: Any, header: Any, buffer: Any, *args: Any, **named: Any
) -> Any:
    arrival = land(chunks, header, buffer, *args, **named)
    chunks._holds.drop(buffer)
    return arrival


@expect_found_as(ChunkMover.next_chunk, *_FREED)
def test_memory_is_not_held_while_the_link_reads_it(
    next_chunk: Any, chunks: Any, *args: Any
) -> Any:
    chunk = next_chunk(chunks, *args)
    if chunk is not None:
        chunks._holds.drop(chunk.buffer)
    return chunk


@expect_found_as(ConnectionCore._end, *_FREED)
def test_an_abort_frees_memory_without_waiting_for_the_link(
    end: Any, core: Any, *args: Any, **named: Any
) -> None:
    end(core, *args, **named)
    core.chunks.link_gone()


@expect_found_as(ConnectionCore._abandon, *_FREED)
def test_a_timeout_frees_the_memory_of_its_request(
    abandon: Any, core: Any, request: Any, error: Any, tell: Any
) -> None:
    abandon(core, request, error, tell)
    while tell is WireCode.DEADLINE and core.holds.held(request.buffer):
        core.holds.drop(request.buffer)


@expect_found_as(LaneTable._release, "drained", "KeyError", "memory-reuse", "detection")
def test_memory_goes_back_when_the_peer_has_it_and_the_lane_still_reads_it(
    release: Any, lanes: Any, lane: Any, chunk: Any
) -> Any:
    chunk.quiet = chunk.quiet or chunk.taken is not None
    return release(lanes, lane, chunk)


@expect_found_as(LaneTable.link_gone, "KeyError", "memory-reuse")
def test_with_the_control_link_the_memory_on_lanes_is_given_back(
    link_gone: Any, lanes: Any
) -> None:
    for lane in lanes._lanes.values():
        for chunk in lane.waiting.values():
            chunk.quiet = True
    link_gone(lanes)


@expect_found_as(
    OneSided.done_received, "UnexpectedFrame", "completion", "memory-reuse"
)
def test_a_put_confirmed_early_ends_before_the_link_is_through_with_it(
    done_received: Any, puts: Any, header: Any, body: Any
) -> None:
    request = puts._requests.find(header.request)
    if request and request.state is RequestStage.MOVING:
        request.advance(RequestInput.MOVED)
    done_received(puts, header, body)


@expect_found_as(Messages._meet, "KeyError", "completion", "memory-reuse")
def test_an_eager_message_is_handed_over_before_all_of_it_is_here(
    meet: Any, messages: Any, tag: int
) -> None:
    for waiting in messages._waiting.get(tag, ()):
        waiting.whole = True
    meet(messages, tag)


@expect_found_as(Transfers.marked_whole, "content")
def test_a_small_segment_that_came_damaged_is_taken(
    whole: Any, transfers: Any, header: Any, body: Any, **_: bool
) -> None:
    whole(transfers, header, body, intact=True)


@expect_found_as(WindowReads.finish, "stale-block")
def test_the_owner_does_not_compare_after_the_bytes(
    finish: Any, windows: Any, request: Any, stale: bytes, *, sent: bool
) -> None:
    finish(windows, request, b"" if sent else stale, sent=sent)


@expect_found_as(WindowReads.got, "stale-block")
def test_blocks_that_were_withdrawn_in_the_middle_count_as_landed(
    got: Any, windows: Any, header: Any, body: Any
) -> None:
    got(windows, header, replaced(body, stale=b"") if body.sent else body)


@expect_found_as(ChunkMover.next_chunk, "completion", "memory-reuse", "stale-block")
def test_the_owner_compares_before_the_link_is_through_with_the_bytes(
    next_chunk: Any, chunks: Any, *args: Any
) -> Any:
    chunk = next_chunk(chunks, *args)
    if chunk is not None and chunk.request.kind is RequestKind.SERVE_READ:
        request = chunk.request
        if request.moved == request.nbytes and request.state is RequestStage.MOVING:
            request.advance(RequestInput.MOVED)
            chunks.on_read_sent(request)
    return chunk


@expect_found_as(WindowReads.opened, "window")
def test_a_window_that_opens_too_late_stays_open_at_its_owner(
    opened: Any, windows: Any, header: Any, body: Any
) -> None:
    if windows._requests.find(header.request) is not None:
        opened(windows, header, body)


@expect_found_as(WindowReads.hide, "window")
def test_readers_are_not_told_that_a_window_was_closed(*_: Any) -> None:
    pass


@expect_found_as(WindowReads.data_landed, "UnexpectedFrame", "accused", "completion")
def test_a_get_that_was_cancelled_while_its_only_frame_came_ends_again(
    landed: Any, windows: Any, arrival: Any, data: Any, *, intact: bool
) -> None:
    arrival.request.over = False
    landed(windows, arrival, data, intact=intact)
