"""What the scheduler's side tells the workers in each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class NamedBlocks(NamedTuple):
    """Lists blocks of one request, each with the hash of its chain.

    Attributes:
        request_id: vLLM's name of the request.
        hashes: Of full blocks, in token order.
        ids: Where they lie.
    """

    request_id: str
    hashes: list[bytes]
    ids: list[int]


@dataclass(slots=True, kw_only=True)
class StoreStep:
    """Holds everything that the workers have to know for one step.

    Attributes:
        loads: What begins to be loaded.
        saves: What is written when the step's forward pass is over.
        fenced: Requests whose blocks may be overwritten in this step.
        leaving: Requests that are over; said is when their blocks have drained.
        idle: Nothing is computed; the step is there to see what has arrived.
    """

    loads: list[NamedBlocks] = field(default_factory=list)
    saves: list[NamedBlocks] = field(default_factory=list)
    fenced: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    idle: bool = False
