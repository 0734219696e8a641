"""The state of one direction: every stage, every way out, and what is never done."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvwire.errors import ConnectionLost
from kvwire.kv.fragments import Fragments
from kvwire.types import Device, MemoryKind
from kvwire_nccl.direction_state import (
    MOVES_MAX,
    DirectionStage,
    DirectionState,
    DirectionStep,
    PayloadMove,
    refusal,
)


def state() -> DirectionState:
    return DirectionState(start_timeout_s=10, move_timeout_s=5)


def up() -> DirectionState:
    made = state()
    made.begun(0)
    made.up()
    return made


def job(token: object = None) -> PayloadMove:
    return PayloadMove(memoryview(b"abc"), 3, token)


def test_a_start_that_takes_too_long() -> None:
    made = state()
    made.begun(100)
    assert made.step(110) is DirectionStep.WATCH_START
    assert made.step(110.1) is DirectionStep.ABORT
    assert isinstance(made.error, ConnectionLost)
    assert "did not open within 10 s" in str(made.error)


def test_a_movement_that_takes_too_long() -> None:
    """Counted from the last that was done: a long queue is no reason to give up."""
    made = up()
    made.submit(job())
    made.submit(job())
    made.next_job(0)
    made.launched()
    made.next_job(0)
    made.launched()
    made.done(4)
    assert made.step(9) is DirectionStep.WATCH
    assert made.step(9.1) is DirectionStep.ABORT
    assert "moved nothing for 5 s" in str(made.error)


def test_what_nccl_does_not_move() -> None:
    cuda = frozenset({MemoryKind.CUDA})
    on_gpu = Fragments(
        np.array([64], np.uint64),
        np.array([8], np.uint64),
        owner=None,
        writable=True,
        device=Device(MemoryKind.CUDA, 0),
    )
    assert refusal(memoryview(b"abc"), cuda) == (
        "it moves cuda memory only, and this is host"
    )
    assert not refusal(on_gpu, cuda)
    assert not refusal(None, cuda)
    assert "this is cuda" in refusal(on_gpu, frozenset({MemoryKind.HOST}))


class Anything(RuleBasedStateMachine):
    """Whatever is said in whatever order, only proof of quiet leads out of ENDING."""

    def __init__(self) -> None:
        super().__init__()
        self.state = state()
        self.now = 0.0
        self.submitted: list[PayloadMove] = []
        self.done: list[PayloadMove] = []
        self.ending = False

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def submit(self) -> None:
        made = job()
        self.state.submit(made)
        self.submitted.append(made)

    @rule()
    def close(self) -> None:
        self.state.close()

    @rule()
    def fail(self) -> None:
        self.state.fail(ConnectionLost("broken"))

    @rule()
    def do_what_it_says(self) -> None:
        match self.state.step(self.now):
            case DirectionStep.BEGIN:
                self.state.begun(self.now)
            case DirectionStep.WATCH_START:
                self.state.up()
            case DirectionStep.MOVE:
                self.state.next_job(self.now)
            case DirectionStep.WATCH:
                self.state.launched()
                self.done.append(self.state.done(self.now))
            case _:
                pass

    @precondition(lambda self: self.state.stage is DirectionStage.ENDING)
    @rule()
    def quiet(self) -> None:
        self.state.quiet()
        assert self.state.step(self.now) is DirectionStep.EXIT

    @invariant()
    def jobs_are_done_in_their_order(self) -> None:
        assert self.done == self.submitted[: len(self.done)]

    @invariant()
    def an_end_is_final(self) -> None:
        if self.ending:
            assert self.state.stage in (DirectionStage.ENDING, DirectionStage.QUIET)
            assert self.state.step(self.now) in (
                DirectionStep.ABORT,
                DirectionStep.EXIT,
            )
        self.ending = self.state.stage in (DirectionStage.ENDING, DirectionStage.QUIET)

    @invariant()
    def what_is_in_flight_is_bounded(self) -> None:
        assert len(self.state.moving) <= MOVES_MAX


TestAnything = Anything.TestCase
