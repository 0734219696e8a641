"""KV hints: what is read, what is refused and by which name, and what is done."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvwire import BlockStore
from kvwire.integrations.hints import (
    DemoteHint,
    HintLog,
    PinHint,
    PrefetchHint,
    RetainHint,
    ShareHint,
    hints_of,
    read_hints,
)
from tests.support.caches import Filled, chain


def envelope(*actions: dict[str, Any], version: str = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def action(kind: str, version: str = "0.1", **payload: Any) -> dict[str, Any]:
    return {
        "action_id": "a1",
        "action_type": kind,
        "action_version": version,
        "payload": payload,
    }


def test_all_five_are_read() -> None:
    hints = read_hints(
        envelope(
            action("kv.share", to="node-2"),
            action("kv.prefetch", end=64),
            action("kv.demote", execute_at="arrival"),
            action("kv.pin", "1.0", ttl_seconds=5),
            action("Retain", start=32, priority=80, duration=60.0),
        )
    )
    assert hints.refused == ()
    assert [type(one) for one in hints.actions] == [
        ShareHint,
        PrefetchHint,
        DemoteHint,
        PinHint,
        RetainHint,
    ]
    share, prefetch, demote, pin, retain = hints.actions
    assert (share.name, share.at_arrival) == ("kv.share a1", False)
    assert (prefetch.end, prefetch.at_arrival) == (64, True)
    assert demote.at_arrival
    assert isinstance(pin, PinHint)
    assert pin.ttl_s == 5
    assert isinstance(retain, RetainHint)
    assert (retain.start, retain.priority, retain.ttl_s) == (32, 80, 60.0)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (
            action("kv.evict"),
            "actions[0]: action_type='kv.evict': use one of kv.share, kv.prefetch",
        ),
        (
            action("kv.pin", "2.0", ttl_s=1),
            "actions[0]: kv.pin: action_version='2.0'; use one of 0.1 and 1.0",
        ),
        (action("kv.pin"), "kv.pin: payload: Object missing required field `ttl_s`"),
        (action("kv.pin", ttl_s=-1), "kv.pin: payload: Expected `float` > 0"),
        (
            action("kv.retain", priority=101, ttl_s=1),
            "kv.retain: payload: Expected `int` <= 100 - at `$.priority`",
        ),
        (
            action("kv.demote", block_hashes=[1]),
            "kv.demote: payload: Object contains unknown field `block_hashes`",
        ),
        (action("kv.demote", execute_at="later"), "Invalid enum value 'later'"),
        (
            action("kv.share", to="kvwire://elsewhere:1"),
            "a request may not send KV to an address",
        ),
        ({"action_type": 7}, "actions[0]: Expected `str`, got `int`"),
    ],
)
def test_what_is_refused_is_named_and_the_others_count(
    one: dict[str, Any], why: str
) -> None:
    hints = read_hints(envelope(one, action("kv.pin", ttl_s=1)))
    (refused,) = hints.refused
    assert why in refused
    assert len(hints.actions) == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (envelope(version="7"), "kv_hints: protocol_version='7'; 0.1 and 1.0 are"),
        ({"actions": []}, "missing required field `protocol_version`"),
        ([1], "kv_hints: Expected `object`, got `array`"),
        (
            envelope(*(action("kv.demote") for _ in range(33))),
            "kv_hints: 33 actions; the first 32 count",
        ),
    ],
)
def test_an_envelope_that_cannot_be_read_is_refused(said: Any, why: str) -> None:
    (refused,) = read_hints(said).refused
    assert why in refused


def test_an_engine_has_them_beside_a_request_or_in_its_parameters() -> None:
    said = envelope(action("kv.demote"))
    typed = SimpleNamespace(
        protocol_version="0.1",
        message_id="m",
        actions=[SimpleNamespace(**action("kv.demote"))],
    )
    for request in (
        SimpleNamespace(kv_hints=typed),
        SimpleNamespace(kv_hints=None, kv_transfer_params={"kv_hints": said}),
        SimpleNamespace(kv_transfer_params={"kv_hints": said}),
    ):
        assert len(hints_of(request).actions) == 1
    assert hints_of(SimpleNamespace(kv_transfer_params=None)) == ((), ())


def test_only_full_blocks_within_the_tokens_are_meant() -> None:
    def blocks(**payload: Any) -> list[int]:
        (hint,) = read_hints(envelope(action("kv.demote", **payload))).actions
        return list(range(8))[hint.blocks(16, 8)]

    assert blocks() == list(range(8))
    assert blocks(start=1, end=63) == [1, 2]
    assert blocks(start=16, end=64) == [1, 2, 3]
    assert blocks(start=112, end=1 << 30) == [7]
    assert blocks(start=1000) == []


async def test_they_are_carried_out_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = Filled(seed=1).cache
    hashes = chain(3)
    log = HintLog()
    demoted, pinned, shared = read_hints(
        envelope(
            action("kv.retain", priority=90, ttl_s=60),
            action("kv.pin", ttl_s=60),
            action("kv.share", to="node-2"),
        )
    ).actions
    with caplog.at_level(logging.INFO, "kvwire.hints"):
        async with BlockStore.open(["memory:1MiB"]) as store:
            await store.put(hashes, cache, [0, 1, 2])
            done = await log.carry_out("r", demoted, store, hashes, cache)
            assert done is not None
            assert done.complete
            done = await log.carry_out("r", pinned, store, [*hashes, b"x" * 32], cache)
            assert done is not None
            assert done.counts == {"done": 3, "missing": 1}
            assert await log.carry_out("r", shared, store, hashes, cache) is None
            assert await log.carry_out("r", shared, store, hashes, cache) is None
    assert "request r: kv.retain a1: <Placement of 3 blocks: 3 done>" in caplog.text
    assert caplog.text.count("refused: kv.share a1: ") == 1
