"""A machine with an RDMA device, as a test holds it.

    with one() as host:
        print(host.run("ibv_devices"))

    with two() as (first, second):
        first.start("owner", f"{PYTHON} -m tests.rdma.mover serve")
        second.run(f"{PYTHON} -m tests.rdma.mover pull")
        first.run("ip link set eth0 down")

Each is a guest of `tests/rdma/guest`, whose shell reads what `run` writes. A guest is
about 50 times slower than this machine, and the limits of time are meant for that.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.rdma import warm

GUEST = Path(__file__).with_name("guest")
PYTHON = sys.executable
MOVER = "warm tests.rdma.mover"
FIRST = "192.168.78.1"  # of two; the other one is .2
_NOT_PASSED = ("UCX_", "KVWIRE_")
LIFE_S = 7200.0
# Only a hang takes so long, on a loaded machine too.
PATIENCE_S = 600.0
# Of the wire of two hosts: room for rxe's largest packets, since a guest's time goes
# into their number.
MTU_BYTES = 4500
PING = "busybox ping -c 3 -W 20"
_END = "rig-status"
# What is written before the guest has opened its console would be lost.
_READY = "rig-ready"
_SHELL = ["bash", "-c", f"echo {_READY}; cat | bash"]  # on a terminal it would prompt


class HostError(AssertionError):
    """A command failed, or a guest is gone; the text has what it printed."""


class Host:
    """A guest whose shell waits for commands."""

    def __init__(self, out: Path, wire: str = "", life_s: float = LIFE_S) -> None:
        net = ["--net", wire, "--mtu", str(MTU_BYTES)] if wire else []
        self.out = out
        self._is_one_of_two = bool(wire)
        # Not in `out`: the path of a Unix socket has 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="rdma-")
        self._monitor = f"{self._folder.name}/monitor"
        self._started: dict[str, int] = {}
        command: list[str | Path] = [GUEST, *net, "--out", out, *_SHELL]
        command[1:1] = ["--monitor", self._monitor, "--seconds", str(int(life_s))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # The tests' own process keeps UCX to loopback; these hosts do not.
            env={k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED)},
            start_new_session=True,  # so that all of the guest can be stopped at once
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def booted(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the guest's shell reads commands."""
        self._until(_READY, "boot", time.monotonic() + timeout_s)
        imported = " ".join(warm.TWO_HOSTS if self._is_one_of_two else warm.ONE_HOST)
        self.run(
            f"mkfifo {warm.FIFO}; {PYTHON} -m tests.rdma.warm {imported} </dev/null &"
        )
        self.run(warm.FUNCTION)

    def run(
        self, command: str, timeout_s: float = PATIENCE_S, *, check: bool = True
    ) -> str:
        """Run a command in the guest, and return what it printed.

        Raises:
            HostError: It ended with another status than 0 and ``check`` is true, it did
                not end in time, or the guest is gone.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{{ {command}\n}} 2>&1; echo {_END} $?\n")
        self._process.stdin.flush()
        printed, status = self._until(_END, command, time.monotonic() + timeout_s)
        if check and status != "0":
            raise HostError(f"{command}: status {status}\n{printed}")
        return printed

    def _until(self, mark: str, command: str, end: float) -> tuple[str, str]:
        """Return the lines before a mark, and what follows it in its line."""
        printed: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                why = "did not end in time"
                break
            if line is None:
                why = "the guest is gone"
                break
            if line.startswith(mark):
                return "".join(printed), line[len(mark) :].strip()
            printed.append(line)
        raise HostError(f"{command}: {why}\n{''.join(printed)}")

    def start(self, name: str, command: str) -> None:
        """Start a command beside others; ``printed(name)`` has what it prints."""
        self._started[name] = self._started.get(name, 0) + 1
        log = self._log(name)
        log.touch()
        pid = f"/run/{name}.pid"
        self.run(
            f"(export {warm.PID}={pid}.warm; rm -f {pid}*; {command} & "
            f"echo $! >{pid}; wait $!; echo {_END} $?) >>{log} 2>&1 &"
        )

    def printed(self, name: str) -> str:
        """Return what a started command has printed so far."""
        return self._log(name).read_text(errors="replace")

    def _log(self, name: str) -> Path:
        return self.out / f"{name}-{self._started[name]}.log"

    def wait_for(self, name: str, text: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait until a started command has printed ``text``."""
        end = time.monotonic() + timeout_s
        while text not in self.printed(name):
            if time.monotonic() > end or _END in self.printed(name):
                raise HostError(f"{name}: no {text!r} in\n{self.printed(name)}")
            time.sleep(0.2)
        return self.printed(name)

    def stop(self, name: str, sig: str = "TERM") -> None:
        """Send a signal to a started command."""
        pid = f"/run/{name}.pid"
        self.run(f"kill -{sig} $(cat {pid}.warm || cat {pid})", check=False)

    def cable(self, state: str) -> None:
        """Plug the wire in ("on"), or out ("off"): the port has no carrier then."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(60)
            monitor.connect(self._monitor)
            monitor.sendall(f"set_link wire {state}\n".encode())
            seen = b""
            while seen.count(b"(qemu)") < 2:  # its prompts, before and after
                seen += monitor.recv(4096)

    def unplug(self, seconds: float) -> None:
        """Take the wire out for some seconds."""
        self.cable("off")
        time.sleep(seconds)
        self.cable("on")

    def stand_still(self, seconds: float) -> None:
        """Stop the whole machine for some seconds."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self._process.pid, signal.SIGCONT)

    def impair(self, how: str, seconds: float) -> None:
        """Send through netem for some seconds, such as ``loss 1%``."""
        self.run(f"tc qdisc add dev eth0 root netem {how}")
        time.sleep(seconds)
        self.run("tc qdisc del dev eth0 root")

    def kill(self) -> None:
        """End the guest, as a machine that loses its power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):  # a command that was not read
            self._process.communicate()
        self._folder.cleanup()


def sent_packets(host: Host) -> int:
    """How many packets its RDMA device has sent."""
    counters = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
    return int(host.run(f"cat {counters}/sent_pkts"))


def let_pass(seconds: float) -> None:
    """Wait for a moment in the middle of what goes on."""
    time.sleep(seconds)


def free_port() -> int:
    """Return a port of loopback for the wire of two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def one(out: Path) -> Iterator[Host]:
    """A guest with the device rxe0, for as long as the block runs."""
    host = Host(out)
    try:
        host.booted()
        yield host
    finally:
        host.kill()


@contextlib.contextmanager
def two(out: Path, port: int, life_s: float = LIFE_S) -> Iterator[tuple[Host, Host]]:
    """Two guests on one wire, which loopback's ``port`` carries; the first is FIRST."""
    first = Host(out, f"listen:{port}", life_s)
    try:
        time.sleep(2)  # QEMU's socket network does not dial again
        second = Host(out, f"connect:{port}", life_s)
        try:
            first.booted()
            second.booted()
            second.run(f"{PING} {FIRST}")
            yield first, second
        finally:
            second.kill()
    finally:
        first.kill()
