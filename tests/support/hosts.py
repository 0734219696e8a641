"""Two hosts on one machine: network namespaces joined by a wire of limited rate.

Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.runs import ran

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Wire:
    """Two namespaces, what joins them, and an address at the left."""

    left: str
    right: str
    address: str

    def up(self, *, whole: bool) -> None:
        """Heal the wire, or cut it."""
        state = "up" if whole else "down"
        _ip("-n", self.left, "link", "set", "wire", state)

    def one_way(self, *, whole: bool) -> None:
        """Lose what goes from the left to the right, and nothing else; or heal that."""
        neighbour = ("neighbour", "replace", "10.213.7.2", "dev", "wire")
        if whole:
            _ip("-n", self.left, *neighbour, "nud", "stale")
            _ip("-n", self.left, "neighbour", "flush", "dev", "wire")
        else:
            nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
            _ip("-n", self.left, *neighbour, *nobody)


@contextlib.contextmanager
def two_hosts(port: int) -> Iterator[Wire]:
    """Two namespaces joined by 1 Gbit/s; skips where there are none."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, ip and tc (iproute2)")
    name = f"kvwire-{os.getpid()}-{next(_numbers)}"
    left, right = f"{name}-l", f"{name}-r"
    try:
        _ip("netns", "add", left)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no network namespaces here: {exc.stderr.strip()}")
    try:
        _ip("netns", "add", right)
        _ip("-n", left, "link", "add", "wire", "type", "veth", "peer", "name", "far")
        _ip("-n", left, "link", "set", "far", "name", "wire", "netns", right)
        for namespace, host in ((left, "10.213.7.1"), (right, "10.213.7.2")):
            _ip("-n", namespace, "address", "add", f"{host}/24", "dev", "wire")
            _ip("-n", namespace, "link", "set", "wire", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            limit = ("tbf", "rate", "1gbit", "burst", "256k", "latency", "50ms")
            _ip(
                *("netns", "exec", namespace, "tc", "qdisc", "add", "dev", "wire"),
                *("root", *limit),
            )
        yield Wire(left, right, f"10.213.7.1:{port}")
    finally:
        for namespace in (left, right):
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def _ip(*arguments: str) -> None:
    ran("ip", *arguments, check=True)
