"""What belongs to one process is not copied: a copy would point into its memory."""

from __future__ import annotations

import copy
import dataclasses
import enum
from typing import Any

import msgspec
import pytest

import kvwire
from kvwire.types import Uncopied
from kvwire_store import BlockStore
from tests.support.caches import Filled
from tests.support.pairs import connected


def pickled(value: object) -> object:
    """Do what a pickler asks an object to do; pickles themselves are nowhere here."""
    return value.__reduce_ex__(4)


# Public classes that are values: a copy means the same as the original.
VALUES = {"BlockPool", "Counters", "KVSpec", "Outcome"}
CALLS = (copy.copy, copy.deepcopy, pickled)


def test_each_public_class_is_a_value_or_is_not_copied() -> None:
    for name in kvwire.__all__:
        kind = getattr(kvwire, name)
        if not isinstance(kind, type) or name in VALUES:
            continue
        plain = BaseException, enum.Enum, msgspec.Struct, tuple
        if not issubclass(kind, plain) and not dataclasses.is_dataclass(kind):
            assert issubclass(kind, Uncopied), name


async def test_objects_of_a_process_refuse_copies() -> None:
    cache = Filled(seed=1).cache
    async with connected() as pair, BlockStore.open(["memory:1MiB"]) as store:
        window = pair.far.expose("kv", cache)
        both: list[Any] = [
            *(cache, store, window, pair.left, pair.near),
            *(pair.left.recv(1), pair.near.register(bytearray(4))),
            pair.near.publish("a", cache, [0]),
            await pair.left.window("kv"),
            store.put([b"name" * 8], cache, [0]),
        ]
        for one in both:
            for call in CALLS:
                with pytest.raises(kvwire.UsageError, match="neither copied nor"):
                    call(one)
        both[5].cancel()
        both[7].abort()
        await both[-1]


def test_a_copy_of_an_engine_does_not_close_it() -> None:
    with kvwire.Engine(name="a") as engine:
        for call in CALLS:
            with pytest.raises(kvwire.UsageError, match="neither copied nor pickled"):
                call(engine)
        assert engine.listen("127.0.0.1:0").port
