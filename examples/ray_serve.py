"""Prefill and decode as deployments of Ray Serve, which scale independently.

    pip install . ./packages/store './packages/engines[ray]' 'ray[serve]'
    python examples/ray_serve.py          # a load that comes and goes
    python examples/ray_serve.py --kill   # and replicas of prefill are killed

Serve picks a prefill replica for each request, and counts running requests to decide
when to start another replica; the KV goes directly from replica to replica. If a
prefill replica dies, decode keeps the blocks that have arrived, and computes the rest.
On a running Ray cluster: ``serve run ray_serve:app``. See docs/howto/engines.md.
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
from kvwire.kv.marks import LayerMarks
from kvwire_engines.ray import listen_address

# The requests that a replica works on at a time. Each may fill the model's context; a
# request whose client has disconnected holds its blocks a little longer.
REQUESTS: Final = 8
NUM_BLOCKS: Final = 2 * REQUESTS * CONTEXT // BLOCK_TOKENS
# Other requests get a turn between two chunks.
CHUNK: Final = 64
# Decode waits this long for KV; then it computes the missing part.
PATIENCE_S: Final = 60.0
# The demo's load ends by then, even if not everything has been shown.
SHOW_S: Final = 120.0


def scaled(most: int) -> dict[str, Any]:
    """Return the options of a deployment with one to ``most`` replicas.

    The times are short, for the demo. See Serve's autoscaling for realistic ones.
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
    """The parts of both sides: a model, the blocks of its KV, and a communicator."""

    async def __init__(self, library: str = "numpy") -> None:  # type: ignore[misc]
        self.llama: Llama = load(library, NUM_BLOCKS)
        self.llama.warm_up()
        self.blocks = kvwire.BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
        self.thread = ThreadPoolExecutor(1)  # one step at a time
        name = serve.get_replica_context().replica_id.unique_id
        self.comm = await kvwire.open(name=name)
        self.address = str(await self.comm.listen(listen_address()))
        self.background: set[asyncio.Task[None]] = set()

    async def __del__(self) -> None:
        """Close the communicator; Serve calls this once no request is running."""
        await self.comm.close()

    async def forward(self, tokens: list[int], sequence: Any) -> int:
        loop = asyncio.get_running_loop()
        step = self.llama.forward
        return (await loop.run_in_executor(self.thread, step, tokens, sequence)).token

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, even if Serve cancels the request."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def release(
        self, transfer: kvwire.Incoming | kvwire.Outgoing, blocks: list[int]
    ) -> None:
        """Free blocks once neither the transfer nor the thread can touch them."""
        transfer.abort("the request was cancelled")  # has no effect if it has ended
        await transfer.drained()
        await asyncio.get_running_loop().run_in_executor(self.thread, int)
        self.blocks.free(blocks)


@serve.deployment(**scaled(3))
class Prefill(Replica):
    """Computes the KV of prompts, and sends it to the decode replica that asked."""

    dying = False

    async def run(self, address: str, name: str, tokens: list[int]) -> None:
        """Compute a prompt; the request lasts until decode has all of the KV."""
        blocks = self.blocks.allocate(self.blocks.blocks_for(len(tokens)))
        # A layer of this small model is smaller than the size at which layers are sent
        # alone.
        out = self.comm.peer(address).push(
            name, self.llama.cache, blocks, tokens=len(tokens), group_bytes=1
        )
        try:
            marks = LayerMarks(out, len(tokens), BLOCK_TOKENS)
            sequence = self.llama.sequence(blocks, on_written=marks)
            async with out:
                for start in range(0, len(tokens), CHUNK):
                    if out.done():  # ended early: no consumer is left
                        break
                    if start and self.dying:
                        os.kill(os.getpid(), signal.SIGKILL)
                    await self.forward(tokens[start : start + CHUNK], sequence)
            await out
        finally:
            self.spawn(self.release(out, blocks))

    async def die(self) -> None:
        """For the demo: kill this process in the middle of a prompt.

        The caller's call then fails with ``RayActorError``; it never returns.
        """
        self.dying = True
        try:
            await asyncio.Event().wait()
        finally:
            self.dying = False  # the caller has cancelled the call


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
            # The tokens that did not arrive are computed with the prompt's last token.
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
                # the blocks that have arrived are kept
                incoming.abort(f"no prefill: {exc!r}")

        self.spawn(watch())
        received = 0
        try:
            received = (await incoming).usable_tokens
            await incoming.drained()  # from here on, the blocks may also be written to
        finally:
            if received < len(tokens):
                response.cancel()
        return received


app = Decode.bind(Prefill.bind())  # type: ignore[attr-defined]

# --- the show -------------------------------------------------------------------------


def count_prefills() -> int:
    """Return the number of prefill actors that Serve has started."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sum("#Prefill#" in one["name"] for one in named)


async def follow_replicas(counts: list[int], idle: asyncio.Event) -> None:
    """Print and record each new count, until there is one replica and no load."""
    while not (idle.is_set() and counts[-1] == 1):
        count = count_prefills()
        if count != counts[-1]:
            counts.append(count)
            print(f"replicas of prefill: {count}", flush=True)
        await asyncio.sleep(0.1)


async def kill_replicas(every_s: float, killed: asyncio.Event) -> None:
    """Have replicas killed, each with prompts in progress; Serve is not notified."""
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
    """Send all requests at once, and compare each text with that of one process alone.

    Repeat until prefill has scaled up and, with ``--kill``, a prompt has lost its
    replica.
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
    print(f"{len(answers)} texts, each the same as from one process alone")
    print(f"{received} tokens received, {computed} computed by decode")
    print(f"{parts} prompts arrived in part", flush=True)
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
