"""The short examples, run as the documentation says, each in processes of its own.

They are run in a folder that knows nothing of this repository: only what pip installed
and what lies beside the example can be imported there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.depth import parameters
from tests.support.tree import ROOT
from toy_model import ToyModel, text_of, tokens_of

# Each starts an interpreter, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(60)
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


EXAMPLES = ROOT / "examples"


def run_example(name: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", parameters(["prefill_decode_pull.py", "prefill_decode_push.py"], every=2)
)
def test_decode_says_what_one_process_says(name: str, tmp_path: Path) -> None:
    """The example asserts it too; here the words are seen to be no blanks."""
    said = re.search(r"decode says '([^']*)', as one", run_example(name, tmp_path))
    assert said
    assert len(set(said[1])) > 5


@pytest.mark.slow
def test_chunks_that_were_never_computed_are_what_decode_computes(
    tmp_path: Path,
) -> None:
    lines = run_example("chunked_prefill.py", tmp_path).splitlines()
    assert "whole: 13 of 13 blocks arrived" in lines
    # Two chunks of 50 tokens fill 6 blocks of 16; the prompt has 194 without its last.
    assert "broken: 6 of 13 blocks arrived" in lines
    assert "broken: decode computes tokens 96 to 193" in lines
    assert sum("as one process alone does" in line for line in lines) == 2


def test_a_client_gives_up_and_goes_on(tmp_path: Path) -> None:
    assert run_example("request_reply.py", tmp_path).splitlines() == [
        "['HELLO', 'AGAIN']",
        "the client gave up",
        "the server stopped working on 1002",
        "AND GOES ON",
    ]


def test_training_finds_the_files_of_the_demo(tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers", reason="transformers: `make test-torch` installs it"
    )
    assert "--steps" in run_example("train_demo.py", tmp_path, "--help")


@one_loop
async def test_the_server_answers_with_and_without_prefill(tmp_path: Path) -> None:
    """Killing prefill costs time and no correctness."""
    prompt = "who are you, said the caterpillar. this was not an encouraging opening"
    expected = text_of(ToyModel().alone(tokens_of(prompt), 24))
    async with server(tmp_path, "prefill", "--listen", "127.0.0.1:0") as (
        prefill,
        line,
    ):
        address = line.removeprefix("prefill listens on ")
        options = ("--prefill", address, "--http", "127.0.0.1:0")
        async with server(tmp_path, "decode", *options) as (_, ready):
            http = ready.removeprefix("decode answers on ")
            answers = await asyncio.gather(*(post(http, prompt) for _ in range(3)))
            for status, answer in answers:
                assert status == 200
                assert answer == {
                    "text": expected,
                    "tokens_received": len(prompt) - 1,
                    "tokens_computed": 0,
                }
            prefill.kill()
            await prefill.wait()
            status, answer = await post(http, prompt)
            assert status == 200
            assert (answer["text"], answer["tokens_received"]) == (expected, 0)


@one_loop
async def test_a_bad_request_gets_an_answer_that_says_why(tmp_path: Path) -> None:
    """Sizes of a stranger are compared before they are used."""
    post = b"POST /generate HTTP/1.1\r\n"
    options = ("--prefill", "127.0.0.1:1", "--http", "127.0.0.1:0")
    async with server(tmp_path, "decode", *options) as (_, line):
        http = line.removeprefix("decode answers on ")
        for request, says in (
            (b"GET / HTTP/1.1\r\n\r\n", "POST /generate"),
            (post + b"\r\n", "Content-Length"),
            (post + b"Content-Length: 99999999\r\n\r\n", "at most"),
            (post + b"Content-Length: 2\r\n\r\n{}", "prompt"),
            (post + b"X: " + b"x" * 20_000 + b"\r\n\r\n", "too long"),
            (post + b"Content-Length: 9\r\n\r\n{", "bytes read"),
        ):
            status, answer = await send(http, request)
            assert status == 400
            assert says in answer["error"]


@contextlib.asynccontextmanager
async def server(
    folder: Path, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A role of the server, and the line in which it says where it is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(str(EXAMPLES / "asyncio_server.py"), *arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()


async def post(http: str, prompt: str) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"prompt": prompt, "new": 24}).encode()
    head = f"POST /generate HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return await send(http, head.encode() + body)


async def send(http: str, request: bytes) -> tuple[int, dict[str, Any]]:
    host, _, port = http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    writer.write_eof()
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), json.loads(body)
