"""What a real decode engine computes of a prompt of which some blocks did not arrive.

A process between the two engines takes the KV of prefill and offers decode some blocks
of it. vLLM itself counts what it computes again.

`make test-vllm` runs this; without vLLM every test is skipped.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator

import pytest

import kvwire
from tests.integrations.vllm.models import make_model
from tests.integrations.vllm.pairs import Pair, running
from tests.integrations.vllm.relay import BLOCK_TOKENS, Relay
from tests.integrations.vllm.serving import NEEDS_VLLM, engine, prompt, tokens_of

pytestmark = [NEEDS_VLLM, pytest.mark.timeout(900)]
BLOCKS = 8
TOKENS = BLOCKS * BLOCK_TOKENS
AFFECTED = re.compile(r"request\(s\) rescheduled \((\d+) tokens affected\)")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines; decode keeps no prompt."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model("gqa", folder)
    transfer = {"lease_s": 10.0, "require": ["tcp"]}
    more = "--no-enable-prefix-caching"
    made = [
        engine(model, folder, name, core, transfer, more)
        for core, name in enumerate(("prefill", "decode"))
    ]
    with running(*made):
        yield Pair(*made)


async def decoded(pair: Pair, ids: list[int], landed: list[int]) -> list[int]:
    """What decode makes of a prompt of which it gets some blocks."""
    name = secrets.token_hex(8)
    sends = {"do_remote_decode": True, "transfer_id": name}
    await asyncio.to_thread(pair.prefill.generate, ids, 1, kv_transfer_params=sends)
    async with kvwire.open(require=["tcp"]) as comm:
        relay = Relay(comm, await comm.listen("127.0.0.1:0"), blocks=BLOCKS)
        await relay.take(pair.prefill, name)
        loads, out = relay.offer(landed)
        answer = await asyncio.to_thread(
            pair.decode.generate, ids, kv_transfer_params=loads
        )
        assert len((await out).landed) == len(landed)
    return tokens_of(answer)


def affected(pair: Pair) -> int:
    """Tokens that decode has computed again so far, as vLLM says."""
    found = AFFECTED.findall(pair.decode.log.read_text(errors="replace"))
    return sum(map(int, found))


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ([], 0),
        ([7], 1),
        ([6, 7], 2),
        ([4, 5, 6, 7], 4),
        ([*range(8)], 8),
        # One hole: vLLM computes what lies behind it as well.
        ([0], 8),
        ([3], 5),
        ([3, 7], 5),
        ([1, 2, 5, 6], 7),
    ],
    ids=str,
)
def test_only_what_lies_behind_the_first_hole_is_computed(
    pair: Pair, lost: list[int], again: int
) -> None:
    ids = prompt(TOKENS, seed=10 + again)
    want = pair.local(ids)
    before = affected(pair)
    landed = [block for block in range(BLOCKS) if block not in lost]
    assert asyncio.run(decoded(pair, ids, landed)) == want
    assert affected(pair) - before == again * BLOCK_TOKENS
