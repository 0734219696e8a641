"""How long a batch waits for its first tokens when some of its KV was lost.

``python -m tests.bench.vllm_lost`` has one engine of vLLM compute eight prompts, keeps
their KV, and offers it to another engine: whole, or without the second half of some
prompts. Three ways to say that are compared: of each block whether it arrived, which is
kvwire's; of each prompt; and of the batch, of which nothing is used then. vLLM itself
counts what it computes again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx

import kvwire
from kvwire.cli.plot import new_figure
from tests.integrations.vllm.models import make_model
from tests.integrations.vllm.relay import BLOCK_TOKENS, Relay
from tests.integrations.vllm.serving import Engine, engine, prompt

BATCH, BLOCKS, LAYERS = 8, 8, 8
LOST: Final = (0, 1, 2, 4, 8)
EVERYTHING, FIRST_HALF = range(BLOCKS), range(BLOCKS // 2)
WAYS: Final = ("each block", "each prompt", "the batch")
_AFFECTED: Final = re.compile(r"request\(s\) rescheduled \((\d+) tokens affected\)")
_CLIENT: Final = httpx.Client(timeout=120)
Seconds = dict[str, dict[int, list[list[float]]]]


def main() -> int:
    """Measure, print and draw; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where every sample goes")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model("wide", folder)
        transfer = {"lease_s": 30.0, "require": ["tcp"]}
        more = ("--no-enable-prefix-caching",)
        both = [
            engine(model, folder, name, 0, transfer, *more) for name in ("one", "two")
        ]
        for server in both:
            stack.callback(server.kill)
        seconds, again = asyncio.run(_measure(both[0], both[1], options.rounds))
    print(table(seconds, again))
    if options.json:
        options.json.write_text(json.dumps({"ttft_s": seconds, "again": again}))
    if options.picture:
        draw(seconds, options.picture)
    return 0


def landed(way: str, prompt: int, lost: int) -> Sequence[int]:
    """The blocks of a prompt that decode may use, if so many prompts lost half."""
    if way == "the batch" and lost:
        return ()
    if prompt >= lost:
        return EVERYTHING
    return FIRST_HALF if way == "each block" else ()


async def _measure(
    prefill: Engine, decode: Engine, rounds: int
) -> tuple[Seconds, dict[str, dict[int, int]]]:
    """Return the times to first tokens, and the tokens that were computed again."""
    prompts = [
        prompt(BLOCKS * BLOCK_TOKENS, seed=300 + number) for number in range(BATCH)
    ]
    seconds: Seconds = {way: {lost: [] for lost in LOST} for way in WAYS}
    again: dict[str, dict[int, int]] = {way: {} for way in WAYS}
    async with kvwire.open(require=["tcp"]) as comm:
        address = await comm.listen("127.0.0.1:0")
        relay = Relay(comm, address, blocks=BLOCKS, prompts=BATCH, layers=LAYERS)
        want = await _computed(relay, prefill, prompts)
        decode.start()
        await asyncio.to_thread(decode.wait)
        for turn in range(-1, rounds):  # the first pass writes to all memory
            for lost in LOST:
                for way in WAYS:
                    offers = [
                        relay.offer(landed(way, number, lost), number)
                        for number in range(BATCH)
                    ]
                    before = _affected(decode)
                    told = [params for params, _ in offers]
                    found = await asyncio.to_thread(_ask, decode, prompts, told)
                    assert [token for _, token in found] == want, (way, lost)
                    for _, out in offers:
                        await out
                    again[way][lost] = _affected(decode) - before
                    if turn >= 0:
                        seconds[way][lost].append([took_s for took_s, _ in found])
    return seconds, again


async def _computed(
    relay: Relay, prefill: Engine, prompts: Sequence[list[int]]
) -> list[int]:
    """Take the KV of the prompts; the first token that follows each."""
    prefill.start()
    await asyncio.to_thread(prefill.wait)
    want = []
    for number, ids in enumerate(prompts):
        name = secrets.token_hex(8)
        sends = {"do_remote_decode": True, "transfer_id": name}
        said = await asyncio.to_thread(
            prefill.generate, ids, 1, kv_transfer_params=sends
        )
        want += said["choices"][0]["token_ids"]
        await relay.take(prefill, name, number)
    prefill.kill()  # only one engine computes while it is measured
    return want


def _ask(
    decode: Engine, prompts: Sequence[list[int]], told: Sequence[Mapping[str, Any]]
) -> list[tuple[float, int]]:
    """Ask for all at once: when the first token of each came, and which it was."""
    began = time.perf_counter()

    def first(number: int) -> tuple[float, int]:
        body = {
            "model": "m",
            "prompt": prompts[number],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "kv_transfer_params": told[number],
        }
        said = _CLIENT.post(f"{decode.url}/v1/completions", json=body)
        said.raise_for_status()
        (token,) = said.json()["choices"][0]["token_ids"]
        return time.perf_counter() - began, token

    with ThreadPoolExecutor(BATCH) as pool:
        return list(pool.map(first, range(BATCH)))


def _affected(engine: Engine) -> int:
    """Tokens that it has computed again so far, as vLLM says."""
    text = engine.log.read_text(errors="replace")
    return sum(map(int, _AFFECTED.findall(text)))


def table(seconds: Seconds, again: Mapping[str, Mapping[int, int]]) -> str:
    """The medians of a batch's mean and last first token, as Markdown."""
    lines = [
        "| prompts that lost half | " + " | ".join(map(str, LOST)) + " |",
        "|---|" + "---|" * len(LOST),
    ]
    for way in WAYS:
        cells = [str(again[way][lost]) for lost in LOST]
        lines.append(f"| {way}: tokens computed again | {' | '.join(cells)} |")
        for name, of in (("mean", statistics.mean), ("last", max)):
            cells = [f"{_median_ms(seconds[way][lost], of):.0f}" for lost in LOST]
            lines.append(f"| {way}: {name} first token, ms | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(seconds: Seconds, path: Path) -> None:
    """Draw the mean first token of a batch over the prompts that lost KV."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for way in WAYS:
        means = [_median_ms(seconds[way][lost], statistics.mean) for lost in LOST]
        (line,) = axes.plot(LOST, means, marker="o", label=f"of {way}")
        each = [[1000 * statistics.mean(s) for s in seconds[way][n]] for n in LOST]
        axes.fill_between(
            LOST,
            list(map(min, each)),
            list(map(max, each)),
            alpha=0.2,
            color=line.get_color(),
        )
    axes.set_xticks(LOST)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"of {BATCH} prompts of 1,024 tokens, lost the second half")
    axes.set_ylabel("mean time to first token, ms")
    axes.legend(frameon=False, title="decode hears")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _median_ms(
    rounds: Sequence[Sequence[float]], of: Callable[[Sequence[float]], float]
) -> float:
    return 1000 * statistics.median([of(one) for one in rounds])


if __name__ == "__main__":
    sys.exit(main())
