"""What the proxy computes for a request, and what it adds to the first token.

``python -m tests.bench.proxy_cpu --tree . --tree ../older`` runs the proxy of each
checkout in turns before two engines that answer at once, 8 requests at a time, and
reads the CPU time of its process. Then one request at a time, in turns with the same
request to an engine: what is between their medians is the proxy's. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Final

from tests.integrations.vllm.serving import Process
from tests.support.servers import free_port

_TOKENS: Final = 16
_PARTS: Final = b"".join(
    b"%x\r\n%b\r\n" % (len(part), part)
    for part in [*[b'data: {"token": 7}\n\n'] * _TOKENS, b"data: [DONE]\n\n"]
)
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\n" + _PARTS + b"0\r\n\r\n"
)
_BODY: Final = b'{"model": "m", "prompt": "%b", "max_tokens": 16, "stream": true}' % (
    b"a word and " * 400
)
_ASK: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\n\r\n%b" % (len(_BODY), _BODY)
)


def main() -> int:
    """Print a line for each turn, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", default=[])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ports = [free_port(), free_port()]
    spawn = multiprocessing.get_context("spawn")
    engines = [spawn.Process(target=_engine, args=(port,)) for port in ports]
    proxies: list[Process] = []
    try:
        for engine in engines:
            engine.start()
        with tempfile.TemporaryDirectory() as folder:
            proxies += [_proxy(tree, ports, folder) for tree in options.tree or ["."]]
            asyncio.run(_compare(proxies, ports[1], options.requests, options.rounds))
    finally:
        for proxy in proxies:
            proxy.kill()
        for engine in engines:
            engine.kill()
            engine.join()
    return 0


async def _compare(
    proxies: list[Process], engine: int, requests: int, rounds: int
) -> None:
    cpu: dict[str, list[float]] = {one.command[0]: [] for one in proxies}
    added = {name: list[float]() for name in cpu}
    for turn in range(rounds + 1):
        for proxy in proxies:
            name, port = proxy.command[0], int(proxy.url.rpartition(":")[2])
            assert proxy.running is not None
            before = _cpu_ms(proxy.running.pid)
            await asyncio.gather(*(_ask(port, requests // 8) for _ in range(8)))
            after = _cpu_ms(proxy.running.pid)
            firsts = [(await _ask(port, 1), await _ask(engine, 1)) for _ in range(40)]
            if turn:  # the first one warms up
                cpu[name].append((after - before) / (requests // 8 * 8))
                via, direct = zip(*firsts, strict=True)
                added[name].append(statistics.median(via) - statistics.median(direct))
    for name, spent in cpu.items():
        print(
            f"{name}: {statistics.median(spent):.2f} ms of CPU a request "
            f"({min(spent):.2f} to {max(spent):.2f}), "
            f"{statistics.median(added[name]):.2f} ms added to the first token "
            f"({min(added[name]):.2f} to {max(added[name]):.2f}); "
            f"load {os.getloadavg()[0]:.0f}"
        )


async def _ask(port: int, number: int) -> float:
    """Ask one after another; how long the first part of the last one took, in ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(number):
        began = perf_counter()
        writer.write(_ASK)
        await reader.readuntil(b"data: ")
        took = perf_counter() - began
        await reader.readuntil(b"[DONE]")
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return took * 1e3


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def _proxy(tree: str, ports: list[int], folder: str) -> Process:
    port, where = free_port(), str(Path(tree).resolve())
    prefill, decode = (f"http://127.0.0.1:{p}=127.0.0.1:{p}" for p in ports)
    module = "kvwire.integrations.vllm.proxy"
    command = [sys.executable, "-P", "-m", module]
    command += ["--prefill", prefill, "--decode", decode]
    made = Process(
        [*command, "--port", str(port)],
        Path(folder) / f"{port}.log",
        f"http://127.0.0.1:{port}",
        {"PYTHONPATH": f"{where}:{where}/backends"},
    )
    made.start()
    made.wait()
    made.command = [where]  # its name, from here on
    return made


def _engine(port: int) -> None:
    """Answer whatever is asked."""

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                length = head.partition(b"content-length: ")[2].partition(b"\r")[0]
                await reader.readexactly(int(length or 0))
                writer.write(_ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main())
