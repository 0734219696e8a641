"""Messages of migrations: what they mean comes back, what is too much does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvwire import limits
from kvwire.migration.messages import (
    MIGRATION_ROUNDS_MAX,
    MIGRATION_STATE_BYTES_MAX,
    Handover,
    Message,
    Round,
    Withdrawal,
    decode,
    encode,
    transfer_id,
)

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
