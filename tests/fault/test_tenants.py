"""Goal S10: what one peer was granted is no other peer's, and nobody can tell.

Three peers of one communicator, each with memory granted to it. They know each other's
grants to the last byte, and use them, their own, made-up ones and ended ones at random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

import kvwire
from kvwire import AccessDenied, Communicator, Connection, Grant, RequestError
from tests.support.pairs import SCHEMES, anywhere

SIZE = 64
OPERATIONS = 1500


@dataclass(slots=True)
class Tenant:
    """One peer."""

    comm: Communicator
    connection: Connection
    memory: bytearray
    grant: Grant
    canary: bytes


@pytest.fixture(params=SCHEMES)
async def tenants(request: pytest.FixtureRequest) -> AsyncIterator[list[Tenant]]:
    async with kvwire.open(name="owner") as owner:
        address = await owner.listen(anywhere(request.param))
        found = []
        for number in range(3):
            comm = await kvwire.open(name=f"tenant-{number}")
            connection = await comm.connect(address)
            canary = bytes([0xA0 + number]) * SIZE
            memory = bytearray(canary)
            region = owner.register(memory, "readwrite")
            grant = region.grant(await owner.accept())
            found.append(Tenant(comm, connection, memory, grant, canary))
        yield found
        for tenant in found:
            await tenant.comm.close()


def forged(grant: Grant, tenant: Tenant) -> Grant:
    """The grant with the name of the tenant's own connection, so that it is sent."""
    return replace(grant, connection=tenant.grant.connection)


async def outcome(tenant: Tenant, grant: Grant, into: bytearray) -> tuple[str, str]:
    """The class and the text of the error; nothing if there was none."""
    try:
        await tenant.connection.get(grant, into)
    except RequestError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


async def test_a_foreign_grant_looks_like_one_that_never_was(
    tenants: list[Tenant],
) -> None:
    mine, theirs = tenants[0], tenants[1]
    into = bytearray(SIZE)
    foreign = forged(theirs.grant, mine)
    made_up = replace(mine.grant, grant=999)
    guessed = replace(mine.grant, token=bytes(16))
    said = {await outcome(mine, grant, into) for grant in (foreign, made_up, guessed)}
    assert len(said) == 1
    assert said.pop()[0] == AccessDenied.__name__
    assert into == bytes(SIZE)


async def test_nobody_sees_or_changes_what_is_not_his(tenants: list[Tenant]) -> None:
    rng = random.Random(10)
    counts: Counter[str] = Counter()
    for _ in range(OPERATIONS):
        user, owner = rng.choice(tenants), rng.choice(tenants)
        start, stop = sorted((rng.randrange(SIZE), rng.randrange(SIZE)))
        part = forged(owner.grant, user)[start : stop + 1]
        into = bytearray(len(part))
        if rng.random() < 0.5:
            kind, _ = await outcome(user, part, into)
            others = {b for t in tenants if t is not user for b in t.canary}
            assert not others & set(into)
        else:
            kind = ""
            try:
                await user.connection.put(user.canary[: len(part)], part)
            except AccessDenied:
                kind = AccessDenied.__name__
        assert kind == ("" if user is owner else AccessDenied.__name__)
        counts["own" if user is owner else "foreign"] += 1
    assert min(counts.values()) > OPERATIONS / 5
    for tenant in tenants:
        assert tenant.memory == tenant.canary
        assert not tenant.connection.closed
