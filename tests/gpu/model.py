"""Prefill in one process, decode in another: ``python -m tests.gpu.model``.

This process decodes. Another one on the same GPU has the same model, with random
weights from one seed, and prefills: its cache comes here layer by layer while it
computes. Every token is compared with those of one process alone. Measured beside each
other, in turns: the forward pass with and without a transfer, the time to the first
token with the cache streamed and sent as a whole, and what is left to send when prefill
is over. At last prefill is killed during a transfer, and this process computes the
prompt itself.

With ``--simulated`` it runs on the CPU, with a small model. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

import kvwire
from kvwire import PagedCache
from tests.support.runs import Beside, beside

BLOCK_TOKENS: Final = 16
NEW: Final = 16
SEED: Final = 40
_ORDER, _DONE = 1, 2
STREAMED, WHOLE, ALONE = "streamed", "whole", "alone"


class Size(NamedTuple):
    """A decoder with grouped queries, as Llama's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    prompt: int


GPU_SIZE: Final = Size(24, 2048, 16, 4, 5632, 32_000, 4_000)
CPU_SIZE: Final = Size(3, 64, 4, 2, 128, 97, 200)


class Model:
    """A decoder whose attention reads keys and values from blocks."""

    def __init__(self, size: Size, device: str, blocks: int) -> None:
        torch.manual_seed(SEED)
        self.size = size
        self.device = device
        self.dim = size.hidden // size.heads
        self._type = torch.bfloat16 if device == "cuda" else torch.float32
        made = torch.Generator().manual_seed(SEED)
        rows = (size.heads + 2 * size.kv_heads) * self.dim

        def weights(*shape: int) -> Any:
            random = torch.randn(shape, generator=made) / shape[-1] ** 0.5
            return random.to(device, self._type)

        self._embedding = weights(size.vocabulary, size.hidden)
        self._layers = [
            (
                weights(rows, size.hidden),
                weights(size.hidden, size.hidden),
                weights(2 * size.ffn, size.hidden),
                weights(size.hidden, size.ffn),
            )
            for _ in range(size.layers)
        ]
        shape = (blocks, 2, BLOCK_TOKENS, size.kv_heads, self.dim)
        self.tensors: list[Any] = [
            torch.zeros(shape, dtype=self._type, device=device)
            for _ in range(size.layers)
        ]
        self.cache = PagedCache.of(self.tensors, fingerprint=f"random {SEED}")

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
    def forward(
        self,
        tokens: list[int],
        start: int,
        blocks: list[int],
        on_layer: Callable[[int], None] | None = None,
    ) -> int:
        """Compute tokens from a position on; return the one that follows them."""
        table = torch.tensor(blocks, device=self.device)
        stop = start + len(tokens)
        at = torch.arange(start, stop, device=self.device)
        hidden = self._embedding[torch.tensor(tokens, device=self.device)]
        for n, (qkv, out, up, down) in enumerate(self._layers):
            query, key, value = self._split(_norm(hidden) @ qkv.T)
            where = table[at // BLOCK_TOKENS]
            slots = at % BLOCK_TOKENS
            self.tensors[n][where, 0, slots] = _rotated(key, at)
            self.tensors[n][where, 1, slots] = value
            if on_layer is not None:
                on_layer(n)
            used = table[: -(-stop // BLOCK_TOKENS)]
            read = self.tensors[n][used].transpose(0, 1).flatten(1, 2)[:, :stop]
            repeats = self.size.heads // self.size.kv_heads
            keys, values = read.repeat_interleave(repeats, dim=2).transpose(1, 2)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                _rotated(query, at).transpose(0, 1)[None],
                keys[None],
                values[None],
                is_causal=not start,
            )
            hidden = hidden + mixed[0].transpose(0, 1).flatten(1) @ out.T
            gate, value = (_norm(hidden) @ up.T).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * value) @ down.T
        return int((_norm(hidden[-1]) @ self._embedding.T).argmax())

    def generate(self, prompt: list[int], first: int, blocks: list[int]) -> list[int]:
        """Continue a prompt whose keys and values are in blocks, by NEW tokens."""
        tokens = [first]
        while len(tokens) < NEW:
            at = len(prompt) + len(tokens) - 1
            tokens.append(self.forward(tokens[-1:], at, blocks))
        return tokens

    def written(self) -> Any:
        """An event behind what is queued now; None where nothing is queued."""
        if self.device != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def finish(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _split(self, both: Any) -> tuple[Any, Any, Any]:
        size, dim = self.size, self.dim
        parts = (size.heads * dim, size.kv_heads * dim, size.kv_heads * dim)
        query, key, value = both.split(parts, dim=-1)
        of = [part.unflatten(-1, (-1, dim)) for part in (query, key, value)]
        return of[0], of[1], of[2]


def _norm(hidden: Any) -> Any:
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])


