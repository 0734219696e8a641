"""The sessions of a llama-server, kept in a store and restored by any server like it.

The server needs no change. It is asked by HTTP to save a slot into a file or to restore
one, and its slot folder (``--slot-save-path``) is on this machine::

    url = "http://127.0.0.1:8080"
    async with LlamaCppSessions(store, url, "/dev/shm/slots") as sessions:
        known = await sessions.get(0, prompt)  # slot 0 holds so many of its tokens now
        ...  # the server answers, with "id_slot": 0
        await sessions.put(0)

KV is stored in blocks under the hashes of their tokens. So sessions with a common
beginning share its blocks, and a session goes on from any stored beginning. It is found
by servers with the same weights and adapters whose caches have the same types and the
same order of values (flash attention); by others it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from kvwire import KVSpec, PagedCache
from kvwire.aio import gather_all, run_to_completion
from kvwire.errors import KVWireError, UsageError, error_text, shown
from kvwire.extras import needed_by
from kvwire.kv.hashing import HashScheme
from kvwire.kv.layout import AxisOrder
from kvwire_engines.llamacpp.others import OTHERS_TOKENS, OtherEngines, SlotBlocks
from kvwire_engines.llamacpp.slot_file import (
    Rows,
    SlotFile,
    SlotForm,
    TokenIds,
    read_slot,
    write_slot,
)
from kvwire_store import BlockStore
from kvwire_store.weights import weights_name

with needed_by("LlamaCppSessions", extra="llamacpp", distribution="kvwire-engines"):
    import aiohttp

logger: logging.Logger = logging.getLogger("kvwire.llamacpp")

BLOCK_TOKENS: Final = 32
"""Tokens of a block: at most so many less one of a session are computed again."""
_AXES: Final = AxisOrder("head block token dim")
# Saving or restoring a slot copies its KV. Even /slots is answered between two batches,
# which take seconds on CPUs or a busy host.
_ANSWER_TIMEOUT_S: Final = 120.0
# Left by a process that was killed.
_STALE_S: Final = 3600.0
# What identifies the model that the server has loaded.
_PROPS: Final = ("model_path", "model_alias", "model_ftype", "n_ctx", "build_info")


class EngineLost(KVWireError):
    """The llama-server cannot be reached, or refuses a request.

    Attributes:
        status: The status of its answer; None if there was none.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status: int | None = status


class ServerIdentity(NamedTuple):
    """The model and settings of a llama-server: two that differ are never equal.

    Attributes:
        props: What it reports about its model and itself.
        adapters: The path and scale of each adapter that is on.
        slots: The number of its slots.
    """

    props: tuple[str, ...]
    adapters: tuple[tuple[str, float], ...]
    slots: int

    @property
    def named_by(self) -> tuple[str, ...]:
        """Return the files of the model and its adapters, with their scales."""
        return (self.props[0], *(f"{path}*{scale}" for path, scale in self.adapters))


