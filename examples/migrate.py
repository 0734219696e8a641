"""Live migration: running requests move from engine to engine.

    python migrate.py                       # three engines, every request moves
    python migrate.py --kill                # and engines are killed meanwhile
    python migrate.py --torch --prompt 4000 # a Llama of transformers

Each engine is a process that runs its requests token by token. This process is the
frontend: it holds the streams, numbers their tokens, and after an engine's death asks
another engine for the rest. Whatever happens, each stream has the same tokens as if one
process had computed it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import msgspec

import kvwire
from kvwire.migration import Arrival, MigrationTarget, Written, migrate
from toy_model import SPEC, Pool, ToyModel, tokens_of

# Tags: orders from the frontend, and events from engines.
ORDERS = 1
EVENTS = 2

# After this time no more requests begin, even if not everything has been shown.
SHOW_S = 60.0


class Follow(msgspec.Struct, tag=True):
    """Order: send the engine's events over this connection."""


class Submit(msgspec.Struct, tag=True):
    """Order: continue after these tokens, until there are ``total``."""

    request: str
    tokens: list[int]
    total: int


class Move(msgspec.Struct, tag=True):
    """Order: move a request to the engine at an address."""

    request: str
    address: str


class Token(msgspec.Struct, tag=True):
    """Event: the token at one position of a request."""

    request: str
    place: int
    token: int


class Moved(msgspec.Struct, tag=True):
    """Event: the end of a move."""

    request: str
    result: str
    reason: str
    paused_s: float


class Model(Protocol):
    """A model that an engine can run."""

    cache: kvwire.PagedCache

    def forward(self, tokens: list[int], blocks: list[int], start: int) -> int:
        """Write the KV of tokens from position ``start`` on; return the next token."""


class Toy:
    """Runs the model of the other examples."""

    def __init__(self) -> None:
        self._model = ToyModel()
        self._pool = Pool(512)
        self.cache = self._pool.cache

    def forward(self, tokens: list[int], blocks: list[int], start: int) -> int:
        """See Model."""
        return self._model.forward(tokens, self._pool, blocks, start)


