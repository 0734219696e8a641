"""Offers and fetches between processes' exchanges, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import numpy as np
import pytest

import kvwire
from kvwire_engines.ray.exchange import (
    FetchAborted,
    NoSuchOffer,
    TensorExchange,
)

SIZES = (1, 4096, 0, 70_000, 3 << 20)


@pytest.fixture
def pair() -> Iterator[tuple[TensorExchange, TensorExchange]]:
    with ExitStack() as stack:
        made = [TensorExchange(name=name) for name in ("has", "wants")]
        for one in made:
            stack.enter_context(closing(one))
        yield made[0], made[1]


def random_buffers(sizes: tuple[int, ...] = SIZES) -> list[np.ndarray]:
    chance = np.random.default_rng(7)
    return [chance.integers(0, 256, size, np.uint8) for size in sizes]


def empty_buffers(sizes: tuple[int, ...] = SIZES) -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for size in sizes]


def test_buffers_of_any_size_arrive_and_again(
    pair: tuple[TensorExchange, TensorExchange],
) -> None:
    has, wants = pair
    had = random_buffers()
    has.offer("weights", had)
    has.offer("weights", [])  # again, as a task that Ray has tried again
    for into in (empty_buffers(), [np.zeros(sum(SIZES), np.uint8)]):
        wants.fetch(has.address, "weights", into).result(10)
        assert b"".join(map(bytes, into)) == b"".join(map(bytes, had))


def test_an_offer_that_ends_as_its_first_grant_is_made(
    pair: tuple[TensorExchange, TensorExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is its owner's again when `withdraw` returns, and nobody's to read."""
    has, wants = pair
    register, made = kvwire.Communicator.register, []
    begun, over = threading.Event(), threading.Event()

    def registered(*what: Any) -> kvwire.Region:
        begun.set()
        over.wait(0.1)  # where `withdraw` does not wait for this
        made.append(register(*what))
        return made[-1]

    monkeypatch.setattr(kvwire.Communicator, "register", registered)
    has.offer("a", random_buffers())
    fetched = wants.fetch(has.address, "a", empty_buffers())
    assert begun.wait(10)
    has.withdraw("a")
    over.set()
    fetched.exception(10)  # it came before, or has failed
    assert ["closed" in repr(region) for region in made] == [True]


def test_an_offer_may_end_after_the_exchange() -> None:
    has, wants = TensorExchange(), TensorExchange()
    with closing(wants):
        had = random_buffers()
        has.offer("a", had)
        wants.fetch(has.address, "a", empty_buffers()).result(10)
        has.close()
        has.withdraw("a")
        assert not has._offers


def test_what_is_not_there_is_said(pair: tuple[TensorExchange, TensorExchange]) -> None:
    has, wants = pair
    has.offer("a", random_buffers())
    has.withdraw("a")
    has.withdraw("a")
    with pytest.raises(NoSuchOffer, match=r"offers no a: its owner has freed it"):
        wants.fetch(has.address, "a", empty_buffers()).result(10)


def test_another_size_is_refused(pair: tuple[TensorExchange, TensorExchange]) -> None:
    has, wants = pair
    has.offer("a", random_buffers())
    with pytest.raises(kvwire.UsageError, match="bytes"):
        wants.fetch(has.address, "a", empty_buffers((7,))).result(10)


def test_nobody_listens(pair: tuple[TensorExchange, TensorExchange]) -> None:
    has, wants = pair
    has.close()
    with pytest.raises(kvwire.KVWireError, match=r"127\.0\.0\.1"):
        wants.fetch(has.address, "a", empty_buffers()).result(10)


def test_nothing_to_fetch_asks_nobody(
    pair: tuple[TensorExchange, TensorExchange],
) -> None:
    fetched = pair[1].fetch("127.0.0.1:1", "a", empty_buffers((0, 0)))
    assert fetched.exception(10) is None


def test_a_fetch_is_aborted_while_the_owner_says_nothing() -> None:
    """Its memory is free when the future is done."""
    silent = kvwire.Engine(name="silent")
    with closing(silent), closing(TensorExchange(name="wants")) as wants:
        address = str(silent.listen("127.0.0.1:0"))
        asked = threading.Event()

        async def accept() -> None:
            await (await silent.communicator.accept()).recv(1)
            asked.set()

        accepting = silent.start(accept())
        fetched = wants.fetch(address, "a", empty_buffers())
        assert asked.wait(10)
        accepting.result(10)
        wants.abort("b")
        wants.abort("a")
        with pytest.raises(FetchAborted):
            fetched.result(10)


def test_a_withdrawn_buffer_is_read_by_nobody(
    pair: tuple[TensorExchange, TensorExchange],
) -> None:
    """Whatever is under way: what has arrived is whole, or the fetch has failed."""
    has, wants = pair
    for turn in range(20):
        memory = np.full(8 << 20, turn + 1, np.uint8)
        into = np.zeros_like(memory)
        has.offer("a", [memory])
        fetched = wants.fetch(has.address, "a", [into])
        has.withdraw("a")
        memory[:] = 255
        try:
            fetched.result(10)
        except kvwire.RequestError:
            continue
        assert (into == turn + 1).all()


@pytest.mark.parametrize("question", [b"\xc1", {"name": "a", "tag": 1}, {"name": 5}])
def test_who_asks_otherwise_is_hung_up_on(
    question: object, pair: tuple[TensorExchange, TensorExchange]
) -> None:
    raw = question if isinstance(question, bytes) else msgspec.msgpack.encode(question)

    async def ask() -> None:
        connection = await odd.communicator.connect(pair[0].address)
        connection.send(1, raw)
        await connection.wait_closed()

    with closing(kvwire.Engine(name="odd")) as odd:
        odd.run(ask())
    pair[0].offer("a", random_buffers())
    into = empty_buffers()
    pair[1].fetch(pair[0].address, "a", into).result(10)
    assert b"".join(map(bytes, into)) == b"".join(map(bytes, random_buffers()))
