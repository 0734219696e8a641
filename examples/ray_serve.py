"""Prefill and decode as deployments of Ray Serve, each scaled by itself.

    pip install '.[ray]' 'ray[serve]'     # in a clone of kvwire
    python examples/ray_serve.py          # a load that comes and goes
    python examples/ray_serve.py --kill   # and replicas of prefill are killed

Serve picks a prefill replica for each request, counts those that are under way, and so
knows when to start one more; the KV goes straight from replica to replica. Of a prefill
that dies decode keeps what has arrived, and computes the rest. On a Ray that runs:
``serve run ray_serve:app``. docs/howto/ray.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import time
import urllib.request
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

import kvwire
from demo.book import Tokenizer, passages
from demo.llama import BLOCK_TOKENS, CONTEXT, Llama, load
from kvwire.integrations.marks import LayerMarks
from kvwire.integrations.ray import listen_address

# Requests that a replica works on at once. Each may fill the model's context; one whose
# client has gone holds its blocks a little longer.
REQUESTS: Final = 8
NUM_BLOCKS: Final = 2 * REQUESTS * CONTEXT // BLOCK_TOKENS
# Other requests have their turn between two chunks.
CHUNK: Final = 64
# So long decode waits for KV; then it computes what has not come.
PATIENCE_S: Final = 60.0
# The show's load ends by then, even if what it is to show has not happened.
SHOW_S: Final = 120.0


def scaled(most: int) -> dict[str, Any]:
    """Options of a deployment with one to ``most`` replicas.

    The times are short for a show. See Serve's autoscaling for those of a real load.
    """
    return {
        "max_ongoing_requests": REQUESTS,
        "ray_actor_options": {"num_cpus": 0.25},
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": most,
            "target_ongoing_requests": 2,
            "metrics_interval_s": 0.5,
            "look_back_period_s": 2,
            "upscale_delay_s": 1,
            "downscale_delay_s": 3,
        },
    }


class Replica:
    """What both sides have: a model, the blocks of its KV, and a communicator."""

    async def __init__(self, library: str = "numpy") -> None:  # type: ignore[misc]
        self.llama: Llama = load(library, NUM_BLOCKS)
        self.llama.warm_up()
        self.blocks = kvwire.BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
        self.thread = ThreadPoolExecutor(1)  # one step after the other
        name = serve.get_replica_context().replica_id.unique_id
        self.comm = await kvwire.open(name=name)
        self.address = str(await self.comm.listen(listen_address()))
        self.background: set[asyncio.Task[None]] = set()

    async def __del__(self) -> None:
        """Serve calls it when nothing is under way any more."""
        await self.comm.close()

    async def forward(self, tokens: list[int], sequence: Any) -> int:
        loop = asyncio.get_running_loop()
        step = self.llama.forward
        return (await loop.run_in_executor(self.thread, step, tokens, sequence)).token

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Go on with something, also where Serve cancels the request."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def release(
        self, transfer: kvwire.Incoming | kvwire.Outgoing, blocks: list[int]
    ) -> None:
        """Free blocks when neither a transfer nor the thread can touch them."""
        transfer.abort("the request was cancelled")  # nothing, where it has ended
        await transfer.drained()
        await asyncio.get_running_loop().run_in_executor(self.thread, int)
        self.blocks.free(blocks)


@serve.deployment(**scaled(3))
class Prefill(Replica):
    """Computes the KV of prompts, and sends it to the decode replica that asked."""

    dying = False

    async def run(self, address: str, name: str, tokens: list[int]) -> None:
        """Compute a prompt; for Serve that is one request, until decode has it all."""
        blocks = self.blocks.allocate(self.blocks.blocks_for(len(tokens)))
        # A layer of this small model is below the size at which layers travel alone.
        out = self.comm.peer(address).push(
            name, self.llama.cache, blocks, tokens=len(tokens), group_bytes=1
        )
        try:
            marks = LayerMarks(out, len(tokens), BLOCK_TOKENS)
            sequence = self.llama.sequence(blocks, on_written=marks)
            async with out:
                for start in range(0, len(tokens), CHUNK):
                    if out.done():  # before its end: nobody wants it any more
                        break
                    if start and self.dying:
                        os.kill(os.getpid(), signal.SIGKILL)
                    await self.forward(tokens[start : start + CHUNK], sequence)
            await out
        finally:
            self.spawn(self.release(out, blocks))

    async def die(self) -> None:
        """For the show: this process is killed in the middle of a prompt.

        The caller's call then fails with ``RayActorError``; it never returns.
        """
        self.dying = True
        try:
            await asyncio.Event().wait()
        finally:
            self.dying = False  # the caller has cancelled it


@serve.deployment(**scaled(2))
class Decode(Replica):
    """Generates text, with KV from prefill."""

    async def __init__(  # type: ignore[misc]
        self, prefill: DeploymentHandle, library: str = "numpy"
    ) -> None:
        await super().__init__(library)
        self.prefill = prefill
        self.tokenizer = Tokenizer()
        self.names = (f"{self.comm.name}/{number}" for number in itertools.count())

    async def __call__(self, request: Request) -> dict[str, Any]:
        """``POST {"prompt": "...", "new": 32}``."""
        asked = await request.json()
        prompt = self.tokenizer.encode(asked["prompt"])
        new = int(asked["new"])
        if len(prompt) < 2 or new < 1 or len(prompt) + new > CONTEXT:
            raise ValueError(f"{len(prompt)} + {new} tokens: {CONTEXT} are the most")
        blocks = self.blocks.allocate(self.blocks.blocks_for(len(prompt) + new))
        name = next(self.names)
        tokens = prompt[:-1]
        filled = blocks[: self.blocks.blocks_for(len(tokens))]
        incoming = self.comm.expect(
            name,
            self.llama.cache,
            filled,
            tokens=len(tokens),
            deadline=PATIENCE_S,
        )
        try:
            received = await self.fetch(incoming, name, tokens)
            # What did not come is computed with the prompt's last token.
            sequence = self.llama.sequence(blocks, length=received)
            said = [await self.forward(prompt[received:], sequence)]
            while len(said) < new:
                said.append(await self.forward(said[-1:], sequence))
        finally:
            self.spawn(self.release(incoming, blocks))
        return {
            "text": self.tokenizer.decode(said),
            "received": received,
            "computed": len(tokens) - received,
        }

    async def fetch(
        self, incoming: kvwire.Incoming, name: str, tokens: list[int]
    ) -> int:
        """Have a prompt prefilled; return how many leading tokens have their KV."""
        response = self.prefill.run.remote(self.address, name, tokens)

        async def watch() -> None:
            try:
                await response
            except Exception as exc:  # noqa: BLE001 - of Serve, or of the replica
                incoming.abort(f"no prefill: {exc!r}")  # what has come is kept

        self.spawn(watch())
        received = 0
        try:
            received = (await incoming).usable_tokens
            await incoming.drained()  # from here the blocks may also be written to
        finally:
            if received < len(tokens):
                response.cancel()
        return received


app = Decode.bind(Prefill.bind())  # type: ignore[attr-defined]

# --- the show -------------------------------------------------------------------------


def count_prefills() -> int:
    """Count the actors that Serve has started for prefill."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sum("#Prefill#" in one["name"] for one in named)


