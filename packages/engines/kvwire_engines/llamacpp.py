"""Sessions of llama.cpp's server, kept in a store and continued by another server.

The server runs with ``--slot-save-path DIR``, and this process reads and writes that
folder::

    server = LlamaSlots("http://127.0.0.1:8080", DIR, http)
    sessions = LlamaSessions(store, server, weights=weights_name("model.gguf"))
    known = await sessions.restore(0, prompt)   # then ask the server, with id_slot 0
    kept = await sessions.save(0, prompt)

A session is the file of a slot, kept whole under the hashes of its tokens: after every
64 tokens, and at its end. So a prompt that shares a beginning finds it, and the server
cuts off what follows. The file's digest is checked before the server sees a byte of it,
and the server's count of restored tokens afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire import KVSpec, PagedCache
from kvwire.aio import run_to_completion
from kvwire.errors import KVWireError, UsageError
from kvwire.extras import needed_by
from kvwire.kv.hashing import HashScheme
from kvwire.kv.layout import AxisOrder
from kvwire_store import BlockStore

with needed_by(
    "kvwire_engines.llamacpp", extra="llamacpp", distribution="kvwire-engines"
):
    import aiohttp

# A slot file begins with 4 bytes, a version, a count of words, and the words: -1, 1,
# the number of tokens, the tokens, 0.
_MAGIC: Final = 0x67677371
_VERSION: Final = 4
_HEAD_WORDS: Final = 6
# Behind a single token comes the number of streams, and for each one that of its cells.
_STREAMS_AT: Final = 8
# From the stream that has a cell on: whether values are transposed (they are without
# flash attention), the number of layers, and the type of the keys.
_TRANSPOSED: Final = 4
_LAYERS: Final = 5
_TYPE: Final = 8
# Bytes of one piece of a file in the store, and of the entry that names the pieces.
_PIECE_BYTES: Final = 1 << 20
_ENTRY_BYTES: Final = 256
# The largest file that is kept.
_FILE_BYTES_MAX: Final = 64 << 30
# Entries are made after each so many tokens; a shorter beginning is computed faster.
_EVERY_TOKENS: Final = 64
_TYPES: Final = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 8: "q8_0"}
Bytes = npt.NDArray[np.uint8]


class SlotFailed(KVWireError):
    """Reports a server that refused a slot operation, or did something else."""


class SlotFacts(NamedTuple):
    """What a slot's state depends on besides weights and tokens.

    Attributes:
        cache_type_k: The type of keys, such as ``f16`` or ``q8_0``.
        flash_attention: Whether values are kept as flash attention reads them.
        layers: The number of layers.
        streams: The number of its slots; 1 with ``--kv-unified``.
        token_bytes: Bytes of a file with one token, which the type of values changes.
        adapters: The server's adapters and their scales.
    """

    cache_type_k: str
    flash_attention: bool
    layers: int
    streams: int
    token_bytes: int
    adapters: str


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """Where a session's file is: a key of its pieces, their bytes, its tokens."""

    key: str
    nbytes: int
    digest: str
    tokens: int


_ENTRY: Final = msgspec.json.Decoder(_Entry)


