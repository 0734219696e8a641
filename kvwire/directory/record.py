"""A member's record in a directory: one JSON object of at most 4 KiB.

Anything can be written to a directory. So a record is checked before it is used: first
its size, then each field's type, length and characters. Unknown fields are ignored, so
that later versions can add fields.
"""

from __future__ import annotations

from numbers import Real
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvwire.directory import limits
from kvwire.directory.dialable import check_dialable
from kvwire.errors import UsageError, shown, wrong_type
from kvwire.limits import BACKENDS_MAX, NAME_CHARS_MAX
from kvwire.types import Address

ADDRESS_CHARS_MAX: Final = 256
MEMBER_LEASE_S_MIN: Final = 0.5
MEMBER_LEASE_S_MAX: Final = 3600.0

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Table = Annotated[dict[Name, Text], Meta(max_length=limits.RECORD_FIELDS_MAX)]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fleet member's description of itself.

    Attributes:
        name: Its own name, which need not be unique.
        address: The address that it listens on.
        incarnation: 32 hexadecimal digits, new for each start of its process; empty if
            the directory contains only addresses.
        role: Its role, such as ``"prefill"``, ``"decode"`` or ``"store"``.
        model: The fingerprint of the model that it serves.
        specs: A digest of each cache group's :class:`~kvwire.KVSpec`.
        transports: The transports that it supports for data.
        load: How busy it is: 0 is idle, 1 is full. Members with less load are chosen
            first.
        labels: Further terms that selectors may match.
        lease_s: Seconds after its last renewal until it counts as gone.
    """

    name: Name
    address: Annotated[str, Meta(min_length=1, max_length=ADDRESS_CHARS_MAX)]
    incarnation: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""
    role: Text = ""
    model: Text = ""
    specs: Table = {}
    transports: Annotated[tuple[Name, ...], Meta(max_length=BACKENDS_MAX)] = ()
    load: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    labels: Table = {}
    lease_s: Annotated[float, Meta(ge=MEMBER_LEASE_S_MIN, le=MEMBER_LEASE_S_MAX)] = (
        limits.MEMBER_LEASE_S
    )

    def __post_init__(self) -> None:
        check_dialable(Address.parse(self.address))
        tables = (*self.specs.items(), *self.labels.items())
        texts = (self.name, self.address, self.role, self.model, *self.transports)
        for text in (*texts, *(part for pair in tables for part in pair)):
            if not isinstance(text, str):
                raise wrong_type("record", text, "text")
            if not text.isprintable():
                raise UsageError(f"{shown(text)} has characters that cannot be printed")

    @property
    def key(self) -> str:
        """Return this member's key, which is unique even if names are equal."""
        return self.incarnation or self.address

    def encode(self) -> bytes:
        """Return the record as bytes for :meth:`decode`.

        Raises:
            UsageError: A field is not allowed, or the record is too long.
        """
        try:
            raw = msgspec.json.encode(self, enc_hook=_plain)
        except UnicodeEncodeError as exc:
            raise UsageError(f"not a valid record: {exc}") from None
        Record.decode(raw)
        return raw

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview | str) -> Record:
        """Read a record.

        Raises:
            UsageError: The bytes are not a valid record; the text gives the reason.
        """
        if len(raw) > limits.RECORD_BYTES_MAX:
            raise UsageError(
                f"the record has {len(raw)} bytes; at most {limits.RECORD_BYTES_MAX} "
                "are allowed"
            )
        try:
            return _DECODER.decode(raw)
        # The second error is for data that is nested too deeply.
        except (msgspec.DecodeError, RecursionError, UnicodeError) as exc:
            raise UsageError(f"not a valid record: {shown(str(exc), 200)}") from None


def _plain(value: object) -> object:
    """Return another library's number or text, such as NumPy's, as Python's own."""
    if isinstance(value, (Real, str)):
        return float(value) if isinstance(value, Real) else str(value)
    raise wrong_type("record", value, "text or a number")


_DECODER = msgspec.json.Decoder(Record)
