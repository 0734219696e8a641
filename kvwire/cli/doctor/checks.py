"""Checks of a machine and of one of its processes, each with its remedy.

They read ``/proc``, ``/sys`` and ``/dev``, also for another process: a running engine's
own limits and libraries count. They load no GPU library, since the driver lists the
GPUs in ``/proc``. Files that cannot be read, as on macOS or for another user's process,
count as empty, and no check raises because of them. Only a process that does not exist
is refused.

A check does not decide what is required: the configuration (``examination``) or a
backend (``Backend.diagnose``) does.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvwire import UsageError
from kvwire.backend import Finding
from kvwire.limits import LANES_MAX, MIB
from kvwire.memory import pieces
from kvwire.memory.container import memory_limit
from kvwire.types import in_bytes

# A driver that hangs must not hang the doctor.
_ASK_TIMEOUT_S: Final = 10.0
UNLIMITED: Final = -1
# Numbers of capabilities(7): pin more memory than the limit; trace any process.
CAP_IPC_LOCK: Final = 14
CAP_SYS_PTRACE: Final = 19
# The host's own namespaces have fixed numbers: PROC_PID_INIT_INO and
# PROC_USER_INIT_INO in the kernel's include/linux/proc_ns.h.
_PID_NAMESPACE_OF_HOST: Final = "pid:[4026531836]"
_USERS_OF_HOST: Final = "user:[4026531837]"
# Settings that affect transports. All others are left out of a report, so that they
# cannot leak from it.
_SETTINGS: Final = re.compile(
    r"UCX_\w+|NCCL_\w+|CUDA_VISIBLE_DEVICES|PYTORCH_(?:CUDA_)?ALLOC_CONF"
)
# auditwheel puts a hash between the name and the suffix: libucp-3a3c2ef6.so.0.0.0.
_LIBRARIES: Final = re.compile(
    r"(/.*/lib(ucp|nccl)(?:-[0-9a-f]+)?\.so[\d.]*)$", re.MULTILINE
)
# Most systems' default. A connection takes a descriptor, and so does each of its lanes;
# the engine's own open files come on top.
_FILES_MIN: Final = 1024
# Containers commonly get 64 MiB, which is less than a few UCX peers and NCCL need.
_SHARED_BYTES_MIN: Final = 256 * MIB
_EXPANDABLE: Final = re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE)
_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# The finding, good or bad; and the remedy, or "".
Judgement = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class HostFiles:
    """Reads a machine from ``proc``, ``sys`` and ``dev`` below ``root``.

    Attributes:
        pid: The process to read; 0 is this one, and has ``environment``.
    """

    root: Path = Path("/")
    pid: int = 0
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __post_init__(self) -> None:
        if self.pid and not self.process.is_dir():
            has_proc = (self.root / "proc/self").is_dir()
            why = "there is no such process" if has_proc else "this system has no /proc"
            raise UsageError(f"--pid {self.pid}: {why}")

    @property
    def process(self) -> Path:
        """Return the folder of the process."""
        return self.root / "proc" / str(self.pid or "self")

    @property
    def container(self) -> str:
        """Return the runtime of this container, such as "docker"; "" outside of one."""
        if "KUBERNETES_SERVICE_HOST" in self.environment:
            return "kubernetes"
        if (self.root / "run/.containerenv").exists():
            return "podman"
        return "docker" if (self.root / ".dockerenv").exists() else ""

    def settings(self) -> dict[str, str]:
        """Return the environment variables that transports and allocators read."""
        variables = self.environment
        if self.pid:
            entries = _text(self.process / "environ").split("\0")
            variables = dict(entry.partition("=")[::2] for entry in entries)
        return {k: v for k, v in variables.items() if _SETTINGS.fullmatch(k)}

    def rdma_ports(self) -> Iterator[tuple[str, bool]]:
        """Yield each RDMA port's description, and whether it is up."""
        folder = self.root / "sys/class/infiniband"
        for port in sorted(folder.glob("*/ports/[0-9]*")):
            # "4: ACTIVE", "200 Gb/sec (4X HDR)"
            state = _text(port / "state").rpartition(": ")[2]
            rate = _text(port / "rate").partition(" (")[0]
            name = f"{port.parent.parent.name}:{port.name}"
            yield (
                f"{name} {state} {rate} {_text(port / 'link_layer')}",
                state == "ACTIVE",
            )

    def limit(self, name: str) -> int | None:
        """Return a soft limit of the process, or UNLIMITED; None if it is unknown."""
        rows = _text(self.process / "limits")
        found = re.search(rf"^{name} +(\d+|unlimited) ", rows, re.MULTILINE)
        if found is None:
            return None
        return UNLIMITED if found[1] == "unlimited" else int(found[1])

    def may(self, capability: int) -> bool:
        """Return whether a capability of the process is effective."""
        status = _text(self.process / "status")
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
        return found is not None and bool(int(found[1], 16) >> capability & 1)

    def namespace(self, kind: str) -> str:
        """Return the process's namespace of a kind; "" if it is unknown."""
        try:
            return os.readlink(self.process / "ns" / kind)  # noqa: PTH115 - no path
        except OSError:
            return ""