class Llama:
    """Runs a Llama of transformers with random weights."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

        from kvwire_engines.transformers import (  # noqa: PLC0415
            TensorPool,
            kv_spec,
        )

        torch.manual_seed(7)  # the same weights in every process
        torch.set_num_threads(1)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=65536,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
        self._model = LlamaForCausalLM(config).eval()
        spec = kv_spec(self._model.config, block_tokens=16, dtype=self._model.dtype)
        self._pool = TensorPool(spec, 1024)
        self.cache = self._pool.cache

    def forward(self, tokens: list[int], blocks: list[int], start: int) -> int:
        """See Model."""
        import torch  # noqa: PLC0415

        from kvwire_engines.transformers import PagedSequence  # noqa: PLC0415

        sequence = PagedSequence(self._pool, blocks, length=start)
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            logits = self._model(ids, cache=sequence, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())


# --- an engine ------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """A request that an engine runs, in the form that ``migrate`` expects.

    After a step, the KV of all tokens but the last is in the blocks.
    """

    engine: Engine
    name: str
    tokens: list[int]
    total: int
    blocks: list[int] = field(default_factory=list)
    done: int = 0  # the number of tokens whose KV is written
    paused: bool = False
    moving: bool = False
    stepping: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def cache(self) -> kvwire.PagedCache:
        return self.engine.model.cache

    @property
    def over(self) -> bool:
        return len(self.tokens) >= self.total

    def written(self) -> Written | None:
        return None if self.over else Written(self.blocks, self.done)

    async def pause(self) -> None:
        self.paused = True
        async with self.stepping:
            pass

    def resume(self) -> None:
        self.paused = False
        self.engine.wake.set()

    def state(self) -> bytes:
        return msgspec.msgpack.encode((self.tokens, self.total))

    def release(self) -> None:
        self.engine.forget(self)


class Engine:
    """Computes its requests in turn, on a thread; everything else runs on the loop."""

    def __init__(self, comm: kvwire.Communicator, model: Model) -> None:
        self.comm = comm
        self.model = model
        self.wake = asyncio.Event()
        self._free = list(range(model.cache.num_blocks))
        self._running: dict[str, Running] = {}
        self._frontends: list[kvwire.Connection] = []
        self._target = MigrationTarget(
            comm,
            model.cache,
            take=self._take,
            give_back=self._free.extend,
            start=self._arrive,
        )

    async def run(self) -> None:
        """Compute one token of each request, and repeat."""
        while True:
            ready = [one for one in self._running.values() if self._runs(one)]
            if not ready:
                self.wake.clear()
                await self.wake.wait()
            for one in ready:
                async with one.stepping:
                    if self._runs(one):
                        await self._step(one)
            await asyncio.sleep(0)

    def _runs(self, one: Running) -> bool:
        here = self._running.get(one.name) is one
        return here and not one.paused and not one.over

    async def _step(self, one: Running) -> None:
        size = self.model.cache.spec.block_tokens
        missing = -(-len(one.tokens) // size) - len(one.blocks)
        one.blocks += self._take(missing) or []
        new = one.tokens[one.done :]
        start = one.done
        token = await asyncio.to_thread(self.model.forward, new, one.blocks, start)
        one.done = len(one.tokens)
        one.tokens.append(token)
        self._say(Token(one.name, one.done, token))
        if one.over and not one.moving:
            self.forget(one)

    def forget(self, one: Running) -> None:
        """Free the request's blocks."""
        del self._running[one.name]
        self._free += one.blocks

    async def serve(self, connection: kvwire.Connection) -> None:
        """Handle the orders and moves from the frontend or another engine."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._target.serve(connection))
            try:
                while True:
                    raw = await connection.recv(ORDERS)
                    order = msgspec.msgpack.decode(raw, type=Follow | Submit | Move)
                    match order:
                        case Follow():
                            self._frontends.append(connection)
                        case Submit():
                            self._submit(order)
                        case Move():
                            tasks.create_task(self._move(order))
            except kvwire.ConnectionClosed:
                pass

    def _submit(self, order: Submit) -> None:
        here = self._running.get(order.request)
        if here is None:
            self._running[order.request] = Running(
                self, order.request, order.tokens, order.total
            )
            self.wake.set()
            return
        # It came from an engine that died before its last events were received.
        for place in range(len(order.tokens), len(here.tokens)):
            self._say(Token(here.name, place, here.tokens[place]))

    def _arrive(self, arrival: Arrival) -> None:
        tokens, total = msgspec.msgpack.decode(
            arrival.state, type=tuple[list[int], int]
        )
        if arrival.name in self._running:
            raise ValueError("it already runs here")
        self._running[arrival.name] = Running(
            self,
            arrival.name,
            tokens,
            total,
            list(arrival.blocks),
            done=arrival.tokens,
        )
        self.wake.set()

    async def _move(self, order: Move) -> None:
        one = self._running.get(order.request)
        if one is None or one.moving:
            self._say(Moved(order.request, "stayed", "it does not run here", 0.0))
            return
        one.moving = True
        try:
            connection = await self.comm.peer(order.address).connect()
            moved = await migrate(connection, one)
            said = Moved(one.name, moved.result, moved.reason, moved.paused_s)
        except kvwire.KVWireError as exc:
            said = Moved(one.name, "stayed", str(exc), 0.0)
        finally:
            one.moving = False
            if one.over and self._running.get(one.name) is one:
                self.forget(one)
        self._say(said)

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def _say(self, event: Token | Moved) -> None:
        raw = msgspec.msgpack.encode(event)
        for frontend in self._frontends:
            if not frontend.closed:
                frontend.send(EVENTS, raw)


async def engine(name: str, library: str) -> None:
    """Run an engine's process, which prints its address and runs until it is killed."""
    model = Llama() if library == "torch" else Toy()
    async with kvwire.open(name=name) as comm, asyncio.TaskGroup() as tasks:
        print(await comm.listen("127.0.0.1:0"), flush=True)
        this = Engine(comm, model)
        tasks.create_task(this.run())
        async for connection in comm.connections():
            tasks.create_task(this.serve(connection))


# --- the frontend ---------------------------------------------------------------------


