"""Commands for the nodes of a Redis cluster, and which of them refuse writes.

A tier asks all nodes at once, each for its own keys. A directory has few keys, so the
library's own routing serves it (:mod:`kvwire.directory.redis_servers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Final

from kvwire.directory.redis_servers import (
    FAULTS,
    RedisClient,
    RedisServers,
    code_of,
    of_server,
)
from kvwire.errors import printable
from kvwire.extras import needed_by

with needed_by("a tier in Redis", extra="redis", distribution="kvwire-store"):
    from redis import exceptions
    from redis.asyncio import RedisCluster
    from redis.asyncio.cluster import ClusterNode, PipelineCommand
    from redis.cluster import PRIMARY, get_node_name

# Refusals of writes by servers that go on serving reads: the disk is full, replicas are
# missing, or it became one.
_OF_WRITES: Final = ("MISCONF", "NOREPLICAS", "READONLY")
# How often a key is followed from server to server.
_REDIRECTS: Final = 4
# How many keys are tried to find one that belongs to a node; nodes have many of the
# 16,384 slots.
_KEYS_TRIED: Final = 50_000


def of_writes(error: BaseException) -> bool:
    """Return whether a server refuses all writes, and may go on serving reads."""
    return isinstance(error, exceptions.ReadOnlyError) or code_of(error) in _OF_WRITES


async def ask(
    client: RedisClient, node: Any, commands: Sequence[Sequence[Any]]
) -> list[Any]:
    """Send commands to one server; return each answer, or an error in its place.

    In a cluster, a command whose key has moved, or is on its way, is sent where the
    server says, and a slot that has moved is asked for there from then on.

    Args:
        client: The server, or its cluster.
        node: The cluster's node; None for a single server.
        commands: Each is a command's words.

    Raises:
        Exception: The server could not be asked.

    Cancel safety: safe; commands may have been executed.
    """
    cluster = client.commands
    if not isinstance(cluster, RedisCluster):
        pipeline = cluster.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        single: list[Any] = await pipeline.execute(raise_on_error=False)
        return single
    answers = await _at_node(node, commands)
    for _ in range(_REDIRECTS):
        elsewhere = _elsewhere(cluster, node, answers)
        if not elsewhere:
            break
        for (_, asking), (there, which) in elsewhere.items():
            again = [commands[at] for at in which]
            try:
                found = await _at_node(there, again, asking=asking)
            except FAULTS as exc:
                # It concerns these keys: the server that was asked is well.
                text = printable(f"{there.name}: {exc}")
                found = [exceptions.TryAgainError(text)] * len(which)
            for at, answer in zip(which, found, strict=True):
                answers[at] = answer
    return answers


async def renew(
    servers: RedisServers, doubtful: Collection[str], prefix: str, timeout_s: float
) -> set[str]:
    """Reconnect, and read the slots of a cluster again.

    Args:
        servers: The servers.
        doubtful: The names of the nodes to try.
        prefix: Begins the keys that are removed there to try; they are never set.
        timeout_s: The limit for each node's answer.

    Returns:
        The doubtful nodes that still accept no writes.

    Raises:
        Exception: No server accepts writes; the text gives a reason for each.

    Cancel safety: nothing stays open.
    """

    async def try_write(node: Any, key: str) -> None:
        async with asyncio.timeout(timeout_s):
            await node.execute_command("UNLINK", key)

    client = await servers.reconnect()
    keys = _keys_at(client, doubtful, prefix)
    answers = await asyncio.gather(
        *(try_write(*one) for one in keys.values()), return_exceptions=True
    )
    return {
        name
        for name, answer in zip(keys, answers, strict=True)
        if isinstance(answer, BaseException) and of_server(answer)
    }


def _keys_at(
    client: RedisClient, names: Collection[str], prefix: str
) -> dict[str, tuple[Any, str]]:
    """Return the cluster's nodes that have slots, each with one of its keys."""
    found: dict[str, tuple[Any, str]] = {}
    cluster = client.commands
    if not names or not isinstance(cluster, RedisCluster):
        return found
    slots = cluster.nodes_manager.slots_cache
    wanted = {nodes[0].name for nodes in slots.values()} & set(names)
    for number in range(_KEYS_TRIED):
        if len(found) == len(wanted):
            break
        key = f"{prefix}{number}"
        nodes = slots.get(cluster.keyslot(key))
        if nodes and nodes[0].name in wanted:
            found.setdefault(nodes[0].name, (nodes[0], key))
    return found


def _elsewhere(
    cluster: RedisCluster, node: Any, answers: Sequence[Any]
) -> dict[tuple[str, bool], tuple[Any, list[int]]]:
    """Return where answers send their commands, each with their positions."""
    slots = cluster.nodes_manager.slots_cache
    sent: dict[tuple[str, bool], tuple[Any, list[int]]] = {}
    for at, answer in enumerate(answers):
        if isinstance(answer, exceptions.AskError):
            asking = not isinstance(answer, exceptions.MovedError)
            there = _node(cluster, answer.host or node.host, answer.port)
            if not asking:
                slots[answer.slot_id] = [there]  # bounded: a cluster's slots
            sent.setdefault((there.name, asking), (there, []))[1].append(at)
    return sent


def _node(cluster: RedisCluster, host: str, port: int) -> Any:
    """Return a cluster's node; one without slots is not in the slot table."""
    nodes = cluster.nodes_manager
    name = get_node_name(host, port)
    if name not in nodes.nodes_cache:
        # bounded: the servers of a cluster
        nodes.nodes_cache[name] = ClusterNode(
            host, port, PRIMARY, **nodes.connection_kwargs
        )
    return nodes.nodes_cache[name]


async def _at_node(
    node: Any, commands: Sequence[Sequence[Any]], *, asking: bool = False
) -> list[Any]:
    """Send commands to a cluster's node, on one connection."""
    sent = [PipelineCommand(at, *words) for at, words in enumerate(commands)]
    if asking:  # it holds for the next command of its connection
        pairs = [(PipelineCommand(0, "ASKING"), command) for command in sent]
        await node.execute_pipeline([one for pair in pairs for one in pair])
    else:
        await node.execute_pipeline(sent)
    return [command.result for command in sent]
