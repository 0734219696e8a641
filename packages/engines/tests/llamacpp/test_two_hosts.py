"""A session goes on at another host, which has its own network and slot folder.

Both hosts are namespaces of one machine, so they share its kernel and its disk: the
file of the model and the key are the same, as copies on two machines would be.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvwire.security.keys import write_key_file
from kvwire_engines.llamacpp.sessions import BLOCK_TOKENS
from packages.engines.tests.llamacpp.server import (
    front_beside,
    llama_server,
    prompt_of,
)
from tests.support.hosts import two_hosts
from tests.support.runs import Beside, beside, ran

ASK = """
import sys, urllib.request
asked = urllib.request.Request(f"{sys.argv[1]}/completion", sys.argv[2].encode())
print(urllib.request.urlopen(asked).read().decode())
"""


async def complete(
    under: tuple[str, ...], url: str, prompt: list[int], **more: Any
) -> Any:
    """Return an answer to a client at a host."""
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "ignore_eos": True}
    text = msgspec.json.encode(body | {"return_tokens": True} | more).decode()
    command = (*under, sys.executable, "-c", ASK, url, text)
    done = await asyncio.to_thread(ran, *command, check=True)
    return msgspec.json.decode(done.stdout)


async def test_a_session_goes_on_at_another_host(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(0, 300)
    key = tmp_path / "key"
    write_key_file(key)
    with two_hosts(7500) as wire:
        here = ("ip", "netns", "exec", wire.left)
        there = ("ip", "netns", "exec", wire.right)
        tiers = ("memory:16MiB", f"kvwire://{wire.address}?psk_file={key}")
        for folder in ("here", "there"):
            (tmp_path / folder).mkdir()
        async with AsyncExitStack() as running:
            enter = running.enter_async_context
            serve = ("-m", "kvwire", "store", "serve", "--listen", wire.address)
            options = ("--psk-file", str(key), "--tier", "memory:64MiB")
            store = beside(*serve, *options, kind=Beside, logs=True, under=here)
            assert wire.address in await (await enter(store)).line()

            server = await enter(llama_server(model, tmp_path / "here", under=here))
            front = await enter(front_beside(server, *tiers, under=here))
            first = await complete(here, front.url, prompt)
            front.signal(signal.SIGTERM)
            assert await front.wait() == 0, "it stores what it has answered"
            await server.kill()

            prompt += [*first["tokens"], *prompt_of(1, 5)]
            server = await enter(llama_server(model, tmp_path / "there", under=there))
            front = await enter(front_beside(server, *tiers, under=there))
            second = await complete(there, front.url, prompt)
            front.signal(signal.SIGTERM)
            assert await front.wait() == 0
            expected = await complete(there, server.url, prompt, cache_prompt=False)
    assert first["timings"]["cache_n"] == 0
    assert second["timings"]["cache_n"] == 9 * BLOCK_TOKENS
    assert expected["timings"]["cache_n"] <= 1, "computed by the server alone"
    assert second["tokens"] == expected["tokens"]
