"""``kvwire store locate`` and the other verbs: move and protect a server's blocks."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

import kvwire
from kvwire import BlockState, Config, KVWireError, Placement, UsageError
from kvwire.store.order import VerbOrder, described
from kvwire.store.server.client import apply_verb

NOT_DONE: Final = 1
"""The exit status if a verb fails for a block."""
# The memory for moves to another server, which go through this process.
_PASSAGE: Final = "memory:256MiB"
_NUMBERS: Final = re.compile(r"[\s,\[\]]+")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of a client of a store server.

    Attributes:
        psk_file: The key that the server requires.
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
    """

    psk_file: Path | None = None
    config: Path | None = None

    @property
    def settings(self) -> Config:
        """The configuration of the client."""
        key: dict[str, Any] = {}
        if self.psk_file is not None:
            key = {"trust": "psk", "psk_file": str(self.psk_file)}
        return Config.load(self.config, **key)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BlockOptions(ClientOptions):
    """Options that choose the blocks of a verb, and the format of the answer.

    Attributes:
        tokens: A file with a prompt's token ids, in place of hashes: a JSON list, or
            numbers separated by spaces; - means standard input.
        block_tokens: The number of tokens in a block; needed with --tokens.
        scheme: How tokens are hashed: by kvwire's HashScheme, as vLLM engines with
            KvwireStoreConnector do, or by vllm's sha256_cbor.
        seed: The scheme's seed; with vllm, the engines' PYTHONHASHSEED.
        cache_salt: The cache_salt of the engine's request.
        tenant: The tenant's name; needs the operator's key.
        json: Print JSON instead.
    """

    tokens: str = ""
    block_tokens: int = 0
    scheme: Literal["kvwire", "vllm"] = "kvwire"
    seed: str = ""
    cache_salt: str = ""
    tenant: str = ""
    json: bool = False

    def order(self, hashes: tuple[str, ...], **arguments: Any) -> VerbOrder:
        """Return the order for these blocks."""
        tokens = _tokens(self.tokens) if self.tokens else []
        return VerbOrder(
            hashes=list(hashes),
            tokens=tokens,
            block_tokens=self.block_tokens,
            scheme=self.scheme,
            seed=self.seed,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            **arguments,
        )


_BLOCKS: Final = BlockOptions()
_Ttl = Annotated[float | None, Parameter(name="--ttl-s")]


def locate(address: str, /, *hashes: str, blocks: BlockOptions = _BLOCKS) -> int:
    """Show which tiers of a served store have some blocks.

    The exit status is 1 if a block is in no tier. The search covers every kind of cache
    that the server has stored.

    Args:
        address: The server's address.
        hashes: The hashes, in hexadecimal digits, in the order of the chain.
        blocks: More about the blocks.
    """
    return _carry_out("locate", address, blocks, blocks.order(hashes))


def prefetch(
    address: str, /, *hashes: str, tier: str = "", blocks: BlockOptions = _BLOCKS
) -> int:
    """Copy blocks into a faster tier of a served store, by default its memory.

    Args:
        address: The server's address.
        hashes: The hashes, in hexadecimal digits, in the order of the chain.
        tier: The tier's address, or its kind if only one tier has it.
        blocks: More about the blocks.
    """
    return _carry_out("prefetch", address, blocks, blocks.order(hashes, tier=tier))


def demote(
    address: str, /, *hashes: str, tier: str = "", blocks: BlockOptions = _BLOCKS
) -> int:
    """Free blocks from a served store's memory, once a lower tier has them.

    Args:
        address: The server's address.
        hashes: The hashes, in hexadecimal digits, in the order of the chain.
        tier: The tier's address, or its kind; by default the first below memory.
        blocks: More about the blocks.
    """
    return _carry_out("demote", address, blocks, blocks.order(hashes, tier=tier))


def pin(
    address: str, /, *hashes: str, ttl_s: _Ttl = None, blocks: BlockOptions = _BLOCKS
) -> int:
    """Protect blocks of a served store from eviction.

    Args:
        address: The server's address.
        hashes: The hashes, in hexadecimal digits, in the order of the chain.
        ttl_s: Seconds after which the pin ends; by default, it does not end.
        blocks: More about the blocks.
    """
    return _carry_out("pin", address, blocks, blocks.order(hashes, ttl_s=ttl_s))


