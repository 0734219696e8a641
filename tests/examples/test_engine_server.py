"""The server with transformers or MLX, asked as its first lines say, and killed.

Needs torch, transformers and mlx_lm; `make test-torch` installs them.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.runs import Beside, beside
from tests.support.servers import free_port

_WHY = "not installed here; `make test-torch` installs it"
pytest.importorskip("transformers", reason=f"transformers: {_WHY}")
pytest.importorskip("mlx_lm", reason=f"mlx_lm: {_WHY}")

PROMPT = "The Cat only grinned when it saw Alice. It looked good-natured, she thought"


async def answers(engine: str, folder: Path, *prompts: str) -> list[dict[str, Any]]:
    """Start the server, ask it, and kill it."""
    port = free_port()
    arguments = ["--engine", engine, "--port", str(port), str(folder)]
    found = []
    async with beside("examples/engine_server.py", *arguments, kind=Beside) as server:
        assert await server.line() == f"{engine} answers"
        for prompt in prompts:
            asked = {"prompt": prompt, "new": 24}
            async with httpx.AsyncClient(timeout=60) as client:
                reply = await client.post(f"http://127.0.0.1:{port}/", json=asked)
            found.append(reply.json())
        server.signal(signal.SIGKILL)
    return found


async def test_a_conversation_goes_on_in_the_other_engine(tmp_path: Path) -> None:
    (begun,) = await answers("transformers", tmp_path, PROMPT)
    assert begun["known"] == 0
    again, further = await answers("mlx", tmp_path, PROMPT, PROMPT + begun["text"])
    # In blocks of 16, and without the last token, which is computed.
    assert again["known"] == (begun["tokens"] - 1) // 16 * 16
    assert again["text"] == begun["text"]
    assert further["known"] > again["known"]
