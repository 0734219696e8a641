"""Which rank of one engine exchanges with which of the other.

Both engines may split the KV heads over different numbers of ranks, or hold the same
heads on several. Both sides compute the same answer from the two group sizes, so nobody
asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvwire.errors import UsageError
from kvwire.integrations.vllm.caches import CacheShape
from kvwire.kv.spec import KVSpec, shard_sources


@dataclass(frozen=True, slots=True)
class PeerRank:
    """Names a rank of the other engine that a transfer goes to or comes from.

    Attributes:
        address: Where it listens; "" if it is not known, and need not be.
        id: What a push between these two ranks is called.
    """

    address: str
    id: str


@dataclass(frozen=True, slots=True)
class RankRoute:
    """Lists the ranks that one rank exchanges a prompt with.

    Attributes:
        id: What a pull is called.
        pushed: Prefill sends, rather than decode fetches.
        peers: The ranks.
    """

    id: str
    pushed: bool
    peers: tuple[PeerRank, ...]


def incoming_route(
    id: str, spec: KVSpec, remote: tuple[str, ...], *, pushed: bool
) -> RankRoute:
    """Return where a consuming rank gets a prompt from.

    Args:
        id: Of the transfer.
        spec: Of this rank.
        remote: Addresses of the producing ranks; none for a group like this one.
        pushed: Prefill sends.

    Raises:
        UsageError: The heads cannot be split over so many ranks.
    """
    mine, size = spec.shard
    addresses = remote or ("",) * size
    return RankRoute(
        id,
        pushed,
        tuple(
            PeerRank(addresses[rank], f"{id}/{rank}/{mine}")
            for rank in sources(spec, len(addresses))
        ),
    )


def outgoing_route(
    id: str, spec: KVSpec, remote: tuple[str, ...], *, pushed: bool
) -> RankRoute:
    """Return where a producing rank sends; no peer if others have its heads.

    The arguments are those of :func:`incoming_route`, seen from the other end.

    Raises:
        UsageError: The heads cannot be split over so many ranks.
    """
    mine, size = spec.shard
    addresses = remote or ("",) * size
    return RankRoute(
        id,
        pushed,
        tuple(
            PeerRank(addresses[rank], f"{id}/{mine}/{rank}")
            for rank in targets(spec, len(addresses))
        ),
    )


def check_ranks(shapes: Sequence[CacheShape], ranks: int) -> None:
    """Refuse an engine whose ranks cannot hold the heads of this one's model.

    Raises:
        UsageError: Its number of ranks does not go with the model.
    """
    for shape in shapes:
        heads = shape.total_kv_heads
        fits = (
            ranks == shape.ranks
            if shape.state
            else not (heads % ranks and ranks % heads)
        )
        if not fits:
            raise UsageError(
                f"kv_transfer_params: remote has {ranks} addresses, which cannot be "
                f"the ranks of an engine with {heads} KV heads ({shape.kind})"
            )


def group_specs(spec: KVSpec, size: int) -> list[KVSpec]:
    """Return what each rank of a group of another size holds of the model.

    Raises:
        UsageError: The heads cannot be split so.
    """
    heads = spec.total_kv_heads
    if heads % size and size % heads:
        raise UsageError(
            f"{heads} KV heads cannot be spread over the {size} ranks of the other "
            f"engine"
        )
    return [
        dataclasses.replace(
            spec,
            kv_heads=1 if spec.kind == "state" else max(1, heads // size),
            shard=(rank, size),
            model_kv_heads=size if spec.kind == "state" else heads,
        )
        for rank in range(size)
    ]


def sources(spec: KVSpec, producers: int) -> tuple[int, ...]:
    """Return the producing engine's ranks that this consuming rank fetches from."""
    return shard_sources(spec, group_specs(spec, producers))


def targets(spec: KVSpec, consumers: int) -> tuple[int, ...]:
    """Return the ranks of the consuming engine that fetch from this producing rank."""
    group = group_specs(spec, spec.shard[1])
    return tuple(
        index
        for index, there in enumerate(group_specs(spec, consumers))
        if spec.shard[0] in shard_sources(there, group)
    )
