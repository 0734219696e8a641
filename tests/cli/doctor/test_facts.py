"""Facts of a machine and a process, from ``/sys``, ``/proc`` and ``/dev`` made here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvwire
from kvwire import UsageError
from kvwire.cli.doctor import facts
from kvwire.cli.doctor.facts import (
    CAP_IPC_LOCK,
    CAP_SYS_PTRACE,
    UNLIMITED,
    Machine,
    Process,
    ask_nvidia_smi,
    machine_at,
    process_at,
)
from tests.cli.doctor.hosts import GPU, IB, LIMITS, port, tree


def look(root: Path, told: str = "", **environment: str) -> Machine:
    return machine_at(root, environment=environment, ask_gpus=lambda: told)


def test_a_bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path)
    assert not any((found.rdma, found.gpus, found.gpu_nodes, found.rdma_nodes))
    assert found.ptrace_scope is None
    assert found.shared_bytes is None
    assert found.container == found.gpu_driver == ""
    assert found.cpus >= 1
    assert found.versions["kvwire"] == kvwire.__version__
    assert {"Python", "uvloop", "msgspec", "numpy"} <= set(found.versions)
    monkeypatch.setattr(facts, "_SHOWN", ("no-such-package",))
    assert look(tmp_path).versions["no-such-package"] == "not installed"


def test_rdma_ports_and_their_device_files(tmp_path: Path) -> None:
    down = {
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "sys/class/infiniband/mlx5_1/ports/1/rate": "40 Gb/sec (4X QDR)\n",
        "sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet\n",
    }
    found = look(tree(tmp_path, IB | down))
    assert found.rdma[0] == port()
    assert str(found.rdma[1]) == "mlx5_1:1 DOWN 40 Gb/sec Ethernet"
    assert found.rdma_nodes == ("uverbs0",)


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"


@pytest.mark.parametrize(
    ("files", "gpus", "driver"),
    [
        (GPU, ("NVIDIA H200",) * 2, "570.86.15"),
        # The closed driver words its version otherwise.
        ({"proc/driver/nvidia/version": CLOSED}, (), "535.104.05"),
        # nvidia-smi is asked where proc knows none.
        ({}, ("NVIDIA GeForce RTX 4090",), "551.61"),
    ],
)
def test_gpus_and_their_driver(
    tmp_path: Path, files: dict[str, str], gpus: tuple[str, ...], driver: str
) -> None:
    found = look(tree(tmp_path, files), told="551.61, NVIDIA GeForce RTX 4090\n")
    assert (found.gpus, found.gpu_driver) == (gpus, driver)
    assert found.gpu_nodes == (("nvidia0", "nvidia1") if files is GPU else ())


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [("551.61, A", 0, "551.61, A"), ("No devices were found", 6, ""), (None, 0, "")],
)
def test_nvidia_smi_counts_only_if_it_succeeds_in_time(
    monkeypatch: pytest.MonkeyPatch, text: str | None, status: int, said: str
) -> None:
    def run(
        command: list[str], timeout: float, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        if text is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, status, text, "")

    monkeypatch.setattr("shutil.which", lambda _: "/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", run)
    assert ask_nvidia_smi() == said
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert ask_nvidia_smi() == ""


@pytest.mark.parametrize(
    ("file", "environment", "kind"),
    [
        (".dockerenv", {}, "docker"),
        ("run/.containerenv", {}, "podman"),
        (".dockerenv", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ],
)
def test_containers(
    tmp_path: Path, file: str, environment: dict[str, str], kind: str
) -> None:
    assert look(tree(tmp_path, {file: ""}), **environment).container == kind


@pytest.mark.parametrize(("text", "scope"), [("1\n", 1), ("nonsense\n", None)])
def test_ptrace_scope_and_shared_memory(
    tmp_path: Path, text: str, scope: int | None
) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    size = os.statvfs(tmp_path)
    files = {"proc/sys/kernel/yama/ptrace_scope": text}
    found = look(tree(tmp_path, files))
    assert found.ptrace_scope == scope
    assert found.shared_bytes == size.f_blocks * size.f_frsize


# --- a process ------------------------------------------------------------------------

MAPS = """\
55d0-55d1 r-xp 00000000 08:01 99 /usr/bin/python3.12
7f00-7f01 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libucp.so.0.0.0
7f01-7f02 r-xp 00001000 08:01 11 /usr/lib/x86_64-linux-gnu/libucp.so.0.0.0
7f03-7f04 r-xp 00000000 08:01 12 /opt/venv/nixl.libs/libucp-3a3c2ef6.so.0.0.0
7f05-7f06 r-xp 00000000 08:01 13 /opt/venv/nvidia/nccl/lib/libnccl.so.2
7f07-7f08 r-xp 00000000 08:01 14 /opt/a folder/libucpp.so.1
7ffd-7ffe rw-p 00000000 00:00 0 [stack]
"""
STATUS = f"Name:\tpython\nCapEff:\t{1 << CAP_IPC_LOCK:016x}\nCapBnd:\t0\n"


@pytest.mark.parametrize(
    ("pid", "said", "files", "locked"),
    [(0, ("1024", "65536"), 1024, 65536), (77, ("unlimited",) * 2, *[UNLIMITED] * 2)],
)
def test_a_process_has_limits_rights_libraries_and_settings(
    tmp_path: Path, pid: int, said: tuple[str, str], files: int, locked: int
) -> None:
    """Of another one, the environment is its own; only settings of transports count."""
    folder = f"proc/{pid or 'self'}"
    tree(
        tmp_path,
        {
            f"{folder}/limits": LIMITS.format(files=said[0], locked=said[1]),
            f"{folder}/status": STATUS,
            f"{folder}/maps": MAPS,
            f"{folder}/environ": "UCX_TLS=sm,tcp\0HF_TOKEN=secret\0PATH=/bin\0",
            "proc/self/comm": "",
        },
    )
    mine = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "KVWIRE_PSK_FILE": "/etc/key",
    }
    found = process_at(pid, tmp_path, environment=mine)
    assert (found.pid, found.files, found.locked_bytes) == (pid, files, locked)
    assert found.may(CAP_IPC_LOCK)
    assert not found.may(CAP_SYS_PTRACE)
    assert set(found.settings) == {"UCX_TLS" if pid else "PYTORCH_CUDA_ALLOC_CONF"}
    # Copies of a library are told apart by their paths.
    assert found.libraries == {
        "libnccl": ("/opt/venv/nvidia/nccl/lib/libnccl.so.2",),
        "libucp": (
            "/opt/venv/nixl.libs/libucp-3a3c2ef6.so.0.0.0",
            "/usr/lib/x86_64-linux-gnu/libucp.so.0.0.0",
        ),
    }


def test_a_process_that_is_not_there(tmp_path: Path) -> None:
    """An empty examination would look as if it were well."""
    assert process_at(root=tmp_path, environment={}) == Process()
    with pytest.raises(UsageError, match="--pid 77: this system has no /proc"):
        process_at(77, tmp_path)
    with pytest.raises(UsageError, match="--pid 77: there is no such process"):
        process_at(77, tree(tmp_path, {"proc/self/limits": ""}))


@pytest.mark.parametrize(
    ("link", "own"), [("pid:[4026531836]", False), ("pid:[4026532281]", True)]
)
def test_the_namespace_of_the_host_has_a_fixed_number(
    tmp_path: Path, link: str, own: bool
) -> None:
    tree(tmp_path, {"proc/self/limits": ""})
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/pid").symlink_to(link)
    assert process_at(root=tmp_path).own_pid_namespace is own


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_this_process_is_what_the_system_says() -> None:
    import resource

    found = process_at()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found.files == soft
    assert process_at(os.getpid()).capabilities == found.capabilities
