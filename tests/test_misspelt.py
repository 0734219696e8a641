"""A misspelt name is a type error, and at run time an error that names the nearest one.

That each call is a type error shows in the comments: mypy refuses an ``ignore`` that
hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvwire
from kvwire.config import FIELDS, ConfigOptions
from kvwire.testing import loopback


class Things(NamedTuple):
    """What the calls are made on."""

    conn: kvwire.Connection
    comm: kvwire.Communicator
    cache: kvwire.PagedCache
    tensor: Any


CALLS: list[tuple[Callable[[Things], object], str]] = [
    (
        lambda _: kvwire.open(lane=4),  # type: ignore[call-arg]
        "did you mean 'lanes'",
    ),
    (
        lambda _: kvwire.open(trust="pks"),  # type: ignore[arg-type]
        "did you mean 'psk'",
    ),
    (
        lambda _: kvwire.open(checksum="sample"),  # type: ignore[arg-type]
        "did you mean 'sampled'",
    ),
    (
        lambda _: kvwire.Engine(lane=4),  # type: ignore[call-arg]
        "did you mean 'lanes'",
    ),
    (
        lambda _: kvwire.KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_tokens=1,
            dtype="flot16",  # type: ignore[arg-type]
        ),
        "did you mean 'float16'",
    ),
    (
        lambda t: kvwire.PagedCache(
            t.cache.spec,
            t.tensor,
            layout="NDH",  # type: ignore[arg-type]
        ),
        "did you mean 'NHD'",
    ),
    (
        lambda t: t.conn.send(1, "text"),  # type: ignore[arg-type]
        r"pass its bytes, text\.encode\(\)",
    ),
    (
        lambda t: t.comm.register(bytearray(1), "reed"),  # type: ignore[arg-type]
        "did you mean 'read'",
    ),
    (
        lambda t: t.conn.pull("x", t.cache, [1], prioriy=3),  # type: ignore[call-arg]
        "pull: no option 'prioriy'; did you mean 'priority'",
    ),
    (
        lambda t: t.conn.push("x", t.cache, [1], consumers=2),  # type: ignore[call-arg]
        "push: no option 'consumers'",
    ),
    (
        lambda t: t.comm.publish("x", t.cache, [1], have=[]),  # type: ignore[call-arg]
        "publish: no option 'have'",
    ),
    (
        lambda t: t.comm.expect("x", t.cache, [1], growing=1),  # type: ignore[call-arg]
        "expect: no option 'growing'",
    ),
    (
        lambda _: kvwire.BlockStore.open(
            ["memory:1MiB"],
            write="bak",  # type: ignore[arg-type]
        ),
        "did you mean 'back'",
    ),
]


@pytest.mark.parametrize(("call", "hint"), CALLS)
async def test_the_error_names_the_nearest(
    call: Callable[[Things], object], hint: str
) -> None:
    spec = kvwire.KVSpec(
        layers=1, kv_heads=1, head_dim=4, block_tokens=2, dtype="float16"
    )
    tensor = [np.zeros((4, 2, 2, 1, 4), np.float16)]
    async with loopback() as pair:
        things = Things(pair.ab, pair.a, kvwire.PagedCache(spec, tensor), tensor)
        with pytest.raises(kvwire.UsageError, match=hint):
            call(things)


def test_the_options_of_open_are_the_keys_of_its_configuration() -> None:
    assert ConfigOptions.__optional_keys__ == FIELDS
