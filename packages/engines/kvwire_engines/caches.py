"""The KV of one model's sequences, kept in a store or moved: one call each.

A program makes an empty cache of its engine, and fills it with the stored part of the
prompt's beginning. The engine computes the rest::

    kept = TransformersCaches(store, model, weights=weights_name(folder))
    cache = DynamicCache(config=model.config)
    known = await kept.get(prompt, cache)
    output = model.generate(torch.tensor([prompt]), cache=cache)
    await kept.put(output[0], cache)

KV is stored in blocks under the hashes of their tokens, so prompts with a common
beginning share its blocks. The tokens after the last full block are computed again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire import Communicator, Connection, Outcome, PagedCache
from kvwire.aio import gather_all, run_to_completion
from kvwire.errors import UsageError
from kvwire.kv.hashing import HashScheme
from kvwire_engines.sources import (
    PLAIN,
    BlockRows,
    Rows,
    Shape,
    Source,
    raw_dtype,
    vllm_sources,
)
from kvwire_engines.whole import KeptLayer, State, WholeStates
from kvwire_store import BlockStore
from kvwire_store.conventions import Meaning, Turned, require_known, rotates_so

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | Any
"""Ids of one sequence's tokens: a list, or an array or tensor of 1 or 1 x n."""
Ids: TypeAlias = npt.NDArray[np.int64]
RowPair: TypeAlias = tuple[Rows, Rows]


