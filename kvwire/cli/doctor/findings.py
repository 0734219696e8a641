"""What follows from the facts: pure functions from facts to findings.

A finding is ``ok`` where nothing is to be done, and ``warn`` where something works
less well than it could; what is plainly missing, the configuration decides
(``requirements``) or a backend (``Backend.diagnose``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from kvwire.backend import Finding
from kvwire.cli.doctor.facts import (
    CAP_IPC_LOCK,
    CAP_SYS_PTRACE,
    UNLIMITED,
    Machine,
    Process,
)
from kvwire.limits import LANES_MAX, MIB
from kvwire.types import in_bytes

# What most systems give by default. A connection takes a descriptor, and one for each
# lane; what the engine itself has open comes on top.
_FILES_MIN: Final = 1024
# Containers commonly get 64 MiB: less than the queues of a few UCX peers and NCCL need.
_SHARED_BYTES_MIN: Final = 256 * MIB
_EXPANDABLE: Final = re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE)
# What is the matter, or is not; and what to do about it, or "".
Judgement = tuple[str, str]
_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def judged(machine: Machine, process: Process) -> tuple[Finding, ...]:
    """Make every finding, in their order: what has a remedy is a warning."""
    return tuple(
        Finding(name=name, state="warn" if remedy else "ok", text=text, remedy=remedy)
        for name, judge in _JUDGES.items()
        for text, remedy in (judge(machine, process),)
    )


def rdma(machine: Machine, process: Process) -> Judgement:
    """Name RDMA devices, whether a port is up, and whether they can be opened."""
    if not machine.rdma:
        text = "no device: UCX uses shared memory and TCP, and asking it for RDMA fails"
        return text, ""
    ports = ", ".join(str(port) for port in machine.rdma)
    if not machine.rdma_nodes:
        return (
            f"{ports}; but no /dev/infiniband/uverbs*, so no program here can use it",
            "docker run --device /dev/infiniband ..., or load the module ib_uverbs",
        )
    if not any(port.state == "ACTIVE" for port in machine.rdma):
        return (
            f"{ports}: no port is up",
            "check cable and switch; InfiniBand also needs a subnet manager",
        )
    return ports, ""


def locked_memory(machine: Machine, process: Process) -> Judgement:
    """RDMA pins the memory it reaches, and the kernel counts that."""
    limit = process.locked_bytes
    if limit is None:
        return "limit is not known here", ""
    if limit == UNLIMITED or process.may(CAP_IPC_LOCK):
        why = "" if limit == UNLIMITED else ": this process has CAP_IPC_LOCK"
        return f"unlimited{why}", ""
    if not machine.rdma:
        return f"{in_bytes(limit)}; only RDMA would need more", ""
    return (
        f"at most {in_bytes(limit)}: RDMA pins a whole KV cache, and fails beyond it",
        "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity",
    )


def gpus(machine: Machine, process: Process) -> Judgement:
    """Name NVIDIA GPUs, and whether this process can open them."""
    if not machine.gpu_driver:
        return "no NVIDIA driver: KV caches lie in host memory", ""
    found = f"{_counted(machine.gpus)}, driver {machine.gpu_driver}"
    # Under WSL there are no such files, and the driver is not in /proc either.
    if machine.gpus and not machine.gpu_nodes and "microsoft" not in machine.system:
        return (
            f"{found}; but no /dev/nvidia*, so no program here can use it",
            "docker run --gpus all ...",
        )
    visible = process.settings.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found += f"; CUDA_VISIBLE_DEVICES={visible!r}"
    return found, ""


def expandable_segments(machine: Machine, process: Process) -> Judgement:
    """Memory from cuMemMap has no CUDA IPC handle, and not every stack registers it.

    openucx/ucx #11548, ai-dynamo/nixl #1754: registering succeeds, and the bytes then
    go through the host.
    """
    said = {key: process.settings.get(key, "") for key in _ALLOCATOR}
    on = [key for key, value in said.items() if _EXPANDABLE.search(value)]
    if not on:
        return "no expandable_segments in this environment", ""
    return (
        (
            f"{on[0]} sets expandable_segments: CUDA IPC (UCX before 1.22) and some "
            "RDMA drivers cannot reach such memory, and become slow or fail"
        ),
        "unset it, or allocate the KV cache from a pool of its own",
    )


def ptrace(machine: Machine, process: Process) -> Judgement:
    """Reading another process's memory, which is what ``local`` does, is tracing it.

    Scopes as in Documentation/admin-guide/LSM/Yama.rst of the kernel.
    """
    scope = machine.ptrace_scope
    if scope is None or scope == 0:
        where = "no Yama module" if scope is None else "0"
        return f"{where}: processes of one user may read each other's memory", ""
    if scope < 3 and process.may(CAP_SYS_PTRACE):
        return f"{scope}, but this process has CAP_SYS_PTRACE", ""
    if scope == 1:
        return "1: a process is read by its parents and by whom it names", ""
    who = "only with CAP_SYS_PTRACE" if scope == 2 else "nobody, until a reboot"
    return (
        (
            f"{scope}: who may read another process's memory: {who}; `local` then "
            "copies through shared memory"
        ),
        "sysctl kernel.yama.ptrace_scope=1"
        if scope == 2
        else "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot",
    )


def namespaces(machine: Machine, process: Process) -> Judgement:
    """Processes of two PID namespaces cannot name each other."""
    container = machine.container
    inside = f"in a container ({container})" if container else "in no known container"
    if process.own_pid_namespace:
        return (
            (
                f"one of its own, {inside}: same-host memory reaches only the "
                "processes in it"
            ),
            (
                "docker run --pid host, or --pid container:NAME on one side; in a pod, "
                "shareProcessNamespace: true"
            ),
        )
    if process.own_pid_namespace is None:
        return f"not known here; {inside}", ""
    return f"the host's; {inside}", ""


def shared_memory(machine: Machine, process: Process) -> Judgement:
    """Judge /dev/shm, where UCX, NCCL and `local` share memory within one host."""
    size = machine.shared_bytes
    if size is None:
        return "there is no /dev/shm", ""
    if size < _SHARED_BYTES_MIN:
        return (
            f"{in_bytes(size)} in /dev/shm: UCX and NCCL may run out of it",
            (
                "docker run --shm-size 1g, or --ipc host; in a pod, an emptyDir of "
                "medium Memory at /dev/shm"
            ),
        )
    return f"{in_bytes(size)} in /dev/shm", ""


def copies(machine: Machine, process: Process) -> Judgement:
    """Two copies of one library in a process: ai-dynamo/nixl #1668, vLLM #32379."""
    twice = {k: paths for k, paths in process.libraries.items() if len(paths) > 1}
    if twice:
        said = "; ".join(
            f"{library}: {' and '.join(paths)}" for library, paths in twice.items()
        )
        return (
            f"loaded more than once, which hangs or crashes: {said}",
            "keep one of them: the system's, or that of one wheel",
        )
    loaded = [path for paths in process.libraries.values() for path in paths]
    return f"loaded: {', '.join(loaded) or 'none'}", ""


