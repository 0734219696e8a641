"""KV hints: an orchestrator's instructions for the KV of one request.

vLLM and SGLang carry an envelope beside a request and leave its actions to connectors.
An envelope has a version and a list of actions, each with a type, a version of its own
and a payload::

    {"protocol_version": "0.1", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "kv.retain", "action_version": "0.1",
         "payload": {"start": 0, "end": 4096, "priority": 80, "ttl_s": 600}}]}

Five types are known: ``kv.share``, ``kv.prefetch``, ``kv.demote``, ``kv.pin`` and
``kv.retain``. Each is a verb of :class:`kvwire.BlockStore` on the full blocks of the
request that carries it. An unknown action is refused with its name in the log; the
request and its other actions are unaffected.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvwire import BlockStore, PagedCache, Placement
from kvwire.errors import error_text, sayable, shown
from kvwire.store.limits import STORE_TTL_S_MAX
from kvwire.store.operations.group_request import Hashes

logger: logging.Logger = logging.getLogger("kvwire.hints")

HINT_VERSIONS: Final = ("0.1", "1.0")
"""The versions of envelopes, and of actions, that are understood."""
HINTS_FIELD: Final = "kv_hints"
"""The name of the envelope among a request's fields, and in ``kv_transfer_params``."""

# Per envelope: an orchestrator sends few hints for one prompt.
_ACTIONS_MAX: Final = 32
# How many distinct refusals are logged.
_REFUSALS_MAX: Final = 100
# The names of these fields in other projects.
_ALIASES: Final = {"ttl_seconds": "ttl_s", "duration": "ttl_s", "destination": "to"}

_Tokens = Annotated[int, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(gt=0, le=STORE_TTL_S_MAX)]
_When = Literal["arrival", "request_completion"]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class _Action(msgspec.Struct):
    action_type: _Name
    action_version: _Name
    action_id: str = ""
    payload: dict[str, Any] = {}


class _Envelope(msgspec.Struct):
    protocol_version: _Name
    actions: list[Any] = []
    message_id: str = ""


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One action on the blocks of a request. Subclassed by the five types.

    Attributes:
        start: The first token of the range.
        end: The token after the range; None for the end of the prompt.
        execute_at: When to execute it: once the request arrives, or once its blocks are
            saved.
        name: The action's type and id.
    """

    start: _Tokens = 0
    end: _Tokens | None = None
    execute_at: _When = "request_completion"
    name: str = ""

    @property
    def at_arrival(self) -> bool:
        """Whether it is executed when its request arrives."""
        return self.execute_at == "arrival"

    def blocks(self, block_tokens: int, count: int) -> slice:
        """Return the full blocks within its token range."""
        last = count if self.end is None else min(count, self.end // block_tokens)
        return slice(-(-self.start // block_tokens), last)


class ShareHint(Hint, frozen=True, kw_only=True):
    """Copies blocks to a node of the store's servers."""

    to: _Name
    execute_at: _When = "request_completion"


class PrefetchHint(Hint, frozen=True, kw_only=True):
    """Copies blocks into a higher tier."""

    tier: _Name = "memory"
    execute_at: _When = "arrival"


class DemoteHint(Hint, frozen=True, kw_only=True):
    """Frees the memory of blocks that a lower tier also holds."""

    tier: str = ""


class PinHint(Hint, frozen=True, kw_only=True):
    """Protects blocks from eviction for a time."""

    ttl_s: _Seconds


class RetainHint(Hint, frozen=True, kw_only=True):
    """Evicts blocks later or earlier than others."""

    priority: Annotated[int, Meta(ge=0, le=100)]
    ttl_s: _Seconds


_TYPES: Final[Mapping[str, type[Hint]]] = {
    "share": ShareHint,
    "prefetch": PrefetchHint,
    "demote": DemoteHint,
    "pin": PinHint,
    "retain": RetainHint,
}


class Hints(NamedTuple):
    """The result of reading an envelope.

    Attributes:
        actions: The actions that can be carried out.
        refused: For each other action, the reason why it cannot be carried out.
    """

    actions: tuple[Hint, ...]
    refused: tuple[str, ...]


NO_HINTS: Final = Hints((), ())