class LlamaSlots:
    """The slots of one llama-server.

    Args:
        url: Where it serves, such as ``http://127.0.0.1:8080``.
        folder: Its ``--slot-save-path``.
        http: The HTTP session that asks it.
    """

    def __init__(self, url: str, folder: str | Path, http: aiohttp.ClientSession):
        self.url: str = url.rstrip("/")
        self._folder = Path(folder)
        self._http = http

    async def ask(self, path: str, body: Any = None) -> Any:
        """Get or post JSON, and return the answer.

        Raises:
            SlotFailed: The server cannot be reached, or it answered with an error.

        Cancel safety: the server may have done what was asked.
        """
        method = "GET" if body is None else "POST"
        try:
            async with self._http.request(method, self.url + path, json=body) as got:
                answer = await got.json(content_type=None)
                if got.ok:
                    return answer
                why = f"{got.status}: {str(answer)[:200]}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            why = str(exc) or type(exc).__name__
        raise SlotFailed(f"{self.url}{path}: {why}")

    async def facts(self, slot: int) -> SlotFacts:
        """Return what the server's states depend on; it empties the slot.

        Raises:
            SlotFailed: The server failed, or its files have an unknown format.

        Cancel safety: the slot is empty or as before.
        """
        adapters = await self.ask("/lora-adapters")
        await self.erase(slot)
        asked = {"prompt": [1], "n_predict": 0, "id_slot": slot}
        await self.ask("/completion", asked)
        data = await self.save(slot)
        await self.erase(slot)
        if slot_tokens(data) != [1]:
            raise SlotFailed(f"{self.url}: a slot with one token was saved with others")
        words = np.frombuffer(data[: len(data) // 4 * 4], "<u4")
        at = int(np.flatnonzero(words[_STREAMS_AT + 1 :])[0]) + _STREAMS_AT + 1
        key_type = int(words[at + _TYPE])
        return SlotFacts(
            cache_type_k=_TYPES.get(key_type, str(key_type)),
            flash_attention=not words[at + _TRANSPOSED],
            layers=int(words[at + _LAYERS]),
            streams=int(words[_STREAMS_AT]),
            token_bytes=len(data),
            adapters=str([(one["path"], one["scale"]) for one in adapters]),
        )

    async def save(self, slot: int) -> bytes:
        """Return a slot's file.

        Raises:
            SlotFailed: The server failed, or did not write what it reports.

        Cancel safety: safe, it only reads; a file may be left in the folder.
        """
        path = self._folder / f"kvwire-{uuid4().hex}"
        try:
            said = await self.ask(f"/slots/{slot}?action=save", {"filename": path.name})
            try:
                data = await asyncio.to_thread(path.read_bytes)
            except OSError as exc:
                raise SlotFailed(
                    f"{self.url} saved a slot, but not where this process reads: "
                    f"{exc}; pass the server's --slot-save-path"
                ) from None
        finally:
            path.unlink(missing_ok=True)
        if len(data) != said["n_written"] or len(slot_tokens(data)) != said["n_saved"]:
            raise SlotFailed(
                f"{self.url}: the file of slot {slot} has {len(data)} bytes, but "
                f"{said['n_written']} were reported"
            )
        return data

    async def restore(self, slot: int, data: bytes) -> int:
        """Fill a slot from a file; return the number of tokens that it holds then.

        Raises:
            SlotFailed: The server failed, or restored another number of tokens. The
                slot is empty then.

        Cancel safety: the slot is filled or empty.
        """
        expected = len(slot_tokens(data))
        path = self._folder / f"kvwire-{uuid4().hex}"
        try:
            await asyncio.to_thread(path.write_bytes, data)
            name = {"filename": path.name}
            said = await self.ask(f"/slots/{slot}?action=restore", name)
        except OSError as exc:
            raise SlotFailed(f"cannot write {path}: {exc}") from None
        finally:
            path.unlink(missing_ok=True)
        if (said["n_restored"], said["n_read"]) == (expected, len(data)):
            return expected
        await self.erase(slot)
        raise SlotFailed(
            f"{self.url} reported success, but restored {said['n_restored']} tokens of "
            f"{expected} into slot {slot}, which is empty now"
        )

    async def erase(self, slot: int) -> None:
        """Empty a slot.

        Raises:
            SlotFailed: The server failed.

        Cancel safety: the slot is empty or as before.
        """
        await self.ask(f"/slots/{slot}?action=erase", {})


class LlamaSessions:
    """The sessions of one model in a store, for one server.

    Args:
        store: The store, of the event loop that calls the methods.
        server: The server.
        weights: A name for the weights, from
            :func:`kvwire_store.weights.weights_name`; sessions of others are not found.
        tenant: The tenant that owns the sessions.

    Attributes:
        facts: What the server's states depend on; None until it was asked, which the
            first save or restore does. Set it to None after the server was restarted.
    """

    def __init__(
        self,
        store: BlockStore,
        server: LlamaSlots,
        *,
        weights: str,
        tenant: str = "",
    ) -> None:
        if not weights:
            raise UsageError(
                "LlamaSessions: weights is empty: pass "
                "kvwire_store.weights.weights_name(model)"
            )
        self._store = store
        self._server = server
        self._weights = weights
        self._tenant = tenant
        self.facts: SlotFacts | None = None

    async def save(self, slot: int, prompt: list[int]) -> int:
        """Store a slot's state; return the number of its tokens, 0 if none is stored.

        Args:
            slot: The slot, which computes nothing meanwhile.
            prompt: The tokens that it began with. A state that begins with others, as
                after a shift of the context, is not kept.

        Raises:
            SlotFailed: The server failed.
            UsageError: The file is too large.
            ClosedOK: The store is closed.

        Cancel safety: what is stored then is whole, or is not found.
        """
        if self.facts is None:
            raise UsageError("LlamaSessions.save: no restore has asked for the facts")
        data = await self._server.save(slot)
        tokens = slot_tokens(data)
        if tokens[: len(prompt)] != prompt or not tokens or min(tokens) < 0:
            return 0
        if len(data) > _FILE_BYTES_MAX:
            raise UsageError(
                f"a session of {len(data)} bytes; at most {_FILE_BYTES_MAX} are kept"
            )
        return await run_to_completion(self._put(tokens, data))

    async def restore(self, slot: int, prompt: list[int]) -> int:
        """Fill a slot with the longest stored beginning of a prompt.

        Args:
            slot: The slot, which computes nothing meanwhile.
            prompt: The prompt's tokens.

        Returns:
            How many leading tokens of the prompt the slot holds, 0 if nothing whole is
            stored. The server computes the others.

        Raises:
            SlotFailed: The server failed.
            ClosedOK: The store is closed.

        Cancel safety: the slot is filled or empty.
        """
        if self.facts is None:
            self.facts = await self._server.facts(slot)
        hashes = HashScheme(1).block_hashes(np.array(prompt, np.int64))
        probe = self._page("entry", np.empty((1, _ENTRY_BYTES), np.uint8))
        here = await self._store.present(hashes, probe, tenant=self._tenant)
        for at in np.flatnonzero(here)[::-1][:3].tolist():
            data = await self._get(hashes[at], prompt[: at + 1])
            if data is not None:
                await self._server.restore(slot, data)
                return int(at) + 1
        return 0

    async def _put(self, tokens: list[int], data: bytes) -> int:
        hashes = HashScheme(1).block_hashes(np.array(tokens, np.int64))
        key = hashes[-1]
        entry = _Entry(key.hex(), len(data), _digest(data), len(tokens))
        pieces = np.zeros((-(-len(data) // _PIECE_BYTES), _PIECE_BYTES), np.uint8)
        pieces.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
        # The pieces first: an entry is found only if there were all of them.
        if not await self._stored("piece", _piece_keys(key, len(pieces)), pieces):
            return 0
        ends = [*hashes[_EVERY_TOKENS - 1 : -1 : _EVERY_TOKENS], key]
        head = msgspec.json.encode(entry).ljust(_ENTRY_BYTES)
        entries = np.tile(np.frombuffer(head, np.uint8), (len(ends), 1))
        return len(tokens) if await self._stored("entry", ends, entries) else 0

    async def _stored(self, part: str, keys: list[bytes], memory: Bytes) -> bool:
        page = self._page(part, memory)
        request = self._store.put(keys, page, range(len(keys)), tenant=self._tenant)
        outcome = await request
        await request.drained()
        return outcome.complete

    async def _get(self, end: bytes, tokens: list[int]) -> bytes | None:
        """Return a session's file that begins with tokens; None if it is not whole."""
        head = await self._read("entry", [end], _ENTRY_BYTES)
        try:
            entry = _ENTRY.decode(head.tobytes() if head is not None else b"")
            key = bytes.fromhex(entry.key)
        except (msgspec.DecodeError, ValueError):
            return None
        if not 0 < entry.nbytes <= _FILE_BYTES_MAX:
            return None
        keys = _piece_keys(key, -(-entry.nbytes // _PIECE_BYTES))
        pieces = await self._read("piece", keys, _PIECE_BYTES)
        if pieces is None:
            return None
        data = pieces.reshape(-1)[: entry.nbytes].tobytes()
        if await asyncio.to_thread(_digest, data) != entry.digest:
            return None
        return data if slot_tokens(data)[: len(tokens)] == tokens else None

    async def _read(self, part: str, keys: list[bytes], nbytes: int) -> Bytes | None:
        memory = np.empty((len(keys), nbytes), np.uint8)
        page = self._page(part, memory)
        outcome = await self._store.get(
            keys, page, range(len(keys)), tenant=self._tenant
        )
        return memory if outcome.complete else None

    def _page(self, part: str, memory: Bytes) -> PagedCache:
        spec = KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=memory.shape[1],
            block_tokens=1,
            dtype="uint8",
            components=1,
            fingerprint=_digest(
                repr(("llama.cpp", _VERSION, self._weights, self.facts, part)).encode()
            ),
            kind="state",
        )
        return PagedCache(spec, [memory], AxisOrder("block dim"))


def slot_tokens(data: bytes) -> list[int]:
    """Return the tokens of a slot's file.

    Raises:
        SlotFailed: It is cut, or has a format that is not known.
    """
    try:
        magic, version, words, mark, one, count = struct.unpack_from("<6I", data)
    except struct.error:
        magic = version = words = mark = one = count = 0
    known = (magic, version, mark, one) == (_MAGIC, _VERSION, 2**32 - 1, 1)
    # Two words of the head stand before the words that are counted.
    if not known or count + 4 != words or (_HEAD_WORDS + count) * 4 > len(data):
        raise SlotFailed(
            f"a slot file of {len(data)} bytes is cut, or its version is {version}; "
            f"{_VERSION} is known"
        )
    tokens: list[int] = np.frombuffer(data, "<i4", count, _HEAD_WORDS * 4).tolist()
    return tokens


def _piece_keys(key: bytes, count: int) -> list[bytes]:
    return [
        hashlib.sha256(key + number.to_bytes(8, "little")).digest()
        for number in range(count)
    ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
