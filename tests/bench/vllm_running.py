"""Servers of a group of contenders while they run, and how each contender is asked."""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.bench.vllm_requests import Sample, ask_alone, ask_at_once, ask_in_sequence
from tests.bench.vllm_servers import (
    GROUPS,
    PLACEMENTS,
    SHAPES,
    Contender,
    Placement,
    server,
)
from tests.bench.vllm_wire import HERE, Host, two_hosts
from tests.integrations.vllm.models import make_model
from tests.integrations.vllm.pairs import running as serving_all
from tests.integrations.vllm.serving import Engine

# And beside which servers, whose threads take their share of the cores.
OFF: Final = "no connector, beside "
# Before anything is measured: the first request of a pair connects it, and the others
# write to every page of the caches for the first time.
FIRST: Final = (50, *[4000] * 5)


@dataclass(frozen=True, slots=True)
class Turn:
    """Somebody who is asked in turns with others."""

    # Of the contender, or ``no connector, beside ...``.
    name: str
    # Sends it a prompt, and waits.
    ask: Callable[[list[int]], Sample]
    # Those that take part: prefill and decode, or one alone.
    engines: tuple[Engine, ...]


def chosen(only: Sequence[str] | None) -> list[list[Contender]]:
    """The groups, of contenders whose names have one of these parts; all for None."""
    groups = [
        [one for one in group if any(part in one.name for part in only or [""])]
        for group in GROUPS
    ]
    return [group for group in groups if group]


@contextmanager
def running(
    group: Sequence[Contender],
    shape: str,
    *,
    wire: str = "",
    placement: Placement = PLACEMENTS["bound"],
) -> Iterator[list[Turn]]:
    """Run a group's servers, and one without a connector, until the block ends."""
    # Servers are process groups of their own: they would outlive a bench that is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model("gqa", folder, **SHAPES[shape])
        hosts: tuple[Host, Host] = (HERE, HERE)
        if wire:
            hosts = stack.enter_context(two_hosts(wire, folder))
        make = partial(server, model=model, folder=folder, placement=placement)
        alone = make(None, "", 0)
        pairs = {
            one.servers: (
                make(one, "kv_producer", 0, host=hosts[0]),
                make(one, "kv_consumer", 1, host=hosts[1]),
            )
            for one in group
        }
        engines = [alone, *itertools.chain.from_iterable(pairs.values())]
        stack.enter_context(serving_all(*engines))
        turns = [
            Turn(one.name, _ask(one, *pairs[one.servers]), pairs[one.servers])
            for one in group
        ]
        off = OFF + group[0].servers
        yield [*turns, Turn(off, partial(ask_alone, alone), (alone,))]


def _ask(
    contender: Contender, prefill: Engine, decode: Engine
) -> Callable[[list[int]], Sample]:
    if contender.at_once:
        return partial(ask_at_once, prefill, decode, pushes=contender.pushes)
    return partial(ask_in_sequence, prefill, decode)
