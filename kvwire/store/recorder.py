"""Records the blocks requested from a store, as a trace for replays.

A recording has a line for each get, put and delete (:mod:`kvwire.store.trace`), without
the blocks' content. A hash is replaced by a number that only this process can compute,
so a recording cannot show whether the store had a given prompt.

A get after a ``match`` requests only the blocks that the match found. With a larger
store it would have requested more, so its line records the whole chain of the match. A
match that found nothing has a line of its own.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from pathlib import Path
from time import monotonic, strftime
from typing import Final, NamedTuple

import numpy as np

from kvwire.errors import UsageError, sayable, with_remedy
from kvwire.kv.blocks import Ids
from kvwire.store.address import TierAddress
from kvwire.store.keys import Keys
from kvwire.store.limits import STORE_RECORD_BYTES, STORE_RECORD_CHAINS
from kvwire.store.namespace import DIGEST_BYTES, Namespace
from kvwire.store.trace import TraceLine, TraceOp, encode_line

logger: logging.Logger = logging.getLogger("kvwire.store")

_SUFFIX: Final = ".jsonl"
# The largest integer that every JSON parser reads exactly.
_BITS: Final = np.int64(2**53 - 1)
_BUFFER_BYTES: Final = 1 << 20


class _Chain(NamedTuple):
    """A chain in a match request."""

    ids: Ids
    found: int


class Recorder:
    """Writes the trace of one store to a new file; bound to one event loop.

    It stops when the recordings in the directory reach their size limit, or when a
    write fails. Either is logged, and the store continues.
    """

    def __init__(self, text: str) -> None:
        """Open a recording: ``DIRECTORY?size=1GiB``."""
        address = TierAddress.parse(f"record:{text}")
        address.require("size")
        if not address.place:
            raise UsageError(f"record={text!r}: write DIRECTORY?size=1GiB")
        size = address.size_option("size", STORE_RECORD_BYTES)
        folder = Path(address.place)
        name = f"kvwire-{strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            there = sum(one.stat().st_size for one in folder.glob(f"*{_SUFFIX}"))
            number = 0
            while (folder / f"{name}-{number}{_SUFFIX}").exists():
                number += 1
            self.path: Path = folder / f"{name}-{number}{_SUFFIX}"
            self._file = self.path.open("xb", buffering=_BUFFER_BYTES)
        except OSError as exc:
            raise UsageError(f"record={text!r}: {with_remedy(exc)}") from exc
        self._left_bytes = size - there
        self._since = monotonic()
        # By the number of the last block found.
        self._chains: OrderedDict[int, _Chain] = OrderedDict()

    def matched(self, keys: Keys, found: int, namespace: Namespace) -> None:
        """Record the number of leading blocks that a match has found."""
        if not keys.size:
            return
        ids = _ids(keys)
        if not found:
            self._write(TraceOp.LOAD, ids, namespace)
            return
        self._chains[ids.item(found - 1)] = _Chain(ids, found)
        if len(self._chains) > STORE_RECORD_CHAINS:
            self._chains.popitem(last=False)

    def called(self, verb: str, keys: Keys, namespace: Namespace) -> None:
        """Record an ended call, with its :class:`TraceOp` name."""
        if not keys.size:
            return
        ids = _ids(keys)
        op = TraceOp(verb)
        if op is TraceOp.GET and (chain := self._chains.pop(ids.item(-1), None)):
            first = chain.found - ids.size
            if first >= 0 and chain.ids.item(first) == ids.item(0):
                op = TraceOp.LOAD
                ids = chain.ids[first:]
        self._write(op, ids, namespace)

    def named(self, verb: str, keys: Keys, known: dict[bytes, Namespace]) -> None:
        """Record a call for blocks of any namespaces."""
        digests = np.array([key[:DIGEST_BYTES] for key in keys.tolist()], np.object_)
        for digest in set(digests.tolist()) & known.keys():
            which = np.array([one == digest for one in digests.tolist()], np.bool_)
            self.called(verb, keys[which], known[digest])

    def close(self) -> None:
        """End the recording."""
        try:
            self._file.close()
        except OSError as exc:
            self._stop(with_remedy(exc))

    # --- inside -----------------------------------------------------------------------

    def _write(self, op: TraceOp, ids: Ids, namespace: Namespace) -> None:
        if self._left_bytes <= 0:
            return
        line = TraceLine(
            timestamp=int((monotonic() - self._since) * 1e3),
            input_length=ids.size * namespace.spec.block_tokens,
            output_length=0,
            hash_ids=ids.tolist(),
            op=op,
            block_bytes=namespace.image_bytes,
            tenant=namespace.tenant,
        )
        text = encode_line(line) + b"\n"
        if len(text) > self._left_bytes:
            self._stop("its directory is full; give record= a larger ?size=")
            return
        self._left_bytes -= len(text)
        try:
            self._file.write(text)
        except OSError as exc:
            self._stop(with_remedy(exc))

    def _stop(self, why: str) -> None:
        self._left_bytes = 0
        logger.warning("recording %s has stopped: %s", sayable(str(self.path)), why)


def _ids(keys: Keys) -> Ids:
    """Return a number for each key, which is the same for equal keys."""
    # Computed from bytes, it depends on a secret of this process.
    numbers = np.fromiter(map(hash, keys.tolist()), np.int64, keys.size)
    return numbers & _BITS
