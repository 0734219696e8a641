"""What the scheduler's side tells the workers in each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class NamedBlocks(NamedTuple):
    """Lists blocks of one request, each with the hash of its chain."""

    request_id: str  # vLLM's name of the request
    hashes: list[bytes]  # of full blocks, in token order
    ids: list[int]  # where they lie


@dataclass(slots=True, kw_only=True)
class StoreStep:
    """Holds everything that the workers have to know for one step."""

    loads: list[NamedBlocks] = field(default_factory=list)  # what begins to be loaded
    # What is written when the step's forward pass is over.
    saves: list[NamedBlocks] = field(default_factory=list)
    # Requests whose blocks may be overwritten in this step.
    fenced: set[str] = field(default_factory=set)
    # Requests that are over; said is when their blocks have drained.
    leaving: set[str] = field(default_factory=set)
    idle: bool = False  # nothing is computed; the step is there to see what has arrived
