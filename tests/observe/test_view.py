"""What `kvwire top` shows in a terminal and a browser, of any number of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import kvwire
from kvwire import Snapshot
from kvwire.endpoint.io_thread import called
from kvwire.endpoint.snapshot import (
    CallSnapshot,
    ConnectionSnapshot,
    PartSnapshot,
    TransferSnapshot,
)
from kvwire.limits import NAME_CHARS_MAX
from kvwire.observe.inspect_page import InspectPage
from kvwire.observe.view import (
    RateMemory,
    TopTable,
    TopView,
    Wait,
    process_view,
    text_of,
    waits_table,
)
from kvwire.types import Address
from tests.support.caches import Memory

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m"


@pytest.fixture(scope="module")
def idle() -> Snapshot:
    with kvwire.Engine(name="prefill-0") as engine:
        return engine.run(called(engine.communicator.snapshot))


def transfer(number: int, **fields: object) -> TransferSnapshot:
    made = TransferSnapshot(
        id=f"request-{number}",
        side="outgoing",
        peers=("decode-0",),
        age_s=float(number),
        layers=4,
        layers_marked=2,
        layers_landed=1,
        nbytes=4096,
        landed_bytes=1024,
        waits_for="the consumer has not received all of it",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def table(view: TopView, name: str) -> TopTable:
    (found,) = (one for one in view.tables if one.name == name)
    return found


def texts(view: TopView, name: str) -> list[list[str]]:
    return [[text_of(cell) for cell in row.cells] for row in table(view, name).rows]


def test_nothing_at_all() -> None:
    view = process_view([], [], ["a.sock: no answer"])
    assert not any(one.rows for one in view.tables)
    assert view.notes == (
        "a.sock: no answer",
        "no process answers: were they started with KVWIRE_INSPECT?",
    )


def test_a_thousand_transfers_are_a_row_each_and_one_reason(idle: Snapshot) -> None:
    open_ones = tuple(transfer(number) for number in range(1000))
    busy = replace(idle, transfers=open_ones, open_transfers=4000)
    view = process_view([busy], [], [])
    shown = table(view, "transfers")
    assert (len(shown.rows), shown.total) == (1000, 4000)
    assert texts(view, "transfers")[0][1] == "request-999 to decode-0"
    (wait,) = texts(view, "waits")
    assert wait == [
        "prefill-0",
        "decode-0",
        "transfer request-999 and 999 more",
        "999.0 s",
        "the consumer has not received all of it",
    ]


def test_the_longest_wait_is_first_and_marked_where_a_peer_is_silent(
    idle: Snapshot,
) -> None:
    silent = ConnectionSnapshot(
        peer="decode-1",
        address="",
        transport="tcp",
        state="open",
        age_s=9.0,
        silent_s=5.0,
        queued_bytes=0,
        requests=1,
        unreceived=0,
    )
    busy = replace(
        idle,
        transfers=(transfer(2), transfer(3, peers=("decode-1",)), transfer(1)),
        connections=(silent,),
        asked=("request-9",),
    )
    view = process_view([busy], [], [])
    ages = [row.cells[3] for row in table(view, "waits").rows]
    assert [(text_of(age), getattr(age, "alarm", False)) for age in ages] == [
        ("3.0 s", True),
        ("2.0 s", False),
        ("-", False),
    ]


def test_a_consumer_shows_why_its_producer_does_not_go_on() -> None:
    with (
        kvwire.Engine(name="prefill-0") as there,
        kvwire.Engine(name="decode-0") as here,
    ):
        connection = here.connect(there.listen("127.0.0.1:0"))
        out = there.publish("request-7", Memory().cache, [0])
        inc = here.pull(connection, "request-7", Memory().cache, [1])
        out.ready(layers=0)
        inc.wait_layer(0, timeout=10)
        view = process_view(
            [
                there.run(called(there.communicator.snapshot)),
                here.run(called(here.communicator.snapshot)),
            ],
            [],
            [],
        )
        out.abort()
        out.wait(10)
        inc.wait(10)
    waits = {row[0]: row for row in texts(view, "waits")}
    assert waits["prefill-0"][1] == "its own program"
    assert waits["prefill-0"][4].startswith("finish() has not been called")
    assert waits["decode-0"][1] == "prefill-0"
    assert "at prefill-0, finish() has not been called" in waits["decode-0"][4]


def test_texts_of_peers_are_printable_and_short(idle: Snapshot) -> None:
    part = PartSnapshot(
        kind="store",
        name=HOSTILE,
        calls=(CallSnapshot(text=HOSTILE, age_s=1.0),),
        summary=HOSTILE,
        trouble={"disk": HOSTILE},
    )
    busy = replace(
        idle,
        name=HOSTILE,
        transfers=(transfer(1, id=HOSTILE, peers=(HOSTILE,), waits_for=HOSTILE),),
        parts=(part,),
        asked=("x" * NAME_CHARS_MAX,),
    )
    view = process_view([busy], [], [HOSTILE])
    shown = [
        text_of(cell) for one in view.tables for row in one.rows for cell in row.cells
    ]
    assert "disk: " in " ".join(shown)
    for text in (*shown, *view.notes):
        assert text.isprintable()
        assert len(text) < 2 * NAME_CHARS_MAX


def test_rates_are_of_the_look_before_however_many_look(idle: Snapshot) -> None:
    def at(s: float) -> Snapshot:
        moved = idle.counters | {"received_bytes": int(s * 2**20)}
        return replace(idle, at_s=1000.0 + s, counters=moved)

    rates = RateMemory()

    def rate(s: float) -> str:
        now = [at(s)]
        return texts(process_view(now, rates.before(now), []), "processes")[0][6]

    assert rate(1.0) == "-"
    assert rate(2.0) == "1 MiB"
    # Another reader, a moment later: not of that moment alone.
    assert rate(2.125) == "1 MiB"
    assert rate(3.0) == "1 MiB"
    assert rate(60.0) == "-"  # nobody has looked for a minute
    assert rates.before([]) == ()
    assert rate(61.0) == "-"


def test_waits_without_a_time_come_last() -> None:
    shown = waits_table([Wait("a", "b", "x", None, "why"), Wait("b", "c", "y", 1, "w")])
    assert [text_of(row.cells[0]) for row in shown.rows] == ["b", "a"]


# --- the page of processes ------------------------------------------------------------


def test_the_page_of_processes_is_for_those_who_have_its_link(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with kvwire.Engine(name="a", inspect=str(folder)):
        page = InspectPage(folder)
        for shown in ("", page.key, "Bearer ", f"Bearer {page.key[:-1]}", "Bearer é"):
            headers = {"authorization": shown}
            status, _, body = page.get("/top.json", headers)
            assert (status, b"link" in body) == (401, True)
        headers = {"authorization": f"Bearer {page.key}"}
        status, _, body = page.get("/top.json", headers)
        view = msgspec.json.decode(body, type=TopView)
        assert (status, texts(view, "processes")[0][0]) == (200, "a")
    assert page.get("/top", {})[0] == 200
    assert page.get("/metrics", {})[0] == 404
    # The folder is empty, then gone.
    for _ in range(2):
        view = msgspec.json.decode(page.get("/top.json", headers)[2], type=TopView)
        assert view.notes
        if folder.exists():
            folder.rmdir()
    assert InspectPage(None).key != page.key


def test_the_page_of_processes_is_served_on_this_host_only() -> None:
    assert InspectPage.checked("127.0.0.1:0") == Address.parse("127.0.0.1:0")
    assert InspectPage.checked("localhost:0").host == "localhost"
    with pytest.raises(kvwire.UsageError, match=r"0\.0\.0\.0.*ssh -L"):
        InspectPage.checked("0.0.0.0:9401")
