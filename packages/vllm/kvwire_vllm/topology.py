"""The pairs of ranks of two engines that exchange KV.

The engines may split the KV heads over different numbers of ranks, replicate heads on
several ranks, and split the layers over pipeline stages. Both sides compute the same
pairs from the numbers of ranks and stages, without communication. An engine's ranks are
listed stage by stage.

These numbers come from a request. So before any of the KV is used, :func:`lacking`
checks that the ranks of a route send everything that this rank holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.spec import KVSpec, overlap
from kvwire_vllm.caches import CacheShape, stage_layers
from kvwire_vllm.metadata import LoadPrompt, SendPrompt


@dataclass(frozen=True, slots=True)
class RankRoute:
    """The ranks with which one rank exchanges a prompt."""

    id: str  # the transfer's id
    # Their addresses; "" for a rank whose address is unknown and not needed.
    peers: tuple[str, ...]
    ranks: tuple[int, ...] = ()  # their numbers, stage by stage


@dataclass(frozen=True, slots=True)
class OwnRank:
    """A worker's rank and stage in its engine."""

    spec: KVSpec  # its spec; with several cache groups, the one with the most heads
    stage: tuple[int, int] = (0, 1)  # (number, count) of its pipeline stage

    def others(self, remote: tuple[str, ...], stages: int) -> tuple[Sequence[str], int]:
        """Return the other engine's addresses and stages.

        If there are no addresses, the other engine counts as shaped like this one.
        """
        if remote:
            return remote, stages
        return ("",) * (self.stage[1] * self.spec.shard[1]), self.stage[1]


def rank_route(moved: SendPrompt | LoadPrompt, own: OwnRank) -> RankRoute:
    """Return the ranks of the other engine with which a rank exchanges a prompt.

    There are none if other ranks send everything that this one could, or if no rank
    fits.
    """
    addresses, stages = own.others(moved.remote, moved.stages)
    others = targets if isinstance(moved, SendPrompt) else sources
    found = others(own.spec, len(addresses) // stages, stages)
    peers = tuple(addresses[at] for at in found)
    return RankRoute(moved.transfer_id, peers, found)


def check_ranks(shapes: Sequence[CacheShape], listed: int, stages: int = 1) -> None:
    """Refuse an engine whose ranks cannot hold the heads of this one's model."""
    ranks, over = divmod(listed, stages)
    if over:
        raise UsageError(
            f"kv_transfer_params: remote has {listed} addresses, which cannot be "
            f"divided among {stages} pipeline stages"
        )
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


def lacking(
    specs: Mapping[str, KVSpec],
    parts: Iterable[Mapping[str, tuple[range, range]]],
) -> str:
    """Return a layer and head of this rank that no part has; "" if there is none."""
    parts = list(parts)
    for name, spec in specs.items():
        brought = np.zeros((spec.layer_indices.stop, spec.heads.stop), np.bool_)
        for part in parts:
            layers, heads = part.get(name, (range(0), range(0)))
            brought[layers.start : layers.stop, heads.start : heads.stop] = True
        left = np.argwhere(~brought[spec.first_layer :, spec.heads.start :])
        if left.size:
            layer, head = left[0] + (spec.first_layer, spec.heads.start)
            return f"layer {layer}, KV head {head} of cache group {name!r}"
    return ""


def group_specs(spec: KVSpec, size: int, stages: int = 1) -> list[KVSpec]:
    """Return the specs of each rank in an engine of another size.

    A request may claim any number of stages; more than there are layers are not used.
    """
    if stages > spec.total_layers:
        return []
    heads = spec.total_kv_heads
    return [
        dataclasses.replace(
            spec,
            kv_heads=1 if spec.kind == "state" else max(1, heads // size),
            shard=(rank, size),
            model_kv_heads=size if spec.kind == "state" else heads,
            layers=len(layers),
            first_layer=layers.start,
            model_layers=spec.total_layers,
        )
        for layers in stage_layers(spec.total_layers, stages)
        for rank in range(size)
    ]


@functools.lru_cache
def sources(spec: KVSpec, producers: int, stages: int = 1) -> tuple[int, ...]:
    """Return the producing engine's ranks that this consuming rank fetches from."""
    there = group_specs(spec, producers, stages)
    found: list[int] = []
    for first in range(0, len(there), producers):
        stage = there[first : first + producers]
        if _share_layers(spec, stage[0]):
            found += [first + rank for rank in shard_sources(spec, stage)]
    return tuple(found)


@functools.lru_cache
def targets(spec: KVSpec, consumers: int, stages: int = 1) -> tuple[int, ...]:
    """Return the consuming engine's ranks that fetch from this producing rank.

    The arguments are the same as for :func:`sources`, seen from the other end.
    """
    rank, size = spec.shard
    group = [dataclasses.replace(spec, shard=(one, size)) for one in range(size)]
    return tuple(
        index
        for index, there in enumerate(group_specs(spec, consumers, stages))
        if _share_layers(spec, there) and rank in shard_sources(there, group)
    )


def shard_sources(here: KVSpec, there: list[KVSpec]) -> tuple[int, ...]:
    """Return for each local head which shard, as an index into ``there``, moves it.

    Each head moves exactly once, and the result is in the order of the heads. If
    several shards hold the same heads, this shard's rank picks one of them, so that
    replicas share the load.

    Raises:
        UsageError: A head is held by no peer.
    """
    holders: dict[int, list[int]] = {}
    for index, spec in enumerate(there):
        common = overlap(here.heads, spec.heads)
        if common:
            holders.setdefault(common.start, []).append(index)
    chosen: list[int] = []
    head = here.heads.start
    while head < here.heads.stop:
        if head not in holders:
            raise UsageError(f"shards: no peer of {len(there)} holds KV head {head}")
        replicas = holders[head]
        chosen.append(replicas[here.shard[0] % len(replicas)])
        head = overlap(here.heads, there[chosen[-1]].heads).stop
    return tuple(chosen)


def _share_layers(a: KVSpec, b: KVSpec) -> bool:
    first = max(a.first_layer, b.first_layer)
    return first < min(a.layer_indices.stop, b.layer_indices.stop)
