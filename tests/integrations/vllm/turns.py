"""A fleet that takes its engines in turns, so that a test knows which comes next."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.integrations.vllm.proxy.policy import Policy


class InTurns(Policy):
    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(
        self, engines: Sequence[VllmEngine], body: Mapping[str, Any]
    ) -> VllmEngine:
        return engines[next(self._turns) % len(engines)]


fleet_in_turns = partial(EngineFleet, route=f"{__name__}:InTurns")
