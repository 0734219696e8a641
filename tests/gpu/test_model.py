"""A model that prefills in one process and decodes in another on the same GPU.

Both have the same random weights. Every token is compared with those of one process
alone. Without a GPU, a small model runs on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

import pytest

import kvwire
from kvwire import PagedCache
from tests.gpu.devices import need_gpu
from tests.support.runs import Beside, beside

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
BLOCK_TOKENS: Final = 16
NEW: Final = 16
SEED: Final = 40
_ORDER, _DONE = 1, 2
STREAMED, WHOLE = "streamed", "whole"


class Size(NamedTuple):
    """A decoder with grouped queries, as Llama's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    prompt: int


SIZES: Final = {
    "cuda": Size(24, 2048, 16, 4, 5632, 32_000, 4_000),
    "cpu": Size(3, 64, 4, 2, 128, 97, 200),
}


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


async def prefill(device: str) -> None:
    """Compute the prompts that are ordered, and publish them."""
    torch.set_num_threads(1)
    size = SIZES[device]
    blocks = blocks_of(size)
    model = Model(size, device, len(blocks))
    used = blocks[: -(-size.prompt // BLOCK_TOKENS)]
    async with kvwire.open(name="prefill") as comm:
        print(await comm.listen("127.0.0.1:0"), flush=True)
        connection = await comm.accept()
        while True:
            order = json.loads(bytes(await connection.recv(_ORDER)))
            number = order["number"]
            async with comm.publish(
                number, model.cache, used, tokens=size.prompt
            ) as out:
                prompt = prompt_of(size, number)

                def mark(layer: int, out: kvwire.Outgoing = out) -> None:
                    out.ready(layers=layer, after=model.written())

                streams = mark if order["way"] == STREAMED else None
                await asyncio.to_thread(model.forward, prompt, 0, blocks, streams)
                model.finish()
                if order["way"] == WHOLE:
                    out.ready()
            await out.drained()


# --- decode ---------------------------------------------------------------------------


class Decode:
    """Orders prompts from another process, and continues them."""

    def __init__(
        self, device: str, other: Beside, connection: kvwire.Connection
    ) -> None:
        self.size = SIZES[device]
        self.blocks = blocks_of(self.size)
        self.used = self.blocks[: -(-self.size.prompt // BLOCK_TOKENS)]
        self.model = Model(self.size, device, len(self.blocks))
        self.other = other
        self.connection = connection

    async def order(self, number: int, way: str, **options: Any) -> kvwire.Incoming:
        """Have a prompt computed there; its cache as it comes."""
        order = json.dumps({"way": way, "number": number}).encode()
        await self.connection.send(_ORDER, order)
        return self.connection.pull(
            number,
            self.model.cache,
            self.used,
            tokens=self.size.prompt,
            **options,
        )

    def continued(self, prompt: list[int]) -> list[int]:
        """What follows a prompt whose keys and values are here.

        The last token is computed once more: its logits are not here.
        """
        last = self.model.forward(prompt[-1:], len(prompt) - 1, self.blocks)
        return self.model.generate(prompt, int(last), self.blocks)

    def alone(self, prompt: list[int]) -> list[int]:
        """The same without anybody else."""
        self.model.forward(prompt, 0, self.blocks)
        return self.continued(prompt)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def decode(request: pytest.FixtureRequest) -> AsyncIterator[Decode]:
    if request.param == "cuda":
        need_gpu("gpu")
    torch.set_num_threads(1)
    words = ("-m", "tests.gpu.test_model", request.param)
    async with beside(*words, kind=Beside) as other, kvwire.open(name="decode") as comm:
        yield Decode(request.param, other, await comm.connect(await other.line()))


@pytest.mark.parametrize("way", [STREAMED, WHOLE])
async def test_tokens_are_those_of_one_process_alone(decode: Decode, way: str) -> None:
    for number in range(3):
        inc = await decode.order(number, way)
        outcome = await inc
        assert outcome.complete, outcome.missing
        prompt = prompt_of(decode.size, number)
        got = await asyncio.to_thread(decode.continued, prompt)
        await inc.drained()
        assert got == await asyncio.to_thread(decode.alone, prompt)


async def test_a_prefill_that_is_killed(decode: Decode) -> None:
    """What is missing is named, and the prompt is computed here."""
    prompt = prompt_of(decode.size, 0)
    assert (await (await decode.order(0, STREAMED))).complete
    expected = await asyncio.to_thread(decode.continued, prompt)
    async with await decode.order(0, STREAMED, lease_s=1.0) as inc:
        await inc.layer(0)
        decode.other.signal(signal.SIGKILL)
        outcome = await inc
    assert outcome.complete or outcome.missing
    assert await asyncio.to_thread(decode.alone, prompt) == expected


if __name__ == "__main__":
    asyncio.run(prefill(sys.argv[1]))
