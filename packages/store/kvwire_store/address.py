"""Tiers as users write them: ``memory:8GiB``, ``disk:path?size=100GiB``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

from kvwire.config import local_path
from kvwire.errors import UsageError, check_credentials, shown, without_password
from kvwire.types import read_bytes
from kvwire_store.limits import (
    STORE_SLAB_BYTES,
    STORE_SLAB_BYTES_MAX,
    STORE_SLAB_BYTES_MIN,
    STORE_SLABS,
    STORE_TIER_BYTES_MAX,
)
from kvwire_store.tiers.slabs import GRAIN_BYTES

# Of `file://name/...` the name would be a host.
_FILES: Final = ("file:///", "file://~", "file://$")


@dataclass(frozen=True, slots=True)
class TierAddress:
    """The address of a tier, as the user wrote it.

    Attributes:
        text: All of it, such as ``"disk:/var/kv?size=1GiB"``.
        scheme: The kind of tier, before the colon.
        place: The text between the colon and the question mark.
        options: The options behind the question mark.
    """

    text: str
    scheme: str
    place: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: object) -> TierAddress:
        """Parse the address of a tier."""
        if not isinstance(text, str) or ":" not in text:
            raise UsageError(
                f"tier {shown(str(text))}: write memory:8GiB, or disk:path?size=100GiB"
            )
        scheme, _, rest = text.partition(":")
        if scheme != "kvwire":  # it has the URL of a directory among its options
            check_credentials(text)
        place, _, query = rest.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        options = {
            name: local_path(value) if name.endswith("_file") else value
            for name, value in pairs
        }
        if len(options) != len(pairs):
            raise UsageError(
                f"tier {without_password(text)!r}: an option appears twice"
            )
        if scheme == "disk":
            place = local_path(place)
        elif scheme == "object" and place.startswith(_FILES):
            place = f"file://{local_path(place.removeprefix('file://'))}"
        return cls(without_password(text), scheme, place, options)

    def require(self, *known: str) -> None:
        """Refuse options that this kind of tier does not have."""
        for name in self.options:
            if name not in known:
                raise UsageError(
                    f"tier {self.text!r}: unknown option {name!r}; the options are "
                    f"{', '.join(known)}"
                )

    def size(self, text: str, what: str = "size") -> int:
        """Parse a size in bytes, such as ``8GiB``."""
        try:
            nbytes = read_bytes(text)
        except UsageError as exc:
            raise UsageError(f"tier {self.text!r}: {what} {exc}") from None
        if not GRAIN_BYTES <= nbytes <= STORE_TIER_BYTES_MAX:
            raise UsageError(
                f"tier {self.text!r}: {what} is {nbytes} bytes; {GRAIN_BYTES} to "
                f"{STORE_TIER_BYTES_MAX} are allowed"
            )
        return nbytes

    def size_option(self, name: str, otherwise: int) -> int:
        """Return an option that is a size in bytes; `otherwise` if it is not given."""
        text = self.options.get(name)
        return otherwise if text is None else self.size(text, name)

    def number(self, name: str, otherwise: float, most: float) -> float:
        """Return an option that is a number above 0; `otherwise` if it is not given."""
        text = self.options.get(name)
        if text is None:
            return otherwise
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number <= most:
            raise UsageError(
                f"tier {self.text!r}: {name}={shown(text)}: pass a number of at most "
                f"{most:g}"
            )
        return number

    def choice(self, name: str, known: Collection[str], otherwise: str) -> str:
        """Return an option that is one of several words; `otherwise` if not given."""
        text = self.options.get(name, otherwise)
        if text not in known:
            raise UsageError(
                f"tier {self.text!r}: {name}={shown(text)}: pass {' or '.join(known)}"
            )
        return text

    def slab_bytes(self, nbytes: int) -> int:
        """Return the slab size: the user's, or one that fits the tier's size."""
        slab = max(nbytes // STORE_SLABS, min(STORE_SLAB_BYTES_MIN, nbytes))
        slab = self.size_option("slab", min(slab, STORE_SLAB_BYTES))
        slab -= slab % GRAIN_BYTES
        if not GRAIN_BYTES <= slab <= min(nbytes, STORE_SLAB_BYTES_MAX):
            raise UsageError(
                f"tier {self.text!r}: a slab has {slab} bytes; it needs at least "
                f"{GRAIN_BYTES} and at most {STORE_SLAB_BYTES_MAX}, and must fit the "
                f"tier's {nbytes}"
            )
        return slab
