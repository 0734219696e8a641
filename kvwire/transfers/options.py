"""The options of the four verbs of KV transfers, by name and type."""

from __future__ import annotations

from typing import Any, Final, TypedDict

from kvwire.errors import UsageError, nearest
from kvwire.kv.codecs.rows import TransferCodec
from kvwire.kv.geometry import Tokens
from kvwire.transfers.dedup import Hashes, Have
from kvwire.types import Deadline, plain


class TransferOptions(TypedDict, total=False):
    """Types what every verb takes; ``Connection.pull`` explains each."""

    deadline: Deadline
    priority: int
    tokens: Tokens
    hashes: Hashes
    content: bytes | None
    lease_s: float | None
    codec: TransferCodec | None


class ReceiveOptions(TransferOptions, total=False):
    """Types what ``pull`` and ``expect`` take; ``Connection.pull`` explains each."""

    have: Have


class SendOptions(TransferOptions, total=False):
    """Types what ``push`` takes; ``Connection.push`` explains each."""

    group_bytes: int | None
    growing: bool


class PublishOptions(SendOptions, total=False):
    """Types what ``publish`` takes; ``Communicator.publish`` explains each."""

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
