"""Selectors of members, such as ``"role=decode,model=demo"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvwire.directory.limits import RECORD_FIELDS_MAX
from kvwire.directory.record import Record
from kvwire.errors import UsageError, wrong_type

SELECTOR_CHARS_MAX: Final = 1024

_TEXTS: Final = ("name", "role", "model", "address", "incarnation")
FIELDS: Final = frozenset((*_TEXTS, "transport", "spec"))
"""Keys of terms that are not labels."""
_SHAPE: Final = 'write "role=decode,model=demo"; other keys are labels'


@dataclass(frozen=True, slots=True)
class Selector:
    """Matches members by the fields of their records; all terms must match.

    Attributes:
        terms: Pairs of a key and a value. A key is a record's field (``name``,
            ``role``, ``model``, ``address``, ``incarnation``), ``transport`` for any of
            its transports, ``spec`` for any of its digests, or a label.
    """

    terms: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.terms)

    @classmethod
    def parse(cls, text: str | Selector) -> Selector:
        """Parse ``"key=value,key=value"``; the empty text matches all members.

        Raises:
            UsageError: The text is not such a list, or names a key twice.
        """
        if isinstance(text, Selector):
            return text
        if not isinstance(text, str):
            raise wrong_type("selector", text, "a text")
        if len(text) > SELECTOR_CHARS_MAX:
            raise UsageError(
                f"the selector has {len(text)} characters; at most "
                f"{SELECTOR_CHARS_MAX} are allowed"
            )
        terms: dict[str, str] = {}
        for part in text.split(",") if text.strip() else ():
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not key or not equals:
                raise UsageError(
                    f"selector {text!r}: {part!r} is not a valid term; {_SHAPE}"
                )
            if key in terms:
                raise UsageError(
                    f"selector {text!r}: {key!r} appears twice; a member has each "
                    "label once"
                )
            terms[key] = value
        if len(terms) > RECORD_FIELDS_MAX:
            raise UsageError(
                f"the selector has {len(terms)} terms; at most {RECORD_FIELDS_MAX} "
                "are allowed"
            )
        return cls(tuple(terms.items()))

    def matches(self, record: Record) -> bool:
        """Return whether a member matches."""
        return all(_holds(record, key, value) for key, value in self.terms)


def _holds(record: Record, key: str, value: str) -> bool:
    if key in _TEXTS:
        found: str = getattr(record, key)
        return found == value
    if key == "transport":
        return value in record.transports
    if key == "spec":
        return value in record.specs.values()
    return record.labels.get(key) == value
