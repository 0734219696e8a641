"""The reference: one process, transformers' own cache and loop, nothing of kvwire."""

from __future__ import annotations

import asyncio

from examples.demo.lines import Decode, Single, Up, orders, say
from examples.demo.llama import Llama


async def main() -> None:
    """Take orders until standard input closes."""
    llama = Llama()
    say(Up("single"))
    async for order in orders():
        assert isinstance(order, Decode)
        say(Single(order.request, llama.generate(order.tokens, order.new)))


if __name__ == "__main__":
    asyncio.run(main())
