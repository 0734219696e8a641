"""The arithmetic of a large fleet: a small round, and sums that can be done by head."""

from __future__ import annotations

import pytest

from tests.programs import scale

UNITS = scale.Units(
    connection_bytes=32 * 1024,
    ping_s=200e-6,
    record_bytes=300,
    write_s=50e-6,
    delivery_s=10e-6,
    renewal_s=100e-6,
    watched_s=100e-6,
    choice_s=1e-6,
)


def test_the_sums() -> None:
    rows = {row.what: row.value for row in scale.table(UNITS, 1000, 10, 100)}
    assert list(rows.values()) == [
        "300",  # of 1,000 engines, each 3.33 s
        "3,000",
        "0.09 MiB/s",
        "5%",  # 300 x (50 us + 10 x 10 us)
        "3%",
        "0.003%",
        "10%",  # 200 choices of 500, 1 us each
        "500",
        "16 MiB",
        "250",
        "5%",
    ]


def test_what_gives_way_first_is_first() -> None:
    found = scale.bounds(UNITS, 10, 100)
    engines = [bound.engines for bound in found]
    assert engines == sorted(engines)
    assert [round(one) for one in engines] == [
        575,
        1000,
        4096,
        8192,
        10000,
        22222,
        33333,
    ]
    # At that many, the directory's server has just as much to do as a core can.
    (watched,) = (one for one in found if "every engine watches" in one.what)
    writes = watched.engines / scale.RENEWAL_S
    assert writes * (
        UNITS.write_s + watched.engines * UNITS.delivery_s
    ) == pytest.approx(1, rel=0.01)


@pytest.mark.slow  # a server, and processes that write to it
async def test_what_one_of_each_costs() -> None:
    units = await scale.measured(peers=20, seconds=2, renewals=200, times=5)
    # A process that has done much before it has memory to spare, and grows by nothing.
    assert units.connection_bytes < 1024 * 1024
    for seconds in (units.ping_s, units.write_s, units.renewal_s, units.watched_s):
        assert 0 < seconds < 0.05
    assert 0 < units.delivery_s < 0.05
    assert 0 < units.choice_s < 1e-3
    assert 100 < units.record_bytes < 1024
