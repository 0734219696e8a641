"""A network that fails in one direction alone, for longer than silence is borne.

The side that hears nothing gives the connection up and dials again, or waits to be
dialled. The other one hears everything, that end too, and must not take it for the end
of the process: the lease counts, whoever dialled and whoever has the cache.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvwire
from tests.support import inside, virtual_time
from tests.support.world import World

SILENCE_S, OUTAGE_S, LEASE_S = 3.0, 8.0, 20.0
CONFIG: dict[str, Any] = {
    "ping_interval_s": 1.0,
    "ping_misses": 3,
    "lease_s": LEASE_S,
}


async def outage(
    *, producer_dials: bool, dialler_is_deaf: bool, push: bool, outage_s: float
) -> tuple[kvwire.Outcome, kvwire.Outcome]:
    """Return what became of both ends of a transfer that met an outage."""
    async with (
        kvwire.open(name="prefill", **CONFIG) as p,
        kvwire.open(name="decode", **CONFIG) as d,
    ):
        dialler, listener = (p, d) if producer_dials else (d, p)
        address = await listener.listen("inproc://")
        near = await dialler.connect(address)
        far = await listener.accept()
        pull_side, push_side = (far, near) if producer_dials else (near, far)
        w = World(p, d, pull_side, push_side, address)
        out, inc = w.begin(push=push)
        out.ready(layers=0)
        await inc.layer(0)

        over, redial = inside.now() + outage_s, inside.links(dialler).redial

        async def unreachable(lost: kvwire.Connection) -> kvwire.Connection:
            if inside.now() < over:
                raise kvwire.ConnectError("no answer") from TimeoutError()
            return await redial(lost)

        inside.links(dialler).redial = unreachable  # type: ignore[method-assign]
        w.freeze(near if dialler_is_deaf else far)
        await virtual_time.pass_time(outage_s)
        if inc.done():
            return await inc, await out
        out.ready(layers=slice(1, 4))
        out.finish()
        return await inc, await out


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("dialler_is_deaf", [True, False])
@pytest.mark.parametrize("producer_dials", [True, False])
@pytest.mark.parametrize("push", [True, False])
def test_an_outage_of_one_direction_that_is_shorter_than_the_lease(
    *,
    push: bool,
    producer_dials: bool,
    dialler_is_deaf: bool,
    says_so: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the last word gets lost: then pings without an answer say it."""
    if not says_so:
        monkeypatch.setattr("kvwire.proto.connection._MAY_CLOSE", ())
    outcomes = virtual_time.run(
        outage(
            producer_dials=producer_dials,
            dialler_is_deaf=dialler_is_deaf,
            push=push,
            outage_s=OUTAGE_S,
        )
    )
    assert all(outcome.complete for outcome in outcomes)


@pytest.mark.parametrize("dialler_is_deaf", [True, False])
def test_an_outage_that_is_longer_than_the_lease(*, dialler_is_deaf: bool) -> None:
    outcomes = virtual_time.run(
        outage(
            producer_dials=False,
            dialler_is_deaf=dialler_is_deaf,
            push=False,
            outage_s=SILENCE_S + LEASE_S + 2.0,
        )
    )
    assert not any(outcome.complete for outcome in outcomes)