def check(host: HostFiles) -> tuple[Finding, ...]:
    """Make all findings, in screen order; one with a remedy is a warning."""
    return tuple(
        Finding(name=name, state="warn" if remedy else "ok", text=text, remedy=remedy)
        for name, judge in _CHECKS.items()
        for text, remedy in (judge(host),)
    )


# --- each check -----------------------------------------------------------------------


def _gpus(host: HostFiles) -> Judgement:
    """Judge the NVIDIA GPUs, and whether this process can open them."""
    folder = host.root / "proc/driver/nvidia"
    asked = False
    version = re.search(
        r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", _text(folder / "version")
    )
    if version is not None:
        driver = version[1]
        texts = map(_text, sorted(folder.glob("gpus/*/information")))
        found = (re.search(r"^Model:(.*)$", text, re.MULTILINE) for text in texts)
        models = [model[1].strip() for model in found if model]
    else:
        rows = [line.partition(", ") for line in _ask_nvidia_smi() if ", " in line]
        if not rows:
            return "no NVIDIA driver: KV caches are in host memory", ""
        driver = rows[0][0]
        models = [name for _, _, name in rows]
        asked = True
    kinds = dict.fromkeys(models)
    # Eight of a kind are one entry: "8 x NVIDIA H200".
    named = ", ".join(f"{models.count(kind)} x {kind}" for kind in kinds) or "no GPU"
    text = f"{named}, driver {driver}"
    if models and not asked and not any((host.root / "dev").glob("nvidia[0-9]*")):
        return (
            f"{text}; but no /dev/nvidia*, so no program here can use it",
            "docker run --gpus all ...",
        )
    visible = host.settings().get("CUDA_VISIBLE_DEVICES")
    return text if visible is None else f"{text}; CUDA_VISIBLE_DEVICES={visible!r}", ""


def _ask_nvidia_smi() -> list[str]:
    """Return each GPU's "driver, model"; under WSL, /proc and /dev lack them."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            query, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _expandable_segments(host: HostFiles) -> Judgement:
    """Judge the allocator's setting: not every stack can register cuMemMap memory.

    Such memory has no CUDA IPC handle. openucx/ucx #11548, ai-dynamo/nixl #1754:
    registering it succeeds, but its bytes then go through the host.
    """
    settings = host.settings()
    on = [name for name in _ALLOCATOR if _EXPANDABLE.search(settings.get(name, ""))]
    if not on:
        return "no expandable_segments in this environment", ""
    return (
        (
            f"{on[0]} sets expandable_segments: CUDA IPC (UCX before 1.22) and some "
            "RDMA drivers cannot reach such memory, and become slow or fail"
        ),
        "unset it, or allocate the KV cache from a pool of its own",
    )


def _rdma(host: HostFiles) -> Judgement:
    """Judge RDMA devices: whether a port is up, and whether they can be opened."""
    found = dict(host.rdma_ports())
    if not found:
        text = "no device: UCX uses shared memory and TCP, and asking it for RDMA fails"
        return text, ""
    ports = ", ".join(found)
    if not any((host.root / "dev/infiniband").glob("uverbs*")):
        return (
            f"{ports}; but no /dev/infiniband/uverbs*, so no program here can use it",
            "docker run --device /dev/infiniband ..., or load the module ib_uverbs",
        )
    if not any(found.values()):
        return (
            f"{ports}: no port is up",
            "check cable and switch; InfiniBand also needs a subnet manager",
        )
    return ports, ""


def _locked_memory(host: HostFiles) -> Judgement:
    """Judge the limit of locked memory, since RDMA pins the memory that it reaches."""
    limit = host.limit("Max locked memory")
    if limit is None:
        return "limit is not known here", ""
    if limit == UNLIMITED:
        return "unlimited", ""
    # Root of a rootless container has capabilities there, and none that RDMA looks for.
    at_home = host.namespace("user") in ("", _USERS_OF_HOST)
    if at_home and host.may(CAP_IPC_LOCK):
        return "unlimited: this process has CAP_IPC_LOCK", ""
    if not any(host.rdma_ports()):
        return f"{in_bytes(limit)}; only RDMA would need more", ""
    return (
        f"at most {in_bytes(limit)}: RDMA pins a whole KV cache, and fails beyond it",
        "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity",
    )


def _pid_namespace(host: HostFiles) -> Judgement:
    """Judge the PID namespace: processes in two namespaces cannot name each other."""
    container = host.container
    inside = f"in a container ({container})" if container else "in no known container"
    namespace = host.namespace("pid")
    if not namespace:
        return f"not known here; {inside}", ""
    if namespace == _PID_NAMESPACE_OF_HOST:
        return f"the host's; {inside}", ""
    return (
        f"one of its own, {inside}: same-host memory reaches only the processes in it",
        (
            "docker run --pid host, or --pid container:NAME on one side; in a pod, "
            "shareProcessNamespace: true"
        ),
    )


def _ptrace(host: HostFiles) -> Judgement:
    """Judge the right to trace, which ``local`` needs to read a process's memory.

    The scopes are those in the kernel's Documentation/admin-guide/LSM/Yama.rst.
    """
    scope = _text(host.root / "proc/sys/kernel/yama/ptrace_scope")
    if scope not in ("1", "2", "3"):
        where = "0" if scope == "0" else "no Yama module"
        return f"{where}: processes of one user may read each other's memory", ""
    if scope != "3" and host.may(CAP_SYS_PTRACE):
        return f"{scope}, but this process has CAP_SYS_PTRACE", ""
    if scope == "1":
        return (
            "1: only a process's parents, or those that it names, may read its memory",
            "",
        )
    who = "only with CAP_SYS_PTRACE"
    remedy = "sysctl kernel.yama.ptrace_scope=1"
    if scope == "3":
        who = "nobody, until a reboot"
        remedy = "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot"
    return (
        (
            f"{scope}: who may read another process's memory: {who}; `local` then "
            "copies through shared memory"
        ),
        remedy,
    )


def _shared_memory(host: HostFiles) -> Judgement:
    """Judge /dev/shm, where UCX and NCCL share memory within one host."""
    try:
        found = os.statvfs(host.root / "dev/shm")
    except OSError:
        return "there is no /dev/shm", ""
    size = found.f_frsize * found.f_blocks
    if size >= _SHARED_BYTES_MIN:
        return f"{in_bytes(size)} in /dev/shm", ""
    return (
        f"{in_bytes(size)} in /dev/shm: UCX and NCCL may run out of it",
        (
            "docker run --shm-size 1g, or --ipc host; in a pod, an emptyDir of "
            "medium Memory at /dev/shm"
        ),
    )


def _container_memory(host: HostFiles) -> Judgement:
    """Judge the container's limit, beyond which the system kills its processes."""
    limit = memory_limit(host.root, host.process)
    if limit is None:
        return "no limit", ""
    return f"at most {limit}; a store's memory tier has to be smaller", ""


