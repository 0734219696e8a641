"""A verb in a command line or an HTTP request, and the answer.

Such a caller has no cache. So it names blocks by their hashes, or by the tokens to
hash, and the store searches all known namespaces of the tenant.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from kvwire.errors import UsageError, nearest, shown
from kvwire.kv.hashing import HashScheme, salt_of, vllm_block_hashes
from kvwire.store.limits import STORE_HASH_BYTES_MAX, STORE_KEYS_MAX
from kvwire.store.placement import BlockState, Placement, Verb, VerbKind

VERBS: Final = tuple(kind.name.lower() for kind in VerbKind)
_Hex = Annotated[str, Meta(min_length=2, max_length=2 * STORE_HASH_BYTES_MAX)]


class VerbOrder(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The blocks of a verb, and its arguments.

    Attributes:
        hashes: Their hashes, in hexadecimal digits, in the order of the chain.
        tokens: The token ids of a prompt, instead of hashes; its last block counts only
            if it is full.
        block_tokens: Tokens per hash.
        scheme: The hash scheme of the tokens: ``kvwire`` for :class:`HashScheme`, as
            engines with ``KvwireStoreConnector`` use it, or ``vllm`` for vLLM's own
            ``sha256_cbor``.
        seed: The seed of the scheme; for vLLM the engines' ``PYTHONHASHSEED``.
        cache_salt: The ``cache_salt`` of the engine's request; for ``kvwire`` only.
        tenant: The tenant that owns them, if the operator asks.
        tier: See ``BlockStore.prefetch`` and ``demote``.
        to: See ``BlockStore.move``.
        ttl_s: See ``BlockStore.pin`` and ``retain``.
        priority: See ``BlockStore.retain``.
    """

    hashes: Annotated[list[_Hex], Meta(max_length=STORE_KEYS_MAX)] = []
    tokens: list[int] = []
    block_tokens: int = 0
    scheme: Literal["kvwire", "vllm"] = "kvwire"
    seed: str = ""
    cache_salt: str = ""
    tenant: str = ""
    tier: str = ""
    to: str = ""
    ttl_s: float | None = None
    priority: int | None = None

    def named(self) -> list[bytes]:
        """Return the hashes.

        Raises:
            UsageError: There are no hashes, too many, or one is not hexadecimal.
        """
        if bool(self.hashes) == bool(self.tokens):
            raise UsageError("hashes, tokens: pass exactly one of them")
        if self.hashes:
            try:
                return [bytes.fromhex(one) for one in self.hashes]
            except ValueError as exc:
                raise UsageError(f"hashes: write hexadecimal digits: {exc}") from None
        if self.scheme == "vllm":
            if self.cache_salt:
                raise UsageError("cache_salt: the scheme vllm has no salt")
            seed = {"seed": self.seed} if self.seed else {}
            found = vllm_block_hashes(self.tokens, self.block_tokens, **seed)
        else:
            scheme = HashScheme(self.block_tokens, self.seed.encode())
            salt = salt_of(["", self.cache_salt])
            found = scheme.block_hashes(self.tokens, salt=salt)
        if not 0 < len(found) <= STORE_KEYS_MAX:
            raise UsageError(
                f"tokens: {len(self.tokens)} tokens make {len(found)} full blocks of "
                f"{self.block_tokens}; 1 to {STORE_KEYS_MAX} are allowed"
            )
        return found

    def verb(self, name: str) -> Verb:
        """Return the verb with this name and its arguments.

        Raises:
            UsageError: There is no such verb, or an argument is out of range.
        """
        if name not in VERBS:
            hint = nearest(name, VERBS)
            raise UsageError(f"verb {shown(name)}: {', '.join(VERBS)}; {hint}")
        kind = VerbKind[name.upper()]
        if (kind is VerbKind.MOVE) != bool(self.to):
            raise UsageError(
                f"to={shown(self.to)}: only move takes to=, and it requires it"
            )
        match kind:
            case VerbKind.PIN:
                return Verb.pin(self.ttl_s)
            case VerbKind.RETAIN:
                if self.priority is None:
                    raise UsageError("priority: retain needs a priority")
                return Verb.retain(self.priority, self.ttl_s)
        return Verb(kind, self.to or self.tier)


def described(placement: Placement) -> dict[str, Any]:
    """Return a placement for JSON, with a state for each block."""
    names = [state.name.lower() for state in BlockState]
    reasons = {
        reason: np.flatnonzero(placement.codes == code).tolist()
        for code, reason in enumerate(placement.reasons, 1)
    }
    return {
        "counts": placement.counts,
        "prefix": placement.prefix,
        "blocks": [names[state] for state in placement.states.tolist()],
        "reasons": reasons,
        "held": {name: bits.tolist() for name, bits in placement.held.items()},
    }