def read_hints(envelope: object) -> Hints:
    """Read an envelope from vLLM, from SGLang or from decoded JSON; never raises."""
    if envelope is None:
        return NO_HINTS
    try:
        read = msgspec.convert(envelope, _Envelope, from_attributes=True)
    except msgspec.ValidationError as exc:
        return Hints((), (f"{HINTS_FIELD}: {exc}",))
    if read.protocol_version not in HINT_VERSIONS:
        return Hints((), (f"{HINTS_FIELD}: protocol_version{_known(read)}",))
    actions: list[Hint] = []
    refused: list[str] = []
    for number, one in enumerate(read.actions[:_ACTIONS_MAX]):
        try:
            actions.append(_action(msgspec.convert(one, _Action, from_attributes=True)))
        except (msgspec.ValidationError, _RefusedError) as exc:
            refused.append(f"{HINTS_FIELD}: actions[{number}]: {exc}")
    if len(read.actions) > _ACTIONS_MAX:
        count = len(read.actions)
        refused.append(
            f"{HINTS_FIELD}: {count} actions; the first {_ACTIONS_MAX} count"
        )
    return Hints(tuple(actions), tuple(refused))


def hints_of(request: object) -> Hints:
    """Return the hints of vLLM's request: its own, or in ``kv_transfer_params``."""
    envelope = getattr(request, HINTS_FIELD, None)
    if envelope is None:
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(params, Mapping):
            envelope = params.get(HINTS_FIELD)
    return NO_HINTS if envelope is None else read_hints(envelope)


def _carried_out(
    hint: Hint, store: BlockStore, hashes: Hashes, cache: PagedCache
) -> Awaitable[Placement]:
    """Begin the store verb for a hint."""
    match hint:
        case ShareHint():
            return store.move(hashes, cache, to=hint.to, keep=True)
        case PrefetchHint():
            return store.prefetch(hashes, cache, tier=hint.tier)
        case DemoteHint():
            return store.demote(hashes, cache, tier=hint.tier)
        case PinHint():
            return store.pin(hashes, cache, ttl_s=hint.ttl_s)
        case RetainHint():
            priority = hint.priority
            return store.retain(hashes, cache, priority=priority, ttl_s=hint.ttl_s)
    raise AssertionError("a hint has one of the five types")


class HintLog:
    """Logs the results of hints, each reason once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def refused(self, request_id: str, reasons: Iterable[str]) -> None:
        """Log why a request's hints were refused."""
        for reason in reasons:
            if reason not in self._logged and len(self._logged) < _REFUSALS_MAX:
                self._logged.add(reason)
                logger.warning(
                    "request %s: hint refused: %s; the request continues without it",
                    sayable(request_id),
                    sayable(reason),
                )

    async def carry_out(
        self,
        request_id: str,
        hint: Hint,
        store: BlockStore,
        hashes: Hashes,
        cache: PagedCache,
    ) -> Placement | None:
        """Execute a hint and log its result; return None if it was refused.

        Cancel safety: the same as the store's verb.
        """
        try:
            placement = await _carried_out(hint, store, hashes, cache)
        except Exception as exc:  # noqa: BLE001 - a hint must not end an engine
            self.refused(request_id, [f"{hint.name}: {error_text(exc)}"])
            return None
        logger.info("request %s: %s: %r", request_id, hint.name, placement)
        self.refused(request_id, (f"{hint.name}: {why}" for why in placement.reasons))
        return placement


class _RefusedError(Exception):
    """An action cannot be executed here."""


def _action(action: _Action) -> Hint:
    """Return an action as a hint."""
    name = action.action_type
    kind = _TYPES.get(name.removeprefix("kv.").lower())
    if kind is None:
        known = ", ".join(f"kv.{one}" for one in _TYPES)
        raise _RefusedError(f"action_type={shown(name)}: use one of {known}")
    if action.action_version not in HINT_VERSIONS:
        version = shown(action.action_version)
        known = " and ".join(HINT_VERSIONS)
        raise _RefusedError(f"{name}: action_version={version}; use one of {known}")
    payload = {_ALIASES.get(key, key): value for key, value in action.payload.items()}
    payload["name"] = f"{name} {action.action_id}".rstrip()[:256]
    try:
        hint = msgspec.convert(payload, kind)
    except msgspec.ValidationError as exc:
        raise _RefusedError(f"{name}: payload: {exc}") from None
    if isinstance(hint, ShareHint) and "://" in hint.to:
        # Otherwise any client could send KV to any address.
        raise _RefusedError(
            f"{name}: to={shown(hint.to)}: name a node of the store's cluster; a "
            "request may not send KV to an address"
        )
    return hint


def _known(read: _Envelope) -> str:
    return f"={shown(read.protocol_version)}; {' and '.join(HINT_VERSIONS)} are known"
