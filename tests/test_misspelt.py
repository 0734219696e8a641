"""A misspelt name is a type error; tests/test_wrong_uses.py has what is said of it.

That each line is a type error shows in the comments: mypy refuses an ``ignore`` that
hides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvwire
import kvwire_store
from kvwire.config import FIELDS, ConfigOptions

if TYPE_CHECKING:

    def misspelt(
        conn: kvwire.Connection, comm: kvwire.Communicator, cache: kvwire.PagedCache
    ) -> Any:
        kvwire.open(lane=4)  # type: ignore[call-arg]
        kvwire.open(trust="pks")  # type: ignore[arg-type]
        kvwire.open(checksum="sample")  # type: ignore[arg-type]
        kvwire.Engine(lane=4)  # type: ignore[call-arg]
        kvwire.KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_tokens=1,
            dtype="flot16",  # type: ignore[arg-type]
        )
        kvwire.PagedCache(cache.spec, [], layout="NDH")  # type: ignore[arg-type]
        conn.send(1, "text")  # type: ignore[arg-type]
        comm.register(bytearray(1), "reed")  # type: ignore[arg-type]
        conn.pull("x", cache, [1], prioriy=3)  # type: ignore[call-arg]
        conn.push("x", cache, [1], consumers=2)  # type: ignore[call-arg]
        comm.publish("x", cache, [1], have=[])  # type: ignore[call-arg]
        comm.expect("x", cache, [1], growing=1)  # type: ignore[call-arg]
        kvwire_store.BlockStore.open([], write="bak")  # type: ignore[arg-type]


def test_the_options_of_open_are_the_keys_of_its_configuration() -> None:
    assert ConfigOptions.__optional_keys__ == FIELDS
