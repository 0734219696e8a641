"""Each check, on ``/sys``, ``/proc`` and ``/dev`` made here: what it says, and not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvwire import UsageError
from kvwire.cli.doctor.checks import CAP_IPC_LOCK, CAP_SYS_PTRACE, HostFiles, check
from tests.cli.doctor.hosts import GPU, IB, limits, tree
from tests.support.compiled import need_compiled, without_compiled

PORT = "mlx5_0:1 ACTIVE 200 Gb/sec InfiniBand"
DOWN = {
    "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "40 Gb/sec (4X QDR)\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
    "dev/infiniband/uverbs0": "",
}
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
UCP = "7f00-7f01 r-xp 00001000 08:01 11 /usr/lib/libucp.so.0.0.0\n"
NIXL = "7f03-7f04 r-xp 00000000 08:01 12 /opt/a venv/nixl.libs/libucp-3a3c2ef6.so.0\n"
OTHERS = "7f07-7f08 r-xp 00000000 08:01 14 /opt/libucpp.so.1\n7ffd-7ffe rw-p [stack]\n"
NCCL = "7f05-7f06 r-xp 00000000 08:01 13 /opt/nvidia/nccl/lib/libnccl.so.2\n"
LIMITS = "proc/self/limits"
ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
V2 = {
    "proc/self/cgroup": "0::/a\n",
    "sys/fs/cgroup/a/memory.max": f"{200 << 20}\n",
}
LOW = limits(locked="65536")


def status(capability: int) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tp\nCapEff:\t{1 << capability:016x}\n"}


def yama(scope: str) -> dict[str, str]:
    return {"proc/sys/kernel/yama/ptrace_scope": f"{scope}\n"}


def maps(*lines: str) -> dict[str, str]:
    return {"proc/self/maps": "".join(lines)}


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine's GPUs nothing is known."""
    monkeypatch.setenv("PATH", "")


def without(files: dict[str, str], folder: str) -> dict[str, str]:
    return {name: text for name, text in files.items() if folder not in name}


VERBS, HAS = "/dev/infiniband", "this process has CAP_"
UNLIMIT = "ulimit -l unlimited"
BOTH_UCX = "/opt/a venv/nixl.libs/libucp-3a3c2ef6.so.0 and /usr/lib/libucp.so.0.0.0"
# What a check makes of files: its name, what it says, and what to do about it.
FILES: list[tuple[str, dict[str, str], str, str]] = [
    ("RDMA", {}, "no device", ""),
    ("RDMA", IB, PORT, ""),
    ("RDMA", DOWN, "40 Gb/sec Ethernet: no port is up", "subnet manager"),
    (
        "RDMA",
        without(IB, "dev"),
        f"{PORT}; but no {VERBS}/uverbs*",
        f"--device {VERBS}",
    ),
    ("locked memory", {}, "not known", ""),
    ("locked memory", limits(locked="8388608"), "8 MiB; only RDMA", ""),
    ("locked memory", IB | limits(locked="unlimited"), "unlimited", ""),
    ("locked memory", IB | LOW | status(CAP_IPC_LOCK), f"unlimited: {HAS}IPC_LOCK", ""),
    ("locked memory", IB | LOW | status(CAP_SYS_PTRACE), "at most 64 KiB", UNLIMIT),
    ("GPU", {}, "no NVIDIA driver", ""),
    ("GPU", GPU, "2 x NVIDIA H200, driver 570.86.15", ""),
    # The closed driver words its version otherwise.
    ("GPU", {"proc/driver/nvidia/version": CLOSED}, "no GPU, driver 535", ""),
    ("GPU", without(GPU, "dev"), "no /dev/nvidia*", "--gpus all"),
    ("ptrace scope", {}, "no Yama", ""),
    ("ptrace scope", yama("nonsense"), "no Yama", ""),
    ("ptrace scope", yama("0"), "0: processes of one user may", ""),
    ("ptrace scope", yama("1"), "that it names", ""),
    ("ptrace scope", yama("2") | status(CAP_SYS_PTRACE), f"2, but {HAS}SYS_PTRACE", ""),
    ("ptrace scope", yama("2"), "CAP_SYS_PTRACE", "sysctl kernel.yama"),
    ("ptrace scope", yama("3") | status(CAP_SYS_PTRACE), "nobody", "reboot"),
    ("PID namespace", {}, "not known here; in no known container", ""),
    ("PID namespace", {".dockerenv": ""}, "in a container (docker)", ""),
    ("PID namespace", {"run/.containerenv": ""}, "container (podman)", ""),
    ("shared memory", {}, "there is no /dev/shm", ""),
    ("memory limit", {}, "no limit", ""),
    ("memory limit", V2, "at most 200 MiB", ""),
    ("UCX and NCCL", maps(OTHERS), "loaded: none", ""),
    ("UCX and NCCL", maps(UCP, UCP), "loaded: /usr/lib/libucp.so.0.0.0", ""),
    ("UCX and NCCL", maps(UCP, NIXL, NCCL), f"libucp: {BOTH_UCX}", "keep one"),
    ("descriptors", {}, "not known", ""),
    ("descriptors", limits(files="unlimited"), "unlimited", ""),
    ("descriptors", limits(files="1048576"), "1,048,576", ""),
    ("descriptors", limits(files="256"), "at most 256", "ulimit -n"),
]
# And of what is set beside files.
EXPANDABLE = "expandable_segments"
SPLIT = f"max_split_size_mb:64,{EXPANDABLE}:True"
SET: list[tuple[str, dict[str, str], dict[str, str], str, str]] = [
    ("GPU", GPU, {"CUDA_VISIBLE_DEVICES": ""}, "; CUDA_VISIBLE_DEVICES=''", ""),
    ("torch allocator", {}, {ALLOC: "expandable_segments:False"}, "no exp", ""),
    ("torch allocator", {}, {ALLOC: SPLIT}, f"{ALLOC} sets {EXPANDABLE}", "unset"),
    ("PID namespace", {".dockerenv": ""}, KUBERNETES, "container (kubernetes)", ""),
]


