"""Two hosts for two engines: network namespaces with a wire of limited rate between.

A second pair of links, without a limit, leads to whoever asks the engines, so that
requests and answers do not take their turn behind KV. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvwire.security.keys import write_key_file

# What the kernel lets through at once: several of its largest segments, so that the
# limit is the rate and not the timer's turns.
_BURST: Final = "256k"


@dataclass(frozen=True, slots=True)
class Host:
    # Its address for requests.
    http: str
    # Its address for KV.
    kv: str
    # What its command begins with.
    prefix: tuple[str, ...] = ()
    # Keys of kvwire's configuration that it needs there.
    trust: dict[str, Any] = field(default_factory=dict)
    # Likewise of the process.
    environment: dict[str, str] = field(default_factory=dict)

    def engine_environment(self, port: int) -> dict[str, str]:
        """What an engine's process needs there, NixlConnector's port among it."""
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.kv,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            "VLLM_HOST_IP": "127.0.0.1",
            **self.environment,
        }


HERE: Final = Host("127.0.0.1", "127.0.0.1")


@contextmanager
def two_hosts(rate: str, folder: Path) -> Iterator[tuple[Host, Host]]:
    key = folder / "key"
    write_key_file(key)
    names = [f"kvwire-{os.getpid()}-{side}" for side in "lr"]
    hosts = []
    try:
        for number, name in enumerate(names, 1):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _requests(name, number)
            hosts.append(
                Host(
                    f"10.213.{7 + number}.2",
                    f"10.213.7.{number}",
                    ("ip", "netns", "exec", name),
                    {"trust": "psk", "psk_file": str(key)},
                    {"UCX_NET_DEVICES": "wire"},
                )
            )
        _wire(names, rate)
        yield hosts[0], hosts[1]
    finally:
        for number, name in enumerate(names, 1):
            # At once: what goes with a namespace is gone some time later.
            subprocess.run(["ip", "link", "delete", _link(number)], check=False)
            # With it go its ends of the links, and so the links.
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _wire(names: list[str], rate: str) -> None:
    left, right = names
    _ip("-n", left, "link", "add", "wire", "type", "veth", "peer", "name", "far")
    _ip("-n", left, "link", "set", "far", "name", "wire", "netns", right)
    for number, name in enumerate(names, 1):
        _ip("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", "wire")
        _ip("-n", name, "link", "set", "wire", "up")
        _ip(
            *("netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root"),
            *("tbf", "rate", rate, "burst", _BURST, "latency", "50ms"),
        )


def _requests(name: str, number: int) -> None:
    """Join a host to this one."""
    link, network = _link(number), f"10.213.{7 + number}"
    _ip("-n", name, "link", "add", "ask", "type", "veth", "peer", "name", link)
    _ip("-n", name, "link", "set", link, "netns", str(os.getpid()))
    _ip("-n", name, "address", "add", f"{network}.2/24", "dev", "ask")
    _ip("-n", name, "link", "set", "ask", "up")
    _ip("address", "add", f"{network}.1/24", "dev", link)
    _ip("link", "set", link, "up")


def _link(number: int) -> str:
    """Return the end here of the link to a host."""
    return f"kvw{os.getpid()}-{number}"[:15]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
