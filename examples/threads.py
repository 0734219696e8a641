"""Prefill and decode without an event loop, with one thread for each prompt.

    python examples/threads.py prefill python examples/threads.py decode 127.0.0.1:7400
    # the address that prefill printed

Prefill computes three prompts for each process that connects. Kill prefill and start
decode again: it computes the KV that does not arrive.
"""

from __future__ import annotations

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import kvwire
from toy_model import Pool, ToyModel, blocks_for, text_of, tokens_of

PROMPTS = {
    "first": "who are you, said the caterpillar. this was not an encouraging opening",
    "second": "one block after the other, said the mouse, and none of them twice",
    "third": "the rest of the prompt is as long as the part before it, and so on",
}
NEW = 24
model = ToyModel()


def prefill() -> None:
    """Compute the prompts for each process that connects."""
    with kvwire.Engine(name="prefill") as engine, ThreadPoolExecutor() as threads:

        def compute(id: str, prompt: str) -> None:
            tokens = tokens_of(prompt)[:-1]
            blocks = blocks_for(len(tokens))
            pool = Pool(len(blocks))
            out = engine.publish(id, pool.cache, blocks, tokens=len(tokens))

            def on_written(layer: int, start: int, stop: int) -> None:
                out.ready(layers=layer)  # never waits; the layer is sent now

            model.forward(tokens, pool, blocks, 0, on_written)
            out.finish()
            out.wait()
            out.wait_drained()  # from here on, the blocks are free

        print(f"prefill listens on {engine.listen('127.0.0.1:0')}", flush=True)
        while True:
            consumer = engine.run(engine.communicator.accept()).peer.name
            for name, prompt in PROMPTS.items():
                threads.submit(compute, f"{consumer}/{name}", prompt)


def decode(address: str) -> None:
    """Answer the prompts, with KV from prefill if it is there."""
    me = f"decode-{os.getpid()}"
    with kvwire.Engine(name=me) as engine, ThreadPoolExecutor() as threads:
        connection = None
        with contextlib.suppress(kvwire.ConnectError):
            connection = engine.connect(address)

        def answer(name: str) -> str:
            prompt = tokens_of(PROMPTS[name])
            blocks = blocks_for(len(prompt) + NEW)
            pool = Pool(len(blocks))
            wanted = len(prompt) - 1  # the last token is computed here
            known = 0
            if connection is not None:
                filled = blocks[: len(blocks_for(wanted))]
                inc = engine.pull(
                    connection,
                    f"{me}/{name}",
                    pool.cache,
                    filled,
                    tokens=wanted,
                    deadline=30.0,
                )
                known = inc.wait().usable_tokens
                inc.wait_drained()  # from here on, the blocks may be written to
            text = text_of(model.answer(prompt, pool, blocks, NEW, known))
            return f"{text!r}: {known} of {wanted} tokens from prefill"

        for line in threads.map(answer, PROMPTS):
            print(line)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prefill"]:
            with contextlib.suppress(KeyboardInterrupt):
                prefill()
        case ["decode", where]:
            decode(where)
        case _:
            sys.exit(__doc__)
