"""kv_transfer_params, as clients may send them, and what a step is read for."""

from __future__ import annotations

from typing import Any

import pytest

from kvwire import UsageError
from kvwire_vllm.metadata import (
    TransferParams,
    answer,
    scheduled_requests,
)
from packages.vllm.tests.support.fakes import Cached, New, Output


def test_an_answer_is_what_decode_reads() -> None:
    wanted = TransferParams.read(answer("id", ("a:1", "b:2")))
    assert wanted == TransferParams(
        loads=True, computed=True, transfer_id="id", remote=("tcp://a:1", "tcp://b:2")
    )
    wanted.check()


@pytest.mark.parametrize(
    ("params", "remote"),
    [
        *((alone, ()) for alone in (None, {}, {"other": 1})),
        ({"remote": "a:1,b:2"}, ("tcp://a:1", "tcp://b:2")),
    ],
)
def test_what_is_not_said_is_usual(
    params: dict[str, Any] | None, remote: tuple[str, ...]
) -> None:
    assert TransferParams.read(params) == TransferParams(remote=remote)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"transfer_id": 7}, "Expected `str`.*transfer_id"),
        ({"transfer_id": "x" * 300}, "length <= 256.*transfer_id"),
        ({"transfer_id": "\ud800"}, "matching.*transfer_id"),
        ({"transfer_id": "a\n"}, "matching.*transfer_id"),
        ({"do_remote_decode": "\ud800"}, "surrogates not allowed"),
        ({"\ud800": 1, "do_remote_decode": True}, "surrogates not allowed"),
        ({"signature": 1}, "Expected `str`.*signature"),
        ({"do_remote_prefill": "no"}, "Expected `bool`.*do_remote_prefill"),
        ({"remote": 7}, "Expected `array`.*remote"),
        ({"remote": [7]}, "Expected `str`.*remote"),
        ({"stages": True}, "Expected `int`.*stages"),
        ({"stages": -1}, "`int` >= 1.*stages"),
        ({"stages": 2, "remote": ["a:1"]}, "stages must be"),
        ({"remote": ["a"]}, "no port"),
        ({"remote": ["a:1"] * 2000}, "length <= 1024.*remote"),
    ],
)
def test_what_cannot_be(params: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TransferParams.read(params)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (TransferParams(loads=True, remote=("a:1",)), "needs transfer_id"),
        (TransferParams(loads=True, transfer_id="x"), "remote is missing"),
    ],
)
def test_what_is_missing(wanted: TransferParams, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wanted.check()


def test_who_waits_needs_no_address() -> None:
    TransferParams(sends=True).check()


def test_a_step_visits_requests_to_which_something_happens() -> None:
    """Not those that are unknown, and not those that fill no block in it."""
    counts = dict.fromkeys(("new", "fills", "gets", "idle", "other"), 1)
    cached = Cached(
        ["fills", "gets", "idle", "other"], [None, ([7],), None, None], [7, 3, 5, 7]
    )
    output = Output(counts, [New("new", ([1],))], scheduled_cached_reqs=cached)
    known = counts.keys() - {"other"}
    due = dict.fromkeys(("new", "fills", "gets", "idle"), 8)
    visited = list(scheduled_requests(output, known, due))
    assert [(one.id, one.new, one.stop) for one in visited] == [
        ("new", True, 1),
        ("fills", False, 8),
        ("gets", False, 4),
    ]
    assert len(list(scheduled_requests(output, known))) == 4