def descriptors(machine: Machine, process: Process) -> Judgement:
    """Judge the limit of descriptors: a connection is a socket, a lane another."""
    limit = process.files
    if limit is None or limit == UNLIMITED or limit >= _FILES_MIN:
        shown = {None: "limit is not known here", UNLIMITED: "unlimited"}.get(limit)
        return shown or f"{limit:,}", ""
    return (
        (
            f"at most {limit}: a connection takes one, and one for each of up to "
            f"{LANES_MAX} lanes"
        ),
        "ulimit -n 65536; docker run --ulimit nofile=65536; LimitNOFILE=65536",
    )


def _counted(models: tuple[str, ...]) -> str:
    """Eight of a kind are said once: "8 x NVIDIA H200"."""
    if not models:
        return "no GPU"
    kinds = dict.fromkeys(models)
    return ", ".join(f"{models.count(kind)} x {kind}" for kind in kinds)


_JUDGES: Final[dict[str, Callable[[Machine, Process], Judgement]]] = {
    "GPU": gpus,
    "torch allocator": expandable_segments,
    "RDMA": rdma,
    "locked memory": locked_memory,
    "PID namespace": namespaces,
    "ptrace scope": ptrace,
    "shared memory": shared_memory,
    "UCX and NCCL": copies,
    "descriptors": descriptors,
}
