"""What a source may say that is not true, and what then becomes of the blocks."""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import encode

import kvwire
from kvwire import limits
from kvwire.migration import MigrationTarget, migrate
from kvwire.migration.messages import (
    MIGRATION_ROUNDS_MAX,
    MIGRATION_STATE_BYTES_MAX,
    MIGRATION_TAG,
    Handover,
    Message,
    Round,
    Withdrawal,
    decode,
    transfer_id,
)
from kvwire.migration.target import MIGRATIONS_MAX
from tests.migration.engines import SIZE, Host, Request, engines
from tests.support.caches import SPEC, Memory
from tests.support.pairs import Pair, connected, until

REPLY = 77


def a_round(move: bytes, **changes: Any) -> Round:
    values = {"index": 0, "blocks": 2, "tokens": 2 * SIZE, "block_tokens": SIZE}
    return Round(move, "r", REPLY, **{**values, **changes})


def say(pair: Pair, *messages: Message) -> None:
    for message in messages:
        pair.left.send(MIGRATION_TAG, encode(message))


async def drained(pair: Pair, host: Host) -> None:
    """All blocks are back, and a request can still move here."""
    await until(lambda: len(host.free) == 12)
    assert not host.arrived
    assert (await migrate(pair.left, Request(SIZE))).result == "moved"


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ([{"tokens": 3 * SIZE}], f"{3 * SIZE} tokens are not in 2 blocks"),
        ([{"tokens": 1}], "1 tokens are not in 2 blocks"),
        ([{}, {"index": 2}], "round 2 came out of turn"),
        ([{}, {}], "round 0 came out of turn"),
        ([{"tokens": SIZE + 1}, {"index": 1}], "round 1 came out of turn"),
        ([{}, {"index": 1, "blocks": 11, "tokens": 11 * SIZE}], "11 more blocks"),
    ],
)
async def test_a_round_that_does_not_fit_ends_the_migration(
    rounds: list[dict[str, int]], said: str
) -> None:
    move = os.urandom(16)
    async with engines() as (pair, host):
        say(pair, *(a_round(move, **changes) for changes in rounds))
        assert said in (await pair.left.recv(REPLY)).decode()
        # What comes behind it is of a migration that is over.
        say(pair, a_round(move, index=1), Handover(move, b""), Withdrawal(move))
        await drained(pair, host)


async def test_a_handover_before_its_kv_starts_nothing() -> None:
    """A push that was aborted at once never came, and is awaited for the lease."""
    move = os.urandom(16)
    async with engines(lease_s=1) as (pair, host):
        say(pair, a_round(move), Handover(move, b"state"))
        pair.left.push(b"kvwire-move/" + move + bytes(4), Memory().cache, [0, 1]).abort(
            "never"
        )
        assert "its KV" in (await pair.left.recv(REPLY)).decode()
        await drained(pair, host)


async def test_what_nobody_has_begun_is_ignored() -> None:
    move = os.urandom(16)
    async with engines() as (pair, host):
        say(pair, Handover(move, b""), Withdrawal(move), a_round(move, index=3))
        await drained(pair, host)
        assert not pair.left.unreceived  # nobody is answered


async def test_bytes_that_are_no_message_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "kvwire.migration")
    async with engines() as (pair, host):
        pair.left.send(MIGRATION_TAG, b"\xc1")
        pair.left.send(MIGRATION_TAG, encode(a_round(bytes(16), blocks=0)))
        await until(lambda: len(caplog.records) == 2)
        assert "ignored a message from 'near'" in caplog.text
        await drained(pair, host)


async def test_a_source_that_vanishes_gets_nothing() -> None:
    async with engines() as (pair, host):
        say(pair, a_round(os.urandom(16)))
        await until(lambda: len(host.free) == 10)
        pair.left.abort("gone")
        await until(lambda: len(host.free) == 12)
    assert not host.arrived


async def test_a_pool_that_fails_refuses_the_request() -> None:
    """And no other one of its connection."""

    def fails(_: int) -> None:
        raise RuntimeError("a bug")

    async with engines() as (pair, host):
        take, host.target._take = host.target._take, fails
        say(pair, a_round(os.urandom(16)))
        said = (await pair.left.recv(REPLY)).decode()
        assert said == "RuntimeError: a bug"
        # What a pool of NumPy returns are block ids as well.
        host.target._take = lambda count: np.asarray(take(count))  # type: ignore[assignment,return-value]
        await drained(pair, host)


async def test_requests_on_their_way_are_bounded() -> None:
    async with engines(free=2 * MIGRATIONS_MAX + 12) as (pair, host):
        host.target._take = lambda count: list(range(count))
        for _ in range(MIGRATIONS_MAX + 1):
            say(pair, a_round(os.urandom(16)))
        said = (await pair.left.recv(REPLY)).decode()
        assert said == f"{MIGRATIONS_MAX} requests are on their way here already"
        host.target._give_back = lambda blocks: None


async def test_hybrid_models_are_refused_by_name() -> None:
    tensors = Memory().tensors
    groups = {"full": (SPEC, tensors), "window": (SPEC, tensors)}
    cache = kvwire.PagedCache.grouped(groups)
    async with connected() as pair:
        with pytest.raises(kvwire.UsageError, match="groups full, window"):
            MigrationTarget(
                *(pair.far, cache),
                take=lambda count: None,
                give_back=lambda blocks: None,
                start=lambda arrival: None,
            )


# --- messages of migrations: what they mean comes back, what is too much does not -----


MOVE = bytes(range(16))
ROUND: dict[str, Any] = {
    "move": MOVE,
    "request": "r",
    "reply": 5,
    "index": 0,
    "blocks": 2,
    "tokens": 20,
    "block_tokens": 16,
}


@pytest.mark.parametrize(
    "message", [Round(**ROUND), Handover(MOVE, b"state"), Withdrawal(MOVE)]
)
def test_they_come_back(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("move", MOVE[1:]),
        ("request", "x" * (limits.NAME_CHARS_MAX + 1)),
        ("reply", -1),
        ("index", MIGRATION_ROUNDS_MAX),
        ("blocks", 0),
        ("blocks", limits.KV_BLOCKS_MAX + 1),
        ("tokens", 0),
        ("block_tokens", 0),
    ],
)
def test_what_is_out_of_range_is_none(field: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(Round(**{**ROUND, field: value})))


def test_a_state_is_bounded() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(Handover(MOVE, bytes(MIGRATION_STATE_BYTES_MAX + 1))))


def test_each_round_has_a_transfer_of_its_own() -> None:
    names = {transfer_id(MOVE, index) for index in range(MIGRATION_ROUNDS_MAX)}
    assert len(names) == MIGRATION_ROUNDS_MAX