@dataclass(eq=False)
class Member:
    """An engine's process, and the connection to it."""

    name: str
    process: asyncio.subprocess.Process
    address: str
    connection: kvwire.Connection

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self.connection.closed


@dataclass(eq=False)
class Stream:
    """A request as its client sees it."""

    name: str
    tokens: list[int]
    total: int
    owner: Member
    moving_to: Member | None = None
    ahead: dict[int, int] = field(default_factory=dict)
    came_at: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Frontend:
    """Starts engines, holds the streams, moves requests, and survives engines."""

    def __init__(self, comm: kvwire.Communicator, library: str) -> None:
        self.comm = comm
        self.library = library
        self.members: list[Member] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self.streams: dict[str, Stream] = {}
        self.counts = {"moved": 0, "stayed": 0, "unknown": 0, "asked again": 0}
        self._tasks = asyncio.TaskGroup()
        self._started = 0

    async def start(self) -> None:
        """Start one more engine."""
        self._started += 1
        name = f"engine-{self._started}"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--engine",
            name,
            "--library",
            self.library,
            stdout=asyncio.subprocess.PIPE,
        )
        self._processes.append(process)  # before it becomes a member: see __aexit__
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        connection = await self.comm.connect(address)
        connection.send(ORDERS, msgspec.msgpack.encode(Follow()))
        member = Member(name, process, address, connection)
        self.members.append(member)
        self._tasks.create_task(self._listen(member))

    async def submit(self, name: str, prompt: list[int], new: int) -> None:
        """Start a stream at the engine that has the fewest."""
        total = len(prompt) + new
        self.streams[name] = Stream(name, list(prompt), total, self._idlest())
        self._ask(self.streams[name])

    def move(self, stream: Stream) -> None:
        """Ask the stream's engine to move it to another engine."""
        others = [one for one in self.members if one.alive and one is not stream.owner]
        if others and stream.moving_to is None and not stream.over.is_set():
            stream.moving_to = min(others, key=self._load)
            move = Move(stream.name, stream.moving_to.address)
            stream.owner.connection.send(ORDERS, msgspec.msgpack.encode(move))

    async def kill(self) -> None:
        """Kill the busiest engine, and start another one to replace it."""
        max((one for one in self.members if one.alive), key=self._load).process.kill()
        await self.start()

    async def _listen(self, member: Member) -> None:
        """Follow one engine's events; when it dies, others continue its requests."""
        try:
            while True:
                raw = await member.connection.recv(EVENTS)
                event = msgspec.msgpack.decode(raw, type=Token | Moved)
                stream = self.streams[event.request]
                if isinstance(event, Token):
                    self._token(stream, event)
                else:
                    self._moved(stream, member, event)
        except kvwire.ConnectionClosed:
            self.members.remove(member)
            await member.process.wait()
            for stream in self.streams.values():
                if stream.owner is member and not stream.over.is_set():
                    self._again(stream)

    def _token(self, stream: Stream, event: Token) -> None:
        # After a move, tokens of the new engine may overtake those of the old one; and
        # if two engines had the request, both have sent the same tokens.
        if event.place >= len(stream.tokens):
            stream.ahead[event.place] = event.token
        while (token := stream.ahead.pop(len(stream.tokens), None)) is not None:
            stream.tokens.append(token)
            stream.came_at.append(time.perf_counter())
        if len(stream.tokens) >= stream.total:
            stream.over.set()

    def _moved(self, stream: Stream, source: Member, event: Moved) -> None:
        target = stream.moving_to
        stream.moving_to = None
        self.counts[event.result] += 1
        stream.pauses_s.append(event.paused_s)
        if stream.owner is not source:
            return
        if event.result == "moved" and target is not None and target.alive:
            stream.owner = target
        elif event.result != "stayed" and not stream.over.is_set():
            self._again(stream)

    def _again(self, stream: Stream) -> None:
        self.counts["asked again"] += 1
        stream.owner = self._idlest()
        stream.moving_to = None
        self._ask(stream)

    def _ask(self, stream: Stream) -> None:
        order = Submit(stream.name, stream.tokens, stream.total)
        stream.owner.connection.send(ORDERS, msgspec.msgpack.encode(order))

    def _idlest(self) -> Member:
        return min((one for one in self.members if one.alive), key=self._load)

    def _load(self, member: Member) -> int:
        running = (one for one in self.streams.values() if not one.over.is_set())
        return sum(one.owner is member for one in running)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A process whose start was cancelled would otherwise outlive this one.
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        await self._tasks.__aexit__(kind, error, trace)
        # The loop warns if it is closed before its child processes have ended.
        for process in self._processes:
            await process.wait()