class Caches(ABC):
    """Keeps and moves the KV of one model; subclasses know one engine's caches.

    Args:
        store: The store, of the event loop that calls the methods.
        model: The engine's model. A forward pass over one token shows the shape of its
            KV.
        weights: A name for the weights and adapters, from
            :func:`kvwire_store.weights.weights_name`; KV of other weights is not found.
        block_tokens: Tokens per block.
        tenant: The tenant that owns the blocks.
        others: Other engines whose KV is taken too; see
            :mod:`kvwire_store.conventions`.

    Attributes:
        store: The store.
        tenant: The tenant.
        shape: What the model keeps of each token.
        sources: Whose blocks are found, the engine's own first.

    Raises:
        UsageError: The model's layers differ in shape or keep something else than keys
            and values, or KV of another engine cannot be used here.
    """

    engine: ClassVar[str]
    """The engine's name in :mod:`kvwire_store.conventions`."""

    def __init__(
        self,
        store: BlockStore,
        model: Any,
        *,
        weights: str,
        block_tokens: int = 16,
        tenant: str = "",
        others: Sequence[str] = (),
    ) -> None:
        if not weights:
            raise UsageError(
                f"{type(self).__name__}: weights is empty: pass "
                "kvwire_store.weights.weights_name(folder), or a text that names the "
                "weights, the same in all processes that share KV"
            )
        self.store = store
        self._weights = weights
        self.tenant = tenant
        self._scheme = HashScheme(block_tokens)
        self.shape: Shape = self._measure(model)
        meaning, turned, facts = self._meaning(model)
        known = rotates_so(meaning, turned, self.shape.width)
        for other in others:
            where = f"KV of {other} in {self.engine}"
            require_known(where, other, meaning)
            if not known:
                raise UsageError(
                    f"{where}: {self.engine} rotates keys by other angles than the "
                    f"config names ({meaning.rotation}, {dict(meaning.numbers)})"
                )
        own = meaning.named(weights, self.engine)
        if not known:
            # It is found by the same engine with the same config alone.
            own += f" {sha256(facts.encode()).hexdigest()[:16]}"
        self._own = Source(own, block_tokens)
        self.sources: list[Source] = [self._own]
        for other in others:
            named = meaning.named(weights, other)
            if other == "vllm":
                self.sources += vllm_sources(named)
            else:
                self.sources.append(Source(named, block_tokens))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._weights}; {self.shape}>"

    async def put(self, tokens: Tokens, cache: Any) -> int:
        """Store a cache's KV; return the number of tokens stored.

        It is stored in full blocks. A cache that has dropped tokens before a window is
        stored whole, for prompts that begin with all of its tokens.

        Args:
            tokens: The tokens of the sequence. Those after the cache's last token may
                be left out or not: the last generated token has no KV yet.
            cache: The engine's cache, of one sequence.

        Raises:
            UsageError: The cache holds more tokens than `tokens`, or several sequences;
                or it is of a type that is not supported.
            ClosedOK: The store is closed.

        Cancel safety: the put is finished first, so the cache may be used afterwards.
        """
        ids = token_ids(tokens)
        length = self._length(cache)
        if length > ids.size:
            raise UsageError(
                f"{type(self).__name__}.put: the cache holds {length} tokens, but "
                f"tokens has {ids.size}; pass all tokens that the model has seen"
            )
        if self._lacks_tokens(cache):
            whole = self._whole_states().put(ids[:length], self._state(cache))
            return length if await run_to_completion(whole) else 0
        hashes = self._scheme.block_hashes(ids[:length])
        if not hashes:
            return 0
        paged = self._paged(cache, len(hashes))

        async def stored() -> int:
            put = self.store.put(hashes, paged, range(len(hashes)), tenant=self.tenant)
            outcome = await put
            await put.drained()
            return outcome.usable_tokens

        return await run_to_completion(stored())

    async def get(self, tokens: Tokens, cache: Any) -> int:
        """Fill an empty cache with the longest stored beginning of a prompt.

        Args:
            tokens: The prompt. At least its last token is left to the model.
            cache: An empty cache of the engine.

        Returns:
            The number of leading tokens whose KV the cache holds now.

        Raises:
            UsageError: The cache is not empty, or of a type that is not supported.
            ClosedOK: The store is closed.

        Cancel safety: the cache is filled at once at the end, or not at all.
        """
        shape = self._form(cache)
        ids = token_ids(tokens)[:-1]
        chains = {
            source.block_tokens: HashScheme(source.block_tokens).block_hashes(ids)
            for source in self.sources
        }
        found = await gather_all(
            *(
                self.store.match(
                    chains[source.block_tokens],
                    source.landing(shape, 1).paged,
                    tenant=self.tenant,
                )
                for source in self.sources
            )
        )
        # The first of several that are equally long: the engine's own.
        blocks, best = max(
            zip(found, self.sources, strict=True),
            key=lambda one: one[0] * one[1].block_tokens,
        )
        known = blocks * best.block_tokens
        if self._has_window(cache) and (
            length := await self._restored(ids, cache, known)
        ):
            return length
        if not blocks:
            return 0
        hashes = chains[best.block_tokens][:blocks]
        landing = best.landing(shape, len(hashes))
        outcome = await self.store.get(
            hashes, landing.paged, range(len(hashes)), tenant=self.tenant
        )
        self._fill(cache, landing, outcome.usable_tokens)
        return outcome.usable_tokens

    def publish(
        self, communicator: Communicator, id: str, tokens: Tokens, cache: Any
    ) -> Any:
        """Offer a prompt's KV in full blocks to the process that pulls it.

        Args:
            communicator: The communicator that offers it.
            id: The name of the transfer.
            tokens: The prompt, the same on both sides.
            cache: The cache; its first tokens are the prompt's.

        Returns:
            The transfer, as :meth:`kvwire.Communicator.publish` returns it. Leave the
            cache alone until it has drained.

        Raises:
            UsageError: As for :meth:`put`; or the prompt has no full block, or the
                cache holds fewer tokens.
        """
        blocks = self._full_blocks(tokens)
        if self._lacks_tokens(cache):
            raise UsageError(
                f"{type(self).__name__}.publish: the cache has dropped tokens before "
                "its window; publish it before, or put it into a store"
            )
        if self._length(cache) < blocks * self._scheme.block_tokens:
            raise UsageError(
                f"{type(self).__name__}.publish: the cache holds "
                f"{self._length(cache)} tokens of {token_ids(tokens).size}; compute "
                "the prompt first"
            )
        out = communicator.publish(id, self._paged(cache, blocks), range(blocks))
        out.ready()
        out.finish()
        return out

    async def pull(
        self, connection: Connection, id: str, tokens: Tokens, cache: Any
    ) -> Outcome:
        """Fill an empty cache with KV that another process has published.

        Args:
            connection: The connection to that process.
            id: The name of the transfer.
            tokens: The prompt, the same on both sides.
            cache: An empty cache of the engine.

        Returns:
            The outcome: the cache holds ``usable_tokens`` tokens now. If the other
            process has other weights, another engine or another form of KV, these are
            0, and ``missing.reasons`` name the difference.

        Raises:
            UsageError: As for :meth:`get`; or the prompt has no full block.
            ClosedOK: The connection is closed.

        Cancel safety: the cache is filled at once at the end, or not at all.
        """
        blocks = self._full_blocks(tokens)
        landing = self._own.landing(self._form(cache), blocks)
        outcome = await connection.pull(id, landing.paged, range(blocks))
        self._fill(cache, landing, outcome.usable_tokens)
        return outcome

    # --- of each engine ---------------------------------------------------------------

    @abstractmethod
    def _meaning(self, model: Any) -> tuple[Meaning, Turned, str]:
        """Return the meaning of the model's KV, its rotation, and its whole config."""

    @abstractmethod
    def _measure(self, model: Any) -> Shape:
        """Return the shape of the model's KV, from a pass over one token."""

    @abstractmethod
    def _length(self, cache: Any) -> int:
        """Return how many tokens a cache has seen; refuse several sequences."""

    @abstractmethod
    def _lacks_tokens(self, cache: Any) -> bool:
        """Return whether a cache has dropped tokens before a window."""

    @abstractmethod
    def _has_window(self, cache: Any) -> bool:
        """Return whether an empty cache will drop tokens before a window."""

    @abstractmethod
    def _state(self, cache: Any) -> State:
        """Return all that a cache which has dropped tokens needs to go on."""

    @abstractmethod
    def _fits(self, layer: Any, kept: KeptLayer, length: int) -> bool:
        """Return whether an empty layer can go on as it was kept, at so many tokens."""

    @abstractmethod
    def _go_on(self, layer: Any, kept: KeptLayer, rows: RowPair, length: int) -> None:
        """Fill an empty layer as it was kept, behind so many tokens."""

    @abstractmethod
    def _layers(self, cache: Any) -> list[Any]:
        """Return a cache's layers."""

    @abstractmethod
    def _form(self, cache: Any) -> Shape:
        """Return the shape of the KV that fills an empty cache."""

    @abstractmethod
    def _form_of(self, cache: Any) -> Shape:
        """Return the shape of the KV in a cache with tokens."""

    @abstractmethod
    def _read(self, cache: Any, tokens: int) -> list[tuple[Any, Any]]:
        """Return views of the first tokens' keys and values, as :data:`Rows`."""

    @abstractmethod
    def _write(self, cache: Any, rows: list[tuple[Rows, Rows]]) -> None:
        """Fill an empty cache with the first tokens' rows."""

    # --- inside -----------------------------------------------------------------------

    async def _restored(self, ids: Ids, cache: Any, known: int) -> int:
        """Fill a cache with a whole state of more tokens than `known`, or return 0."""
        states = self._whole_states()
        length = await states.longest(ids)
        if length <= known:
            return 0
        state = await states.get(ids[:length])
        if state is None or len(state.layers) != len(self._layers(cache)):
            return 0
        pairs = zip(self._layers(cache), state.layers, strict=True)
        if not all(self._fits(layer, kept, length) for layer, kept in pairs):
            return 0
        shape = self.shape
        flat = state.body.view(raw_dtype(shape.dtype))
        first = 0
        for layer, kept in zip(self._layers(cache), state.layers, strict=True):
            stop = first + 2 * shape.kv_heads * kept.rows * shape.width
            rows = flat[first:stop].reshape(2, shape.kv_heads, kept.rows, shape.width)
            self._go_on(layer, kept, (rows[0], rows[1]), length)
            first = stop
        return length

    def _whole_states(self) -> WholeStates:
        shape = self.shape
        size = np.dtype(raw_dtype(shape.dtype)).itemsize
        return WholeStates(
            self.store,
            f"{self._own.name} {shape.layers}x{shape.kv_heads}x{shape.width} "
            f"{shape.dtype}",
            2 * shape.kv_heads * shape.width * size,
            self.tenant,
        )

    def _full_blocks(self, tokens: Tokens) -> int:
        size = token_ids(tokens).size
        blocks = max(0, size - 1) // self._scheme.block_tokens
        if not blocks:
            raise UsageError(
                f"{type(self).__name__}: a prompt of {size} tokens has no full block "
                f"of {self._scheme.block_tokens} before its last token; compute it"
            )
        return blocks

    def _paged(self, cache: Any, blocks: int) -> PagedCache:
        """View a cache's first tokens as blocks."""
        size = self._scheme.block_tokens
        pairs = [
            tuple(one.reshape(one.shape[0], blocks, size, one.shape[2]) for one in pair)
            for pair in self._read(cache, blocks * size)
        ]
        return PagedCache(self._own.spec(self._form_of(cache)), pairs, PLAIN)

    def _fill(self, cache: Any, landing: BlockRows, tokens: int) -> None:
        if tokens:
            pairs = landing.rows()
            self._write(cache, [(k[:, :tokens], v[:, :tokens]) for k, v in pairs])


def same_shapes(found: Sequence[tuple[Any, ...]], what: str) -> tuple[Any, ...]:
    """Return the one shape that all layers have.

    Raises:
        UsageError: They differ, or keys and values do.
    """
    if len(set(found)) != 1:
        raise UsageError(
            f"{what}: its layers keep keys and values of {len(set(found))} different "
            "shapes; use kvwire.PagedCache.grouped on tensors of your own"
        )
    return found[0]


def token_ids(tokens: Tokens) -> npt.NDArray[np.int64]:
    """Return one sequence's tokens as an array.

    Raises:
        UsageError: They are of several sequences.
    """
    ids = np.asarray(tokens)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise UsageError(
            f"tokens has shape {ids.shape}; pass those of one sequence, once for each"
        )
    return ids.astype(np.int64)
