"""The options of the four verbs of KV transfers, by name and type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict

from kvwire.errors import UsageError, nearest
from kvwire.kv.blocks import BlockLists
from kvwire.kv.geometry import Tokens, checked_tokens
from kvwire.kv.paged import PagedCache
from kvwire.kv.row_codec import TransferCodec
from kvwire.limits import KV_BLOCKS_MAX, TRANSFER_ID_BYTES_MAX
from kvwire.transfers.dedup import Hashes, Have
from kvwire.types import Deadline, plain, whole


class TransferOptions(TypedDict, total=False):
    """The options of every verb; ``Connection.pull`` explains each."""

    deadline: Deadline
    priority: int
    tokens: Tokens
    hashes: Hashes
    content: bytes | None
    lease_s: float | None
    codec: TransferCodec | None
    free: Callable[[], object] | None


class ReceiveOptions(TransferOptions, total=False):
    """The options of ``pull`` and ``expect``; ``Connection.pull`` explains each."""

    have: Have


class SendOptions(TransferOptions, total=False):
    """The options of ``push``; ``Connection.push`` explains each."""

    group_bytes: int | None
    growing: bool


class PublishOptions(SendOptions, total=False):
    """The options of ``publish``; ``Communicator.publish`` explains each."""

    consumers: int


_VERBS: Final[dict[str, Any]] = {
    "pull": ReceiveOptions,
    "expect": ReceiveOptions,
    "push": SendOptions,
    "publish": PublishOptions,
}


_NUMBERS: Final = frozenset({"priority", "consumers", "group_bytes", "tokens"})


def check_options(verb: str, options: Any) -> None:
    """Refuse options that a verb lacks; convert NumPy integers to plain ones."""
    names = _VERBS[verb].__optional_keys__
    for name, value in options.items():
        if name not in names:
            # The name of such limits elsewhere; `deadline` takes seconds as well.
            meant = "deadline" if name in ("timeout", "timeout_s") else name
            raise UsageError(
                f"{verb}: unknown option {name!r}; {nearest(meant, names)}"
            )
        if name in _NUMBERS:
            options[name] = plain(value)


def grown_lists(lists: BlockLists, tokens: Tokens, cache: PagedCache) -> BlockLists:
    """Return the lists of a growing transfer, with room for all its tokens.

    Raises:
        UsageError: ``tokens`` is missing, or needs fewer blocks than are listed, or
            more blocks than a transfer may have.
    """
    if tokens is None:
        raise UsageError(
            "growing=True: pass tokens=, the number of tokens of the whole transfer"
        )
    room: dict[str, int] = {}
    for name, ids in lists.items():
        count = checked_tokens(tokens, cache)
        if isinstance(count, Mapping):
            if name not in count:
                raise UsageError(f"growing=True: tokens= lacks group {name!r}")
            count = count[name]
        room[name] = -(-count // cache.groups[name].spec.block_tokens)
        if room[name] < ids.size:
            raise UsageError(
                f"growing=True: {ids.size} blocks of group {name!r} exceed the "
                f"{room[name]} blocks that tokens={count} fill"
            )
    if sum(room.values()) > KV_BLOCKS_MAX:
        raise UsageError(
            f"growing=True: tokens={tokens} need {sum(room.values())} blocks; a "
            f"transfer takes 1 to {KV_BLOCKS_MAX}"
        )
    return lists.padded(room)


def transfer_key(id: str | bytes | int) -> bytes:
    """Return a transfer's name on the wire as bytes; 1, "1" and b"1" differ.

    Raises:
        UsageError: The id has another type, or is too long.
    """
    if isinstance(id, str):
        try:
            key = b"s" + id.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(f"transfer id {id!r}: {exc}") from None
    elif isinstance(id, bytes):
        key = b"b" + id
    elif (number := whole(id)) is not None:
        key = b"i%d" % number
    else:
        raise UsageError(f"transfer id {id!r}: pass a str, bytes or int")
    if not 1 < len(key) <= TRANSFER_ID_BYTES_MAX:
        raise UsageError(
            f"the transfer id has {len(key) - 1} bytes; 1 to 255 are allowed"
        )
    return key