def unpin(address: str, /, *hashes: str, blocks: BlockOptions = _BLOCKS) -> int:
    """Allow blocks of a served store to be evicted again.

    Args:
        address: The server's address.
        hashes: The hashes, in hexadecimal digits, in the order of the chain.
        blocks: More about the blocks.
    """
    return _carry_out("unpin", address, blocks, blocks.order(hashes))


def retain(
    address: str,
    /,
    *hashes: str,
    priority: int,
    ttl_s: _Ttl = None,
    blocks: BlockOptions = _BLOCKS,
) -> int:
    """Set how early a served store evicts blocks.

    Args:
        address: The server's address.
        hashes: The hashes, in hexadecimal digits, in the order of the chain.
        priority: 0 to 100, where 0 is evicted first and all other blocks have 50.
        ttl_s: Seconds after which the priority is 50 again; by default, never.
        blocks: More about the blocks.
    """
    order = blocks.order(hashes, priority=priority, ttl_s=ttl_s)
    return _carry_out("retain", address, blocks, order)


def move(address: str, /, *hashes: str, to: str, blocks: BlockOptions = _BLOCKS) -> int:
    """Copy blocks of a served store to another server, or to a node.

    Args:
        address: The server's address.
        hashes: The hashes, in hexadecimal digits, in the order of the chain.
        to: Another server, kvwire://HOST:PORT with a tier's options: the blocks are
            copied through this process. Or the name of a node in one of the server's
            tiers.
        blocks: More about the blocks.
    """
    return _carry_out("move", address, blocks, blocks.order(hashes, to=to))


def add_to(app: App) -> None:
    """Make the verbs commands of `kvwire store`."""
    for verb in (locate, prefetch, demote, pin, unpin, retain, move):
        app.command(verb)


def _carry_out(name: str, address: str, blocks: BlockOptions, order: VerbOrder) -> int:
    where = address.removeprefix("kvwire://")
    verb = order.verb(name)
    hashes = order.named()
    if order.to.startswith("kvwire://"):
        work = _moved(where, blocks, order, hashes)
    else:
        work = apply_verb(where, blocks.settings, verb, hashes, order.tenant)
    try:
        placement = asyncio.run(work)
    except OSError as exc:
        if isinstance(exc, KVWireError):
            raise  # it names the address
        raise KVWireError(f"{address}: {exc.strerror or exc}") from None
    if blocks.json:
        document = msgspec.json.encode(described(placement))
        sys.stdout.buffer.write(msgspec.json.format(document) + b"\n")
    else:
        _show(placement)
    return 0 if placement.complete else NOT_DONE


async def _moved(
    where: str, blocks: BlockOptions, order: VerbOrder, hashes: list[bytes]
) -> Placement:
    """Move blocks from one server to another by way of this process."""
    if blocks.config is not None:
        raise UsageError("--config: for a move to another server, pass --psk-file")
    key = "" if blocks.psk_file is None else f"?psk_file={blocks.psk_file}"
    tenants = [order.tenant] if order.tenant else []
    tiers = [_PASSAGE, f"kvwire://{where}{key}"]
    async with kvwire.BlockStore.open(tiers, tenants=tenants) as store:
        return await store.move(hashes, to=order.to, keep=True, tenant=order.tenant)


def _tokens(file: str) -> list[int]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text()
    try:
        return [int(one) for one in _NUMBERS.split(text) if one]
    except ValueError as exc:
        raise UsageError(f"--tokens {file}: token ids are numbers: {exc}") from None


def _show(placement: Placement) -> None:
    """Print a row for each run of blocks with the same result."""
    table = Table("blocks", "state", "", box=None, pad_edge=False)
    for first, last in _runs(placement):
        held = [name for name, bits in placement.held.items() if bits[first]]
        numbers = f"{first}" if first == last else f"{first}-{last}"
        state = BlockState(placement.states[first]).name.lower()
        table.add_row(numbers, state, placement.reason(first) or ", ".join(held))
    # Not cut where a screen ends: an address has to be whole.
    console = Console(width=400, highlight=False, markup=False)
    console.print(table)
    print(", ".join(f"{count} {name}" for name, count in placement.counts.items()))


def _runs(placement: Placement) -> Iterator[tuple[int, int]]:
    """Yield the first and the last block of each run."""
    columns = [placement.states, placement.codes, *placement.held.values()]
    table = np.array(columns, np.int64)
    borders = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(axis=0)) + 1
    firsts = [0, *borders.tolist()]
    lasts = [one - 1 for one in firsts[1:]] + [len(placement) - 1]
    yield from zip(firsts, lasts, strict=True)