class LlamaCppSessions:
    """Keeps and restores the slots of one llama-server. Use it in ``async with``.

    Args:
        store: The store, of the event loop that calls the methods.
        url: The server's address.
        folder: The server's ``--slot-save-path``, as this process sees it. A folder in
            memory (``/dev/shm``) saves the disk; each file is removed after its use.
        weights: A name for weights, adapters and everything that changes what the model
            computes; "" to derive it from the files that the server reports, if they
            are on this machine.
        tenant: The tenant that owns the blocks.
        others: Other engines whose KV is taken too, if it is longer; see
            :mod:`kvwire_engines.llamacpp.others`.
        made_from: The folder that those engines load, and from which the GGUF was made.

    Raises:
        UsageError: The folder is none, aiohttp is not installed, or an engine is not
            known.
    """

    def __init__(
        self,
        store: BlockStore,
        url: str,
        folder: str | Path,
        *,
        weights: str = "",
        tenant: str = "",
        others: Sequence[str] = (),
        made_from: str | Path = "",
    ) -> None:
        self.url: str = url.rstrip("/")
        if not re.match(r"https?://[^/]", self.url):
            raise UsageError(f"url={shown(url)}: write http://HOST:PORT")
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise UsageError(
                f"folder={shown(str(folder))}: there is no such folder; pass the "
                "--slot-save-path of the llama-server"
            )
        self._store = store
        self._weights = weights
        self._tenant = tenant
        self._scheme = HashScheme(BLOCK_TOKENS)
        self._others = OtherEngines(others, made_from)
        if others and weights:
            raise UsageError(
                f"others={others}: weights that need a name are not those of a folder "
                "alone; leave one of the two out"
            )
        self._session: aiohttp.ClientSession | None = None
        self._known: tuple[ServerIdentity, SlotForm] | None = None
        # bounded: the models that one server loads
        self._names: dict[tuple[str, ...], str] = {}

    def __repr__(self) -> str:
        return f"<LlamaCppSessions {self.url}>"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        await asyncio.to_thread(self._sweep)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await run_to_completion(self._session.close())

    async def identity(
        self, headers: Mapping[str, str] | None = None
    ) -> ServerIdentity:
        """Return the identity of the server's present model.

        Args:
            headers: Headers for the server, such as Authorization.

        Raises:
            EngineLost: It cannot be reached.

        Cancel safety: safe, nothing changes.
        """
        props, adapters = await gather_all(
            self._ask("GET", "/props", headers=headers),
            self._ask("GET", "/lora-adapters", headers=headers),
        )
        with self._expected("/props"):
            fields = props.get("default_generation_settings", {}) | props
            return ServerIdentity(
                tuple(str(fields.get(name, "")) for name in _PROPS),
                tuple(
                    (str(one["path"]), float(one["scale"]))
                    for one in adapters
                    if one["scale"]
                ),
                int(props["total_slots"]),
            )

    async def held(self, headers: Mapping[str, str] | None = None) -> dict[int, int]:
        """Return how many tokens each slot holds; nothing if the server hides that.

        Raises:
            EngineLost: The server cannot be reached.

        Cancel safety: safe, nothing changes.
        """
        try:
            slots = await self._ask("GET", "/slots", headers=headers)
        except EngineLost as exc:
            if exc.status is None:
                raise
            return {}  # --no-slots
        with self._expected("/slots"):
            return {int(one["id"]): int(one.get("n_prompt_tokens", 0)) for one in slots}

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        field: str,
        headers: Mapping[str, str] | None,
    ) -> Any:
        """Return a field of the server's answer to a POST that changes nothing.

        Args:
            path: Such as ``/tokenize``.
            body: The request's fields.
            field: The answer's field.
            headers: Headers for the server, such as Authorization.

        Raises:
            EngineLost: It cannot be reached, or it answers with an error.

        Cancel safety: safe, nothing changes.
        """
        answer = await self._ask("POST", path, headers=headers, body=body)
        with self._expected(path):
            return answer[field]

    async def get(
        self,
        slot: int,
        tokens: Sequence[int] | TokenIds,
        *,
        more_than: int = 0,
        identity: ServerIdentity | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Fill a slot with the longest stored beginning of a prompt.

        Args:
            slot: The number of an idle slot.
            tokens: The prompt's tokens. At least the last one is left to the server.
            more_than: The tokens that the slot holds already; it is left alone unless
                more are stored.
            identity: What the server serves, if that is known.
            headers: Headers for the server, such as Authorization.

        Returns:
            The number of leading tokens that the slot holds because of this call; 0 if
            it was left alone.

        Raises:
            EngineLost: The server cannot be reached, or it did not restore what it was
                given; then the slot is empty.
            UsageError: The weights have no name, or the model's KV cannot be kept.
            ClosedOK: The store is closed.

        Cancel safety: a restore that has begun is finished first.
        """
        ids = np.asarray(tokens, np.int64)
        smallest = OTHERS_TOKENS if self._others.engines else BLOCK_TOKENS
        if (ids.size - 1) // smallest * smallest <= more_than:
            return 0
        before = identity or await self.identity(headers)
        name, form = await self._form(slot, before, headers)
        kinds = [
            SlotBlocks(BLOCK_TOKENS, lambda count: self._landing(name, form, count))
        ]
        if self._others.engines and not before.adapters:
            path = before.props[0]
            kinds += await asyncio.to_thread(self._others.blocks, path, form)
        made = await self._longest(kinds, ids, form, more_than)
        if made is None:
            return 0
        return await run_to_completion(self._restore(slot, made, before, headers))

    async def put(self, slot: int, headers: Mapping[str, str] | None = None) -> int:
        """Store a slot's full blocks; return the number of tokens stored.

        Args:
            slot: The number of an idle slot.
            headers: Headers for the server, such as Authorization.

        Raises:
            EngineLost: The server cannot be reached or has not saved the slot.
            UsageError: The weights have no name, or the model's KV cannot be kept: it
                has windows or states.
            ClosedOK: The store is closed.

        Cancel safety: the put is finished first.
        """
        return await run_to_completion(self._put(slot, headers))

    # --- inside -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _expected(self, path: str) -> Iterator[None]:
        """Name an answer that is not llama-server's."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise EngineLost(
                f"{self.url}{path}: the answer is not llama-server's: {error_text(exc)}"
            ) from None

    async def _put(self, slot: int, headers: Mapping[str, str] | None) -> int:
        before = await self.identity(headers)
        name = await self._name(before)
        saved = await self._save(slot, headers)
        if saved is None:
            return 0
        if await self.identity(headers) != before:
            raise EngineLost(f"{self.url}: another model was loaded meanwhile")
        self._known = before, saved.form
        hashes = self._scheme.block_hashes(saved.tokens)
        if not hashes:
            return 0
        paged = self._paged(name, saved.form, saved.rows, len(hashes))
        put = self._store.put(hashes, paged, range(len(hashes)), tenant=self._tenant)
        outcome = await put
        await put.drained()
        return outcome.usable_tokens

    async def _longest(
        self, kinds: Sequence[SlotBlocks], ids: TokenIds, form: SlotForm, more_than: int
    ) -> SlotFile | None:
        """Return the longest stored beginning; the first, if several are equal."""
        chains = {
            size: HashScheme(size).block_hashes(ids[:-1])
            for size in {kind.block_tokens for kind in kinds}
        }
        found = await gather_all(
            *(
                self._store.match(
                    chains[kind.block_tokens], kind.landing(1)[0], tenant=self._tenant
                )
                for kind in kinds
            )
        )
        blocks, best = max(
            zip(found, kinds, strict=True), key=lambda one: one[0] * one[1].block_tokens
        )
        if blocks * best.block_tokens <= more_than:
            return None
        paged, rows = best.landing(blocks)
        outcome = await self._store.get(
            chains[best.block_tokens][:blocks],
            paged,
            range(blocks),
            tenant=self._tenant,
        )
        count = outcome.usable_tokens
        if count <= more_than:
            return None
        return SlotFile(form, ids[:count], rows()[:, :count])

    async def _restore(
        self,
        slot: int,
        made: SlotFile,
        before: ServerIdentity,
        headers: Mapping[str, str] | None,
    ) -> int:
        """Let the server restore a slot, and check that it has restored all of it."""
        path = self._new_file()
        done: Any = {}
        try:
            await asyncio.to_thread(lambda: path.write_bytes(write_slot(made)))
            done = await self._slot("restore", slot, headers, path)
        except OSError as exc:  # such as a full folder
            raise EngineLost(f"{path}: {error_text(exc)}") from None
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        with self._expected("/slots"):
            restored = done.get("n_restored")
        # A swap of the model is only noticed afterwards: the restored KV then belongs
        # to other weights.
        same = await self.identity(headers) == before
        if restored != made.tokens.size or not same:
            await self._slot("erase", slot, headers)
            self._known = None
            raise EngineLost(
                f"{self.url}: it restored {restored} of {made.tokens.size} tokens"
                if same
                else f"{self.url}: another model was loaded meanwhile"
            )
        return int(made.tokens.size)

    async def _form(
        self, slot: int, now: ServerIdentity, headers: Mapping[str, str] | None
    ) -> tuple[str, SlotForm]:
        """Return the name of the weights, and the form of the server's slots.

        The form is that of a saved slot; a slot without tokens computes one first.
        """
        name = await self._name(now)
        if self._known is not None and self._known[0] == now:
            return name, self._known[1]
        saved = await run_to_completion(self._save(slot, headers))
        if saved is None:
            body = {"prompt": "a", "n_predict": 1, "id_slot": slot}
            await self._ask("POST", "/completion", headers=headers, body=body)
            saved = await run_to_completion(self._save(slot, headers))
        if saved is None:
            raise EngineLost(f"{self.url}: slot {slot} holds nothing after a request")
        self._known = now, saved.form
        return name, saved.form

    async def _save(
        self, slot: int, headers: Mapping[str, str] | None
    ) -> SlotFile | None:
        """Let the server save a slot, and read it; None if the slot has no tokens."""
        path = self._new_file()
        try:
            done = await self._slot("save", slot, headers, path)
            with self._expected("/slots"):
                if not done["n_saved"]:
                    return None
            return await asyncio.to_thread(lambda: read_slot(path.read_bytes()))
        except FileNotFoundError:
            raise UsageError(
                f"{self.url} saved slot {slot}, but {path} is not there: pass the "
                "server's --slot-save-path, which must be on this machine"
            ) from None
        except OSError as exc:
            raise EngineLost(f"{path}: {error_text(exc)}") from None
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _name(self, identity: ServerIdentity) -> str:
        """Return the name of the weights that the server has loaded."""
        paths = [identity.props[0], *(path for path, _ in identity.adapters)]
        if self._weights:
            paths = paths[1:]  # a name of the user's, and adapters that come and go
        named = await asyncio.to_thread(self._named, paths)
        if self._weights:
            named.insert(0, self._weights)
        scales = [f"{scale:g}" for _, scale in identity.adapters]
        made = " ".join((named[0], *map("*".join, zip(named[1:], scales, strict=True))))
        if self._names.setdefault(identity.named_by, made) != made:
            raise UsageError(
                f"{self.url}: {shown(' or '.join(paths))} has changed, and the server "
                "may have loaded it before or after that; begin anew once the server "
                "has loaded it, and give another model another path"
            )
        return made

    def _named(self, paths: list[str]) -> list[str]:
        """Return a name for the content of each file."""
        for path in paths:
            if not Path(path).is_file():
                raise UsageError(
                    f"{self.url} serves {shown(path)}, which is not on this machine, "
                    "so its content cannot be named: pass weights, the same text at "
                    "all servers that share KV"
                )
        return list(map(weights_name, paths))

    def _spec(self, name: str, form: SlotForm) -> KVSpec:
        return KVSpec(
            layers=form.layers,
            kv_heads=1,
            head_dim=form.row_bytes,
            block_tokens=BLOCK_TOKENS,
            dtype="uint8",
            components=1,
            fingerprint=f"{name} llama.cpp {form.name}",
        )

    def _paged(self, name: str, form: SlotForm, rows: Any, blocks: int) -> PagedCache:
        """View rows as blocks."""
        full = rows[:, : blocks * BLOCK_TOKENS]
        tensors = full.reshape(form.layers, 1, blocks, BLOCK_TOKENS, form.row_bytes)
        return PagedCache(self._spec(name, form), list(tensors), _AXES)

    def _landing(
        self, name: str, form: SlotForm, blocks: int
    ) -> tuple[PagedCache, Callable[[], Rows]]:
        """Return memory for blocks, and a function that returns it as rows."""
        shape = form.layers, blocks * BLOCK_TOKENS, form.row_bytes
        rows = np.empty(shape, np.uint8)
        return self._paged(name, form, rows, blocks), lambda: rows

    def _new_file(self) -> Path:
        return self._folder / f"kvwire-{uuid.uuid4().hex}.slot"

    def _sweep(self) -> None:
        """Remove files that killed processes have left."""
        for path in self._folder.glob("kvwire-*.slot"):
            try:
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
            except OSError:  # another process was faster
                continue

    async def _slot(
        self,
        action: str,
        slot: int,
        headers: Mapping[str, str] | None,
        path: Path | None = None,
    ) -> Any:
        body = {} if path is None else {"filename": path.name}
        where = f"/slots/{slot}?action={action}"
        return await self._ask("POST", where, headers=headers, body=body)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        """Ask the server, and return the answer's content.

        Raises:
            EngineLost: It cannot be reached, or it answers with an error.
        """
        if self._session is None:
            raise UsageError("LlamaCppSessions: use it in `async with`")
        timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S, sock_connect=10)
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=headers, timeout=timeout
            ) as response:
                found = await response.json(content_type=None)
                if response.status == 200:
                    return found
                error = found.get("error") if isinstance(found, dict) else found
                message = error.get("message") if isinstance(error, dict) else error
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise EngineLost(f"{self.url}{path}: {error_text(exc)}") from None
        why = f"{self.url}{path}: {response.status}: {shown(str(message))}"
        raise EngineLost(why, response.status)
