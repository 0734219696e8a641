"""Where an object tier's address leads: a bucket, as obstore has it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kvwire.errors import UsageError
from kvwire.extras import install_command
from kvwire.store.address import TierAddress

OWN: Final = frozenset({"timeout", "requests"})
"""Options of the tier; the others are obstore's."""
# They would be in every report and log that names the tier.
_SECRETS: Final = ("secret", "key", "token", "password", "credential", "sas")


def bucket_of(address: TierAddress, timeout_s: float) -> Any:
    """Return where the objects of a tier are.

    Raises:
        UsageError: obstore is not installed, or does not take the address.
    """
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
        from obstore.store import from_url  # noqa: PLC0415
    except ImportError:
        raise UsageError(
            f"tier {address.text!r} needs obstore: {install_command('store')}"
        ) from None
    settings = {k: v for k, v in address.options.items() if k not in OWN}
    for name in settings:
        if any(word in name.lower() for word in _SECRETS):
            raise UsageError(
                f"tier: {name}= would be shown wherever the tier is named; pass "
                f"credentials in the environment"
            )
    try:
        if address.place.startswith("memory:"):
            return from_url("memory:///")
        if address.place.startswith("file:"):
            return from_url(address.place, mkdir=True)
        return from_url(
            address.place,
            config=settings,
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                # Who writes http:// means it: a server of one's own, without TLS.
                "allow_http": settings.get("endpoint", "").startswith("http://"),
            },
            retry_config={"retry_timeout": timedelta(seconds=timeout_s)},
        )
    except BaseException as exc:
        # obstore panics at options that it knows for another part of itself.
        if not isinstance(exc, BaseError | ValueError) and not _is_panic(exc):
            raise
        text = str(exc).partition("\n")[0]
        raise UsageError(f"tier {address.text!r}: {text}") from None


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"
