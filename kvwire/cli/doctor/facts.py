"""Facts of the machine and of a process, read from ``/proc``, ``/sys`` and ``/dev``.

Of another process as well, such as a running engine: that one has the limits and the
libraries that count. No library of a GPU is loaded: its driver says in ``/proc`` what
there is. What cannot be read, on macOS or of somebody else's process, is None or empty,
and nothing here raises for it; only a process that is not there is refused.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

import kvwire
from kvwire import UsageError

# A driver that hangs must not hang the doctor.
_ASK_TIMEOUT_S: Final = 10.0
_SHOWN: Final = ("uvloop", "msgspec", "numpy")
UNLIMITED: Final = -1
# Numbers of capabilities(7): pin more memory than the limit; trace any process.
CAP_IPC_LOCK: Final = 14
CAP_SYS_PTRACE: Final = 19
# Namespaces of the host itself have fixed numbers: PROC_PID_INIT_INO of the kernel's
# include/linux/proc_ns.h.
_PID_NAMESPACE_OF_HOST: Final = "pid:[4026531836]"
# Settings that change what a transport does. Others are none of our business, and
# what a report does not hold cannot leak from it.
_SETTINGS: Final = re.compile(
    r"UCX_\w+|NCCL_\w+|CUDA_VISIBLE_DEVICES|PYTORCH_(?:CUDA_)?ALLOC_CONF"
)
# auditwheel puts a hash between the name and the suffix: libucp-3a3c2ef6.so.0.0.0.
_LIBRARIES: Final = re.compile(r"lib(ucp|nccl)(?:-[0-9a-f]+)?\.so[\d.]*")


# --- the machine ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """Names a port of an RDMA device, as the kernel does: ``"ACTIVE"`` is up."""

    device: str
    number: int
    state: str
    rate: str
    link_layer: str

    def __str__(self) -> str:
        return f"{self.device}:{self.number} {self.state} {self.rate} {self.link_layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Holds what was found of the machine, as seen from where the doctor runs."""

    # Kernel, its release and the architecture.
    system: str = ""
    # Those that this process may use.
    cpus: int = 1
    versions: dict[str, str]
    # What runs this container: "docker", say.
    container: str = ""
    # Of the Yama security module; None without that module.
    ptrace_scope: int | None = None
    # Size of /dev/shm; None if there is none.
    shared_bytes: int | None = None
    # Ports of RDMA devices, and the device files through which a program reaches them.
    rdma: tuple[RdmaPort, ...] = ()
    rdma_nodes: tuple[str, ...] = ()
    # Models of NVIDIA GPUs, their device files, and the version of their driver.
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


def machine_at(
    root: Path = Path("/"),
    *,
    environment: Mapping[str, str] | None = None,
    ask_gpus: Callable[[], str] = ask_nvidia_smi,
) -> Machine:
    """Read the facts of this machine, whose ``proc``, ``sys`` and ``dev`` lie there.

    GPUs are asked for where ``proc`` knows of no driver, as under WSL.
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
    """Yield the ports of RDMA cards, as sysfs-class-infiniband of the kernel says."""
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


# --- a process ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Holds what was found of a process; None is not known."""

    # 0 is the doctor itself.
    pid: int = 0
    # How much memory it may pin, and how many descriptors it may have; or UNLIMITED.
    locked_bytes: int | None = None
    files: int | None = None
    # Its effective ones, a bit for each.
    capabilities: int = 0
    # It is in another PID namespace than the host.
    own_pid_namespace: bool | None = None
    # Environment variables that transports and allocators read.
    settings: dict[str, str] = field(default_factory=dict)
    # Paths of the copies of libucp and libnccl that it has loaded.
    libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def may(self, capability: int) -> bool:
        """Tell whether it has a capability."""
        return bool(self.capabilities >> capability & 1)


def process_at(
    pid: int = 0,
    root: Path = Path("/"),
    *,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Read the facts of a process; 0 is this one, whose environment may be given."""
    folder = root / "proc" / (str(pid) if pid else "self")
    if pid and not folder.is_dir():
        has_proc = (root / "proc" / "self").is_dir()
        why = "there is no such process" if has_proc else "this system has no /proc"
        raise UsageError(f"--pid {pid}: {why}")
    limits = _text(folder / "limits")
    if pid:
        variables: Mapping[str, str] = dict(_variables(_text(folder / "environ")))
    else:
        variables = os.environ if environment is None else environment
    return Process(
        pid=pid,
        locked_bytes=_limit(limits, "Max locked memory"),
        files=_limit(limits, "Max open files"),
        capabilities=_capabilities(_text(folder / "status")),
        own_pid_namespace=_own_pid_namespace(folder / "ns" / "pid"),
        settings={k: v for k, v in variables.items() if _SETTINGS.fullmatch(k)},
        libraries=_libraries(_text(folder / "maps")),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _limit(text: str, name: str) -> int | None:
    """Read the soft limit of a row of ``/proc/PID/limits``."""
    found = re.search(rf"^{name} +(\d+|unlimited) ", text, re.MULTILINE)
    if found is None:
        return None
    return UNLIMITED if found[1] == "unlimited" else int(found[1])


def _capabilities(text: str) -> int:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return int(found[1], 16) if found else 0


def _own_pid_namespace(path: Path) -> bool | None:
    try:
        return os.readlink(path) != _PID_NAMESPACE_OF_HOST  # noqa: PTH115 - no path
    except OSError:
        return None


def _variables(text: str) -> Iterator[tuple[str, str]]:
    for entry in text.split("\0"):
        name, _, value = entry.partition("=")
        yield name, value


def _libraries(maps: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for line in maps.splitlines():
        path = line.partition("/")
        name = _LIBRARIES.fullmatch(path[2].rpartition("/")[2])
        if name:
            found.setdefault(f"lib{name[1]}", set()).add(f"/{path[2]}")
    return {name: tuple(sorted(paths)) for name, paths in sorted(found.items())}
