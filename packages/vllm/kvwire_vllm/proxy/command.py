"""The command line of the proxy."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from kvwire.backend.sockets import listening_socket
from kvwire.directory import Selector, open_directory
from kvwire.directory.limits import MEMBERS_MAX
from kvwire.errors import BackendUnavailable, UsageError
from kvwire.security.keys import read_key_file
from kvwire_vllm.proxy.app import SERVED, ProxyApp, ProxySettings
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.engines import parse_engine
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import (
    PROXY_IDLE_MAX,
    PROXY_RUNNING_MAX,
    PROXY_STOP_S,
    PROXY_STOP_S_MAX,
)
from kvwire_vllm.proxy.members import AllowedHosts
from kvwire_vllm.references import References


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proxy until it is interrupted; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if why := _unusable(options):
        parser.error(why)
    try:
        fleet = EngineFleet(
            map(parse_engine, options.prefill),
            map(parse_engine, options.decode),
        )
        keys = [read_key_file(options.psk_file)] if options.psk_file else []
        operator = options.operator_key_file
        operator_key = read_key_file(operator) if operator else b""
        discovery: Discovery | None = None
        if options.directory:
            directory = open_directory(options.directory)
            allowed = AllowedHosts(options.allow)
            meant = Selector.parse(options.select)
            discovery = Discovery(directory, fleet, allowed, meant)
    except UsageError as exc:
        parser.error(str(exc))
    except (BackendUnavailable, ModuleNotFoundError) as exc:
        print(exc, file=sys.stderr)
        return 1
    # A request needs its client's connection and two to engines; each engine is probed
    # too.
    _have_descriptors(3 * options.running + PROXY_IDLE_MAX + MEMBERS_MAX)
    settings = ProxySettings(
        references=References(keys),
        running_max=options.running,
        operator_key=operator_key,
        migrate=options.migrate,
    )
    proxy = ProxyApp(fleet, settings, discovery=discovery)
    application = proxy.application()
    application.cleanup_ctx.append(proxy.checking)
    try:
        listening = _listening(options.host, options.port)
    except (OSError, UnicodeError) as exc:  # a port that is taken, "a..b"
        where = f"--host {options.host} --port {options.port}"
        text = exc.strerror if isinstance(exc, OSError) else exc
        print(f"cannot listen at {where}: {text}", file=sys.stderr)
        return 1
    web.run_app(
        application,
        sock=listening,
        shutdown_timeout=options.stop_s or _AT_ONCE_S,
        print=None,
        loop=_loop(),
        **SERVED,
    )
    return 0


def _listening(host: str, port: int) -> socket.socket:
    bare = host.removeprefix("[").removesuffix("]")
    found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)
    family, *_, address = found[0]
    return listening_socket(family, address, _BACKLOG)


def _loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - not there on Windows

    return uvloop.new_event_loop()


def _unusable(options: argparse.Namespace) -> str:
    """Return why values do not go together or are out of range; "" if they can be used.

    The fleet, keys and policies make further checks.
    """
    if not options.decode and not options.directory:
        return "name the engines that answer: pass --decode or --directory"
    if options.running < 1:
        return f"--running {options.running}: pass at least 1"
    if not 0 <= options.stop_s <= PROXY_STOP_S_MAX:
        return f"--stop-s {options.stop_s:g}: pass 0 to {PROXY_STOP_S_MAX:g}"
    if not 0 <= options.port < 2**16:
        return f"--port {options.port}: pass 0 to 65535; 0 takes any free port"
    return ""


def _have_descriptors(count: int) -> None:
    """Raise the limit of open files towards `count`, since shells set it to 1024."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvwire_vllm.proxy",
        description="Sends each request to a prefill and a decode engine of vLLM.",
    )
    for name, settings in _OPTIONS.items():
        parser.add_argument(name, **settings)
    return parser


_BACKLOG: Final = 1024
# aiohttp takes a timeout of 0 for none.
_AT_ONCE_S: Final = 0.001
_ENGINE: Final = {
    "action": "append",
    "default": [],
    "help": "URL=KV[,KV...][,stages=N]: where it serves, where each rank of it "
    "listens, and in how many pipeline stages they are",
}
# What argparse gets for each option, in the order of --help.
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "--prefill": _ENGINE,
    "--decode": _ENGINE,
    "--directory": {
        "default": "",
        "help": "where engines announce themselves: redis://...",
    },
    "--select": {
        "default": "",
        "help": "which of its members, such as zone=a",
    },
    "--allow": {
        "action": "append",
        "default": [],
        "help": "a host that the directory may name: 10.0.0.0/8, engine-1, "
        "*.fleet.svc; without any, this host",
    },
    "--psk-file": {
        "help": "the engines' key, if they have one",
    },
    "--operator-key-file": {
        "help": "the key that POST /drain and /migrate ask for; without it, they "
        "answer this host",
    },
    "--migrate": {
        "action": "store_true",
        "help": "streams can go on at another engine: POST /migrate, POST /drain, and "
        "when an engine dies",
    },
    "--host": {
        "default": "127.0.0.1",
        "help": "an address of this host; :: for all interfaces of IPv4 and IPv6",
    },
    "--port": {
        "type": int,
        "default": 8000,
    },
    "--running": {
        "type": int,
        "default": PROXY_RUNNING_MAX,
        "help": "requests at once, those that wait at an engine included; more get 429",
    },
    "--stop-s": {
        "type": float,
        "default": PROXY_STOP_S,
        "help": "how many seconds requests have to end after SIGTERM",
    },
}