def _libraries(host: HostFiles) -> Judgement:
    """Judge duplicates of a loaded library: ai-dynamo/nixl #1668, vLLM #32379."""
    loaded: dict[str, set[str]] = {"nccl": set(), "ucp": set()}
    for path, name in _LIBRARIES.findall(_text(host.process / "maps")):
        loaded[name].add(path)
    twice = {name: paths for name, paths in loaded.items() if len(paths) > 1}
    if twice:
        paths = "; ".join(
            f"lib{k}: {' and '.join(sorted(v))}" for k, v in twice.items()
        )
        return (
            f"loaded more than once, which hangs or crashes: {paths}",
            "keep one of them: the system's, or that of one wheel",
        )
    every = sorted(path for paths in loaded.values() for path in paths)
    return f"loaded: {', '.join(every) or 'none'}", ""


def _copies(_: HostFiles) -> Judgement:
    """Judge this installation's copy loop: docs/adr/17-python-costs.md."""
    if pieces.compiled is not None:
        return "scattered pieces by the compiled loop", ""
    return (
        "scattered pieces at half the rate: kvwire was installed without a compiler",
        "install gcc or clang; repeat pip install with --force-reinstall --no-deps",
    )


def _descriptors(host: HostFiles) -> Judgement:
    """Judge the limit of descriptors: each connection and each lane needs one."""
    limit = host.limit("Max open files")
    if limit is None or limit == UNLIMITED or limit >= _FILES_MIN:
        shown = {None: "limit is not known here", UNLIMITED: "unlimited"}.get(limit)
        return shown or f"{limit:,}", ""
    return (
        (
            f"at most {limit}: each connection takes one, plus one for each of up to "
            f"{LANES_MAX} lanes"
        ),
        "ulimit -n 65536; docker run --ulimit nofile=65536; LimitNOFILE=65536",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


_CHECKS: Final[dict[str, Callable[[HostFiles], Judgement]]] = {
    "GPU": _gpus,
    "torch allocator": _expandable_segments,
    "RDMA": _rdma,
    "locked memory": _locked_memory,
    "PID namespace": _pid_namespace,
    "ptrace scope": _ptrace,
    "shared memory": _shared_memory,
    "memory limit": _container_memory,
    "UCX and NCCL": _libraries,
    "descriptors": _descriptors,
    "copies": _copies,
}