def _rotated(rows: Any, at: Any) -> Any:
    """Rotate pairs of elements by the position of their token."""
    half = rows.shape[-1] // 2
    steps = torch.arange(half, device=rows.device, dtype=torch.float32)
    angles = at[:, None].float() / 10_000 ** (steps / half)
    cos = angles.cos().to(rows.dtype)[:, None]
    sin = angles.sin().to(rows.dtype)[:, None]
    left, right = rows[..., :half], rows[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def prompt_of(size: Size, number: int) -> list[int]:
    """Return the prompt of a round."""
    made = torch.Generator().manual_seed(number)
    shape = (size.prompt,)
    return list(torch.randint(size.vocabulary, shape, generator=made).tolist())


def blocks_of(size: Size) -> list[int]:
    """Return blocks for a prompt and what follows, in no simple order."""
    count = -(-(size.prompt + NEW) // BLOCK_TOKENS)
    made = torch.Generator().manual_seed(SEED)
    return list(torch.randperm(count, generator=made).tolist())


# --- prefill --------------------------------------------------------------------------


async def prefill(size: Size, device: str) -> None:
    """Compute the prompts that are ordered, and publish them."""
    model = Model(size, device, len(blocks_of(size)))
    blocks = blocks_of(size)
    used = -(-size.prompt // BLOCK_TOKENS)
    async with kvwire.open(name="prefill") as comm:
        print(await comm.listen("127.0.0.1:0"), flush=True)
        connection = await comm.accept()
        while True:
            order = json.loads(bytes(await connection.recv(_ORDER)))
            way, number = order["way"], order["number"]
            out = None
            if way != ALONE:
                out = comm.publish(
                    number, model.cache, blocks[:used], tokens=size.prompt
                )
            took = await asyncio.to_thread(_computed, model, number, blocks, out, way)
            if out is not None:
                out.finish()
            await connection.send(_DONE, json.dumps(took).encode())
            if out is not None:
                await out.drained()


def _computed(
    model: Model, number: int, blocks: list[int], out: Any, way: str
) -> dict[str, Any]:
    """Compute a prompt; return the token that follows, and the seconds."""

    def mark(layer: int) -> None:
        out.ready(layers=layer, after=model.written())

    model.finish()
    began = time.monotonic()
    streams = mark if way == STREAMED else None
    first = model.forward(prompt_of(model.size, number), 0, blocks, streams)
    model.finish()
    over = time.monotonic()
    if way == WHOLE:
        out.ready()
    return {"first": first, "took_s": over - began, "over": over}


# --- decode ---------------------------------------------------------------------------


class Decode:
    """Pulls prompts, continues them, and compares the tokens."""

    def __init__(self, size: Size, device: str, connection: kvwire.Connection) -> None:
        self.size = size
        self.model = Model(size, device, len(blocks_of(size)))
        self.blocks = blocks_of(size)
        self.used = -(-size.prompt // BLOCK_TOKENS)
        self.connection = connection
        self.seconds: dict[str, list[float]] = {}
        # What this process has generated by itself, by prompt.
        self.expected: dict[int, list[int]] = {}
        self.compared = 0

    async def round(self, number: int, way: str) -> None:
        """Order a prompt; continue it, unless it is computed without a transfer."""
        connection = self.connection
        began = time.monotonic()
        await connection.send(
            _ORDER, json.dumps({"way": way, "number": number}).encode()
        )
        if way == ALONE:
            took = json.loads(bytes(await connection.recv(_DONE)))
            self._note("forward alone", took["took_s"])
            return
        inc = connection.pull(
            number, self.model.cache, self.blocks[: self.used], tokens=self.size.prompt
        )
        outcome = await inc
        assert outcome.complete, outcome.missing
        landed = time.monotonic()
        took = json.loads(bytes(await connection.recv(_DONE)))
        prompt = prompt_of(self.size, number)
        first = await asyncio.to_thread(self._first, prompt)
        self._note(f"first token, {way}", time.monotonic() - began)
        self._note(f"left after prefill, {way}", max(0.0, landed - took["over"]))
        if way == STREAMED:
            self._note("forward beside a transfer", took["took_s"])
        got = await asyncio.to_thread(self.model.generate, prompt, first, self.blocks)
        await inc.drained()
        self.expected[number] = await asyncio.to_thread(self._alone, prompt)
        self._compare(number, got)

    async def killed(self, number: int, other: Beside) -> None:
        """Kill prefill in the middle of a prompt; compute all of it here."""
        order = json.dumps({"way": STREAMED, "number": number}).encode()
        await self.connection.send(_ORDER, order)
        async with self.connection.pull(
            number,
            self.model.cache,
            self.blocks[: self.used],
            tokens=self.size.prompt,
            lease_s=1.0,
        ) as inc:
            await inc.layer(0)
            other.signal(signal.SIGKILL)
            outcome = await inc
        print(f"prefill killed: {len(outcome.missing)} blocks are missing", flush=True)
        self._compare(number, self._alone(prompt_of(self.size, number)))

    def _first(self, prompt: list[int]) -> int:
        """Compute the last token once more: its keys are there, its logits are not."""
        at = len(prompt) - 1
        return int(self.model.forward(prompt[-1:], at, self.blocks))

    def _alone(self, prompt: list[int]) -> list[int]:
        """Compute a prompt and what follows, without anybody else."""
        self.model.forward(prompt, 0, self.blocks)
        return self.model.generate(prompt, self._first(prompt), self.blocks)

    def _compare(self, number: int, got: list[int]) -> None:
        expected = self.expected[number]
        assert got == expected, f"prompt {number}: {got} and not {expected}"
        self.compared += len(got)

    def _note(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)


async def decode(size: Size, *, simulated: bool, rounds: int) -> dict[str, Any]:
    """Run all rounds, and the kill; return the figures."""
    device = "cpu" if simulated else "cuda"
    words = ["-m", "tests.gpu.model", "--prefill"]
    if simulated:
        words.append("--simulated")
    async with beside(*words, kind=Beside) as other, kvwire.open(name="decode") as comm:
        connection = await comm.connect(await other.line())
        here = Decode(size, device, connection)
        for turn in range(rounds + 1):
            if turn == 1:
                here.seconds.clear()  # the first warms up
            for at, way in enumerate((ALONE, STREAMED, WHOLE)):
                await here.round(3 * turn + at, way)
        ms = {
            what: 1e3 * statistics.median(samples)
            for what, samples in here.seconds.items()
        }
        transport = connection.transport
        await here.killed(3 * rounds + 1, other)
    spec = here.model.cache.spec
    return {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transport": transport,
        "prompt": size.prompt,
        "layers": spec.layers,
        "cache_mib": spec.block_bytes * here.used / 2**20,
        "tokens_compared": here.compared,
        "ms": {what: round(value, 3) for what, value in ms.items()},
        "forward_beside_to_alone": round(
            ms["forward beside a transfer"] / ms["forward alone"], 3
        ),
    }


def main() -> int:
    """Be one of the two processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument(
        "--simulated", action="store_true", help="a small model, on the CPU"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not options.simulated and not torch.cuda.is_available():
        print("there is no GPU: --simulated runs it on the CPU", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    size = CPU_SIZE if options.simulated else GPU_SIZE
    if options.prefill:
        asyncio.run(prefill(size, "cpu" if options.simulated else "cuda"))
        return 0
    found = asyncio.run(
        decode(size, simulated=options.simulated, rounds=options.rounds)
    )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
