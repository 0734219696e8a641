"""The command line of the proxy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from kvwire.directory import Selector, open_directory
from kvwire.directory.limits import MEMBERS_MAX
from kvwire.errors import BackendUnavailable, UsageError
from kvwire.security.keys import read_key_file
from kvwire_vllm.proxy.admission import Admission
from kvwire_vllm.proxy.app import ProxyApp, ProxySettings
from kvwire_vllm.proxy.client import EngineClient
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
from kvwire_vllm.proxy.policy import AT_ONCE, IN_SEQUENCE
from kvwire_vllm.proxy.server import ProxyServer
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
        client = EngineClient(options.engines_ca)
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
    connections = options.running + PROXY_IDLE_MAX
    # A request needs its client's connection and two to engines; each engine is probed
    # too.
    there = _have_descriptors(connections + 2 * options.running + MEMBERS_MAX)
    settings = ProxySettings(
        order=options.order,
        references=References(keys),
        admission=Admission(options.running),
        operator_key=operator_key,
        migrate=options.migrate,
    )
    app = ProxyApp(fleet, settings, discovery=discovery, client=client)
    where = options.host, options.port
    connections = min(connections, there // 2)
    return ProxyServer(app, *where, options.stop_s, connections).run()


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


def _have_descriptors(count: int) -> int:
    """Raise the limit of open files towards `count`, since shells set it to 1024.

    Return the limit afterwards.
    """
    if sys.platform == "win32":
        return count
    import resource  # noqa: PLC0415 - Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvwire_vllm.proxy",
        description="Sends each request to a prefill and a decode engine of vLLM.",
    )
    for name, settings in _OPTIONS.items():
        parser.add_argument(name, **settings)
    return parser


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
        "help": "streams of /v1/completions can go on at another engine: POST "
        "/migrate, POST /drain, and when an engine dies",
    },
    "--engines-ca": {
        "default": "",
        "metavar": "FILE",
        "help": "PEM certificates that sign those of engines behind https; without it, "
        "the system's",
    },
    "--host": {
        "default": "127.0.0.1",
        "help": "an address or a name of this host; :: for all interfaces of IPv4 and "
        "IPv6",
    },
    "--port": {
        "type": int,
        "default": 8000,
    },
    "--order": {
        "choices": (AT_ONCE, IN_SEQUENCE),
        "default": AT_ONCE,
        "help": "both engines at once, or decode when prefill has answered",
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