async def follow_replicas(counts: list[int], idle: asyncio.Event) -> None:
    """Print and keep each new count, until there is one replica and no load."""
    while not (idle.is_set() and counts[-1] == 1):
        count = count_prefills()
        if count != counts[-1]:
            counts.append(count)
            print(f"replicas of prefill: {count}", flush=True)
        await asyncio.sleep(0.1)


async def kill_replicas(every_s: float, killed: asyncio.Event) -> None:
    """Have replicas killed, each with prompts in progress; Serve gets no notice."""
    prefill = serve.get_deployment_handle("Prefill", "default")
    while True:
        await asyncio.sleep(every_s)
        response = prefill.die.remote()
        try:
            await response
        except RayActorError:
            killed.set()
            print("killed one", flush=True)
        finally:
            response.cancel()


def post(url: str, prompt: str, new: int) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "new": new}).encode()
    with urllib.request.urlopen(url, body) as answer:  # noqa: S310 - of this machine
        found: dict[str, Any] = json.load(answer)
    return found


async def show(options: argparse.Namespace) -> None:
    """Send all requests at once, and compare each text with one process alone.

    Again and again, until prefill has scaled up and, with ``--kill``, a prompt has lost
    its replica.
    """
    tokenizer = Tokenizer()
    alone = load("numpy", 2)
    prompts = [
        tokenizer.encode(text)[: options.prompt] for text in passages(8).values()
    ]
    expected = [tokenizer.decode(alone.generate(p, options.new)) for p in prompts]
    url = f"http://127.0.0.1:{options.http}/"
    idle = asyncio.Event()
    killed = asyncio.Event()
    counts = [1]
    following = asyncio.create_task(follow_replicas(counts, idle))
    killing = asyncio.create_task(kill_replicas(options.kill or 1e9, killed))
    threads = ThreadPoolExecutor(options.requests)
    loop = asyncio.get_running_loop()
    answers: list[dict[str, Any]] = []
    until = time.monotonic() + SHOW_S
    shown = False
    while not shown and time.monotonic() < until:
        wave = await asyncio.gather(
            *(
                loop.run_in_executor(
                    threads, post, url, tokenizer.decode(prompts[n % 8]), options.new
                )
                for n in range(options.requests)
            )
        )
        for number, answer in enumerate(wave):
            assert answer["text"] == expected[number % 8], answer
        answers += wave
        lost = killed.is_set() and any(answer["computed"] for answer in answers)
        shown = max(counts) > 1 and (lost or not options.kill)
    killing.cancel()
    received, computed = (
        sum(answer[key] for answer in answers) for key in ("received", "computed")
    )
    parts = sum(min(answer["received"], answer["computed"]) > 0 for answer in answers)
    print(f"{len(answers)} texts, each as one process alone says")
    print(f"{received} tokens received, {computed} computed by decode")
    print(f"{parts} prompts came in part", flush=True)
    idle.set()
    await following


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kill", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--new", type=int, default=24, help="tokens")
    parser.add_argument("--http", type=int, default=8000, metavar="PORT")
    options = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": options.http})
    serve.run(app)
    try:
        asyncio.run(show(options))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
