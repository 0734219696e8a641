"""The reference: one process that does it all, with nothing of kvwire."""

from __future__ import annotations

from kvwire.cli.demo.lines import Decode, Single, Up, orders, say
from kvwire.cli.demo.llama import load


async def run(library: str) -> None:
    """Take orders until standard input closes."""
    llama = load(library, num_blocks=2)
    say(Up("single"))
    async for order in orders():
        assert isinstance(order, Decode)
        say(Single(order.request, llama.generate(order.tokens, order.new)))