async def run(options: argparse.Namespace) -> Frontend:
    """Run requests; move each from time to time, and kill engines if requested.

    More requests begin until one has moved and, with ``--kill``, one has lost its
    engine.
    """
    async with (
        kvwire.open(name="frontend") as comm,
        Frontend(comm, "torch" if options.torch else "toy") as frontend,
    ):
        for _ in range(options.engines):
            await frontend.start()
        chaos = asyncio.create_task(disturb(frontend, options))
        until = time.monotonic() + SHOW_S
        shown = False
        while not shown and time.monotonic() < until:
            for _ in range(options.requests):
                number = len(frontend.streams)
                prompt = prompt_of(number, options.prompt)
                await frontend.submit(f"request {number}", prompt, options.new)
            for stream in frontend.streams.values():
                await stream.over.wait()
            lost = frontend.counts["asked again"] or not options.kill
            shown = bool(frontend.counts["moved"] and lost)
        chaos.cancel()
        await asyncio.gather(chaos, return_exceptions=True)
    return frontend


async def disturb(frontend: Frontend, options: argparse.Namespace) -> None:
    """Move requests repeatedly; every fifth time, kill an engine."""
    for turn in itertools.count(1):
        await asyncio.sleep(options.every)
        for stream in frontend.streams.values():
            if stream.came_at:
                frontend.move(stream)
        if options.kill and turn % 5 == 0:
            await frontend.kill()


def prompt_of(number: int, length: int) -> list[int]:
    """Return a prompt that is different for each number."""
    text = tokens_of(f"story {number} of the engine that went away and came back. ")
    return (text * (length // len(text) + 1))[:length]


def alone(prompt: list[int], new: int, library: str) -> list[int]:
    """Return the tokens that one undisturbed process computes."""
    model: Model = Llama() if library == "torch" else Toy()
    size = SPEC.block_tokens
    blocks = list(range(-(-(len(prompt) + new) // size)))
    tokens = list(prompt)
    done = 0
    for _ in range(new):
        token = model.forward(tokens[done:], blocks, done)
        done = len(tokens)
        tokens.append(token)
    return tokens


def main() -> None:
    """Run the demo, compare the streams, and print the clients' view."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=200, help="tokens of an answer")
    parser.add_argument(
        "--every", type=float, default=0.2, help="seconds between moves"
    )
    parser.add_argument("--kill", action="store_true", help="kill engines as well")
    parser.add_argument(
        "--torch", action="store_true", help="use a model of transformers"
    )
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--library", default="toy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(engine(options.engine, options.library))
        return
    frontend = asyncio.run(run(options))
    for number, stream in enumerate(frontend.streams.values()):
        prompt = prompt_of(number, options.prompt)
        expected = alone(prompt, options.new, frontend.library)
        assert stream.tokens == expected, f"{stream.name} has other tokens"
    gaps = [
        later - earlier
        for stream in frontend.streams.values()
        for earlier, later in zip(stream.came_at, stream.came_at[1:], strict=False)
    ]
    pauses = [one for each in frontend.streams.values() for one in each.pauses_s if one]
    counts = ", ".join(f"{count} {what}" for what, count in frontend.counts.items())
    print(
        f"{len(frontend.streams)} streams, each with the tokens of one process alone; "
        f"{counts}"
    )
    step_ms = statistics.median(gaps) * 1e3
    if pauses:
        pause_ms = statistics.median(pauses) * 1e3
        print(
            f"a step takes {step_ms:.1f} ms, the pause of a move {pause_ms:.1f} ms: "
            f"{pause_ms / step_ms:.1f} steps (medians)"
        )


if __name__ == "__main__":
    main()
