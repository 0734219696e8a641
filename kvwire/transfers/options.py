"""The options of the four verbs of KV transfers, by name and type."""

from __future__ import annotations

from typing import Any, Final, TypedDict

from kvwire.errors import UsageError, nearest
from kvwire.kv.codecs.rows import TransferCodec
from kvwire.kv.geometry import Tokens
from kvwire.transfers.dedup import Hashes, Have
from kvwire.types import Deadline, plain


class TransferOptions(TypedDict, total=False):
    """Lists what every verb takes.

    Attributes:
        deadline: When it ends with what has landed; as for ``send``.
        priority: 0 to 255; chunks of a higher one go first.
        tokens: Valid tokens in the list, where the last block is not full.
        hashes: One for each block.
        content: A name of all the tokens, which both sides compare in place of their
            hashes: for blocks of other sizes.
        lease_s: How long to wait for another link after a lost one.
        codec: Encode what moves; the peer names the same. None moves it as it is.
    """

    deadline: Deadline
    priority: int
    tokens: Tokens
    hashes: Hashes
    content: bytes | None
    lease_s: float | None
    codec: TransferCodec | None


class ReceiveOptions(TransferOptions, total=False):
    """Lists what ``pull`` and ``expect`` take.

    Attributes:
        have: Hashes this side has, or a predicate: those blocks are not sent.
    """

    have: Have


class SendOptions(TransferOptions, total=False):
    """Lists what ``push`` takes.

    Attributes:
        group_bytes: Layers smaller than this together travel together; None for the
            default, 1 for layer by layer.
        growing: Not all blocks that ``tokens`` need are known yet.
    """

    group_bytes: int | None
    growing: bool


class PublishOptions(SendOptions, total=False):
    """Lists what ``publish`` takes.

    Attributes:
        consumers: How many pull it, such as the ranks of a tensor-parallel group.
    """

    consumers: int


_VERBS: Final[dict[str, Any]] = {
    "pull": ReceiveOptions,
    "expect": ReceiveOptions,
    "push": SendOptions,
    "publish": PublishOptions,
}


_NUMBERS: Final = frozenset({"priority", "consumers", "group_bytes", "tokens"})


def check_options(verb: str, options: Any) -> None:
    """Refuse an option that a verb does not have; make plain ints of NumPy's."""
    names = _VERBS[verb].__optional_keys__
    for name, value in options.items():
        if name not in names:
            raise UsageError(f"{verb}: no option {name!r}; {nearest(name, names)}")
        if name in _NUMBERS:
            options[name] = plain(value)
