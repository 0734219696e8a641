"""docs/reference/api.md: every public name, and what each of its methods is for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import kvwire
import kvwire.engine
import kvwire.memory
import kvwire.observe.opentelemetry
import kvwire.observe.prometheus
import kvwire.testing
from tests.support.reference.words import attributes, purpose, table

# What belongs together, in the order in which one meets it.
GROUPS: Final[dict[str, tuple[object, ...]]] = {
    "Connections": (
        kvwire.open,
        kvwire.Communicator,
        kvwire.Connection,
        kvwire.Address,
        kvwire.PeerInfo,
        kvwire.TransportReport,
        kvwire.Candidate,
    ),
    "Messages and memory": (
        kvwire.Request,
        kvwire.Region,
        kvwire.Grant,
        kvwire.Access,
    ),
    "KV caches": (kvwire.KVSpec, kvwire.PagedCache, kvwire.BlockPool),
    "Transfers": (
        kvwire.Outgoing,
        kvwire.Incoming,
        kvwire.join,
        kvwire.Joined,
        kvwire.Outcome,
        kvwire.Timings,
    ),
    "What to compute": (
        kvwire.plan_prefill,
        kvwire.PrefillRequest,
        kvwire.PrefillPlan,
    ),
    "KV database": (kvwire.BlockStore, kvwire.StoreRequest, kvwire.StoreServer),
    "Synchronous engines": (
        kvwire.Engine,
        kvwire.engine.EngineConnection,
        kvwire.engine.EngineOutgoing,
        kvwire.engine.EngineIncoming,
    ),
    "Tests of your own (`kvwire.testing`)": tuple(
        getattr(kvwire.testing, name) for name in sorted(kvwire.testing.__all__)
    ),
    "Captured CUDA graphs (`kvwire.memory`)": (kvwire.memory.LayerCounter,),
    "Metrics and traces (`kvwire.observe`)": (
        kvwire.observe.opentelemetry.TransferTracer,
        kvwire.observe.prometheus.CommunicatorCollector,
        kvwire.observe.prometheus.StoreCollector,
    ),
}

_INTRODUCTION: Final = """\
# The Python API

Written from the docstrings by `make reference`. They say more: arguments with their
units, what is raised, and what a cancellation does; `help(kvwire.Connection.pull)`
shows one. *await* marks a coroutine; `send`, `recv`, `put` and `get` return a
`Request`, and the KV verbs a transfer, which is awaited when its result is needed.
Elsewhere: [configuration](configuration.md), [errors](errors.md),
[metrics](metrics.md).
"""


def page() -> str:
    """The page."""
    parts = [_INTRODUCTION]
    for title, things in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += map(_section, things)
    return "\n".join(parts)


def _section(thing: Any) -> str:
    lines = [f"### {_heading(thing)}\n", purpose(thing), ""]
    if inspect.isclass(thing):
        rows = list(_rows(thing))
        if rows:
            lines += [table(("", "", ""), rows), ""]
    return "\n".join(lines)


def _heading(thing: Any) -> str:
    name = thing.__name__
    called = name[0].islower()  # a function, or a class that is used as one
    if name in kvwire.__all__:
        name = f"kvwire.{name}"
    return f"`{name}{_parameters(thing) if called else ''}`"


def _rows(cls: type) -> Iterator[tuple[str, str, str]]:
    """Attributes, then the rest in the order of the code, the class's own first."""
    texts = attributes(cls)
    members = (name for base in cls.__mro__ for name in vars(base))
    names = [*texts, *(name for name in members if name[0] != "_")]
    for name in dict.fromkeys(names):
        member = inspect.getattr_static(cls, name, None)
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        if name in texts:
            yield f"`{name}`", "", texts[name]
        elif isinstance(member, property):
            yield f"`{name}`", "", purpose(member)
        elif inspect.isfunction(member):
            awaited = "*await*" if inspect.iscoroutinefunction(member) else ""
            yield f"`{name}{_parameters(member)}`", awaited, purpose(member)


def _parameters(function: Any) -> str:
    """Names and defaults; types stand in the code."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    plain = signature.replace(
        parameters=bare, return_annotation=inspect.Signature.empty
    )
    return str(plain)
