"""Facts of the machine, read from ``/proc``, ``/sys`` and ``/dev``.

No library of a GPU is loaded for it: its driver says in ``/proc`` what there is. What
cannot be read is None or empty, and nothing here raises for it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import kvwire

# A driver that hangs must not hang the doctor.
_ASK_TIMEOUT_S: Final = 10.0
_SHOWN: Final = ("uvloop", "msgspec", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device, in the words of the kernel: ``"ACTIVE"`` is up."""

    device: str
    number: int
    state: str
    rate: str
    link_layer: str

    def __str__(self) -> str:
        return f"{self.device}:{self.number} {self.state} {self.rate} {self.link_layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found of the machine, as seen from where the doctor runs.

    Attributes:
        system: Kernel, its release and the architecture.
        cpus: CPUs that this process may use.
        versions: Of Python, kvwire, and what it is built on.
        container: What runs this container: "docker", say; or "".
        ptrace_scope: Of the Yama security module; None without that module.
        shared_bytes: Size of ``/dev/shm``; None if there is none.
        rdma: Ports of RDMA devices.
        rdma_nodes: Device files through which a program reaches them.
        gpus: Models of NVIDIA GPUs.
        gpu_nodes: Their device files.
        gpu_driver: Version of their driver; or "".
    """

    system: str = ""
    cpus: int = 1
    versions: dict[str, str]
    container: str = ""
    ptrace_scope: int | None = None
    shared_bytes: int | None = None
    rdma: tuple[RdmaPort, ...] = ()
    rdma_nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_nodes: tuple[str, ...] = ()
    gpu_driver: str = ""


def ask_nvidia_smi() -> str:
    """Return ``driver, model`` for each GPU, from ``nvidia-smi``; or ""."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = "--query-gpu=driver_version,name"
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def look_at(
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
    ask_gpus: Callable[[], str] = ask_nvidia_smi,
) -> Machine:
    """Read the facts of this machine.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` lie.
        environment: Instead of ``os.environ``.
        ask_gpus: Called where ``proc`` knows of no driver, as under WSL.
    """
    environment = os.environ if environment is None else environment
    gpus, driver = _gpus(root / "proc/driver/nvidia")
    if not driver:
        gpus, driver = _told(ask_gpus())
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpus=_cpus(),
        versions=_versions(),
        container=_container(root, environment),
        ptrace_scope=_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        shared_bytes=_size(root / "dev/shm"),
        rdma=tuple(_ports(root / "sys/class/infiniband")),
        rdma_nodes=_names(root / "dev/infiniband", "uverbs*"),
        gpus=gpus,
        gpu_nodes=_names(root / "dev", "nvidia[0-9]*"),
        gpu_driver=driver,
    )


def _versions() -> dict[str, str]:
    found = {"kvwire": kvwire.__version__, "Python": platform.python_version()}
    for name in _SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpus() -> int:
    """CPUs that this process may use; an affinity mask or cpuset leaves out others."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _container(root: Path, environment: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "docker" if (root / ".dockerenv").exists() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _size(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _names(folder: Path, pattern: str) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob(pattern)))


def _ports(folder: Path) -> Iterator[RdmaPort]:
    """See Documentation/ABI/stable/sysfs-class-infiniband of the kernel."""
    for port in sorted(folder.glob("*/ports/[0-9]*")):
        # "4: ACTIVE", "200 Gb/sec (4X HDR)"
        yield RdmaPort(
            device=port.parent.parent.name,
            number=int(port.name),
            state=_text(port / "state").rpartition(": ")[2],
            rate=_text(port / "rate").partition(" (")[0],
            link_layer=_text(port / "link_layer"),
        )


def _gpus(folder: Path) -> tuple[tuple[str, ...], str]:
    """Models and driver version, as the driver itself says in ``/proc``."""
    version = re.search(
        r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", _text(folder / "version")
    )
    models = [
        model[1].strip()
        for path in sorted(folder.glob("gpus/*/information"))
        if (model := re.search(r"^Model:(.*)$", _text(path), re.MULTILINE))
    ]
    return tuple(models), version[1] if version else ""


def _told(text: str) -> tuple[tuple[str, ...], str]:
    rows = [line.partition(", ") for line in text.splitlines() if ", " in line]
    return tuple(model for _, _, model in rows), rows[0][0] if rows else ""