@pytest.mark.parametrize(
    ("name", "files", "environment", "text", "remedy"),
    [*((name, files, {}, *said) for name, files, *said in FILES), *SET],
)
def test_a_check_says_what_is_so_and_what_to_do(
    name: str,
    files: dict[str, str],
    environment: dict[str, str],
    text: str,
    remedy: str,
    tmp_path: Path,
) -> None:
    """What has a remedy is a warning."""
    host = HostFiles(root=tree(tmp_path, files), environment=environment)
    found = {finding.name: finding for finding in check(host)}
    assert len(found) == 11
    assert text in found[name].text
    assert remedy in found[name].remedy
    assert bool(found[name].remedy) is bool(remedy)
    assert found[name].state == ("warn" if remedy else "ok")


@pytest.mark.parametrize(
    ("mib", "text", "remedy"),
    [(64, "64 MiB in /dev/shm: UCX", "--shm-size"), (256, "256 MiB in /dev/shm", "")],
)
def test_shared_memory(
    mib: int, text: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(path: Path) -> os.statvfs_result:
        assert path == tmp_path / "dev/shm"
        return os.statvfs_result((4096, 4096, mib * 256, *[0] * 7))

    monkeypatch.setattr(os, "statvfs", statvfs)
    (found,) = (f for f in check(HostFiles(root=tmp_path)) if f.name == "shared memory")
    assert text in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize("compiled", [True, False])
def test_copies(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled:
        need_compiled()
    else:
        without_compiled(monkeypatch)
    (found,) = (f for f in check(HostFiles(root=tmp_path)) if f.name == "copies")
    assert ("compiled loop" in found.text) is compiled
    assert ("pip install" in found.remedy) is not compiled


@pytest.mark.parametrize(
    ("text", "failure", "said"),
    [
        ("551.61, NVIDIA A\n551.61, NVIDIA A", None, "2 x NVIDIA A, driver 551.61"),
        ("", None, "no NVIDIA driver"),
        ("", subprocess.CalledProcessError(6, "it"), "no NVIDIA driver"),
        ("", subprocess.TimeoutExpired("it", 1), "no NVIDIA driver"),
    ],
)
def test_nvidia_smi_is_asked_where_proc_knows_no_driver(
    text: str,
    failure: Exception | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under WSL, where /dev has no file of a GPU either."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if failure is not None:
            raise failure
        return subprocess.CompletedProcess(command, 0, text)

    monkeypatch.setattr(subprocess, "run", run)
    found, *_ = check(HostFiles(root=tmp_path, environment={}))
    assert said in found.text
    assert found.state == "ok"


@pytest.mark.parametrize(
    ("name", "link", "said", "remedy"),
    [
        ("PID namespace", "pid:[4026531836]", "the host's; in no known container", ""),
        (
            "PID namespace",
            "pid:[4026532281]",
            "one of its own",
            "shareProcessNamespace",
        ),
        ("locked memory", "user:[4026531837]", f"unlimited: {HAS}IPC_LOCK", ""),
        ("locked memory", "user:[4026532281]", "at most 64 KiB", UNLIMIT),
    ],
)
def test_the_namespaces_of_the_host_have_fixed_numbers(
    name: str, link: str, said: str, remedy: str, tmp_path: Path
) -> None:
    (tree(tmp_path, IB | LOW | status(CAP_IPC_LOCK)) / "proc/self/ns").mkdir()
    kind, _, _ = link.partition(":")
    (tmp_path / "proc/self/ns" / kind).symlink_to(link)
    (found,) = (f for f in check(HostFiles(root=tmp_path)) if f.name == name)
    assert said in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("pid", "names"), [(0, {"PYTORCH_CUDA_ALLOC_CONF"}), (77, {"UCX_TLS"})]
)
def test_only_settings_of_transports_are_taken(
    pid: int, names: set[str], tmp_path: Path
) -> None:
    """Of another process, its own, and its limits."""
    environ = "UCX_TLS=sm,tcp\0HF_TOKEN=secret\0PATH=/bin\0"
    files = {"proc/77/environ": environ, "proc/77/limits": limits(files="9")[LIMITS]}
    mine = {ALLOC: "expandable_segments:True", "KVWIRE_PSK_FILE": "/etc/key"}
    host = HostFiles(root=tree(tmp_path, files), pid=pid, environment=mine)
    assert set(host.settings()) == names
    assert host.limit("Max open files") == (9 if pid else None)


def test_a_process_that_is_not_there(tmp_path: Path) -> None:
    """An empty examination would look as if it were well."""
    with pytest.raises(UsageError, match="--pid 77: this system has no /proc"):
        HostFiles(root=tmp_path, pid=77)
    with pytest.raises(UsageError, match="--pid 77: there is no such process"):
        HostFiles(root=tree(tmp_path, limits()), pid=77)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_this_process_is_what_the_system_says() -> None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for host in (HostFiles(), HostFiles(pid=os.getpid())):
        assert host.limit("Max open files") == soft
