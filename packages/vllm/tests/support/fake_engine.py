"""An engine that computes nothing, as a process: it answers, and it announces itself.

python -m packages.vllm.tests.support.fake_engine PORT ROLE DIRECTORY
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.responses import StreamingResponse as Streaming
from starlette.routing import Route

from kvwire.directory import Record, open_directory
from kvwire_vllm.proxy.members import AllowedHosts, read_member

LEASE_S = 1.5
TOKEN_S = 0.01
HERE = AllowedHosts()


def tokens_of(prompt: Any, count: int) -> list[int]:
    text = json.dumps(prompt)
    return [hashlib.sha256(f"{text}{i}".encode()).digest()[0] for i in range(count)]


def record(port: int, role: str, incarnation: str, **fields: Any) -> Record:
    labels = {
        "http": f"http://127.0.0.1:{port}",
        "slots": "8",
        "carrying": "tcp:2",
        **fields.pop("labels", {}),
    }
    return Record(
        name=f"{role}-{port}",
        address=f"tcp://127.0.0.1:{port}",
        incarnation=incarnation,
        role=role,
        labels=labels,
        transports=("local", "tcp"),
        lease_s=LEASE_S,
        **fields,
    )


def member(port: int = 1, role: str = "decode", start: int = 1, **fields: Any) -> Any:
    """As a proxy reads it from a directory: its key, and its record."""
    said = record(port, role, f"{start:032x}", **fields)
    return said.key, read_member(said, HERE)


async def complete(request: Request) -> Response:
    """A completion, or the first half of one."""
    body = await request.json()
    tokens = tokens_of(body["prompt"], body["max_tokens"])
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        await asyncio.sleep(TOKEN_S)
        where = {"do_remote_prefill": True}
        return JSONResponse({"tokens": tokens, "kv_transfer_params": where})
    if not body.get("stream"):
        await asyncio.sleep(TOKEN_S * len(tokens))
        return JSONResponse({"tokens": tokens})

    async def events() -> AsyncIterator[str]:
        for token in tokens:
            await asyncio.sleep(TOKEN_S)
            yield f"data: {token}\n\n"
        yield "data: [DONE]\n\n"

    return Streaming(events(), media_type="text/event-stream")


async def health(_: Request) -> Response:
    return Response()


def main(port: int, role: str, url: str) -> None:
    """Serve until SIGTERM."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        directory = open_directory(url)
        made = record(port, role, secrets.token_hex(16))
        announcing = asyncio.create_task(directory.announce(made))
        yield
        announcing.cancel()
        await directory.close()

    app = Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/health", health),
        ],
        lifespan=lifespan,
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
