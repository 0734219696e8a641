"""Facts of a machine, from a ``/sys``, ``/proc`` and ``/dev`` made for the test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvwire
from kvwire.cli.doctor import machine as module
from kvwire.cli.doctor.machine import Machine, ask_nvidia_smi, look_at
from tests.cli.doctor.trees import GPU, IB, port, tree


def look(root: Path, told: str = "", **environment: str) -> Machine:
    return look_at(root=root, environment=environment, ask_gpus=lambda: told)


def test_a_bare_machine(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert not any((found.rdma, found.gpus, found.gpu_nodes, found.rdma_nodes))
    assert found.ptrace_scope is None
    assert found.shared_bytes is None
    assert found.container == found.gpu_driver == ""
    assert found.cpus >= 1


def test_versions() -> None:
    found = look(Path("/nowhere")).versions
    assert found["kvwire"] == kvwire.__version__
    assert {"Python", "uvloop", "msgspec", "numpy"} <= set(found)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHOWN", ("no-such-package",))
    assert look(Path("/nowhere")).versions["no-such-package"] == "not installed"


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


def test_gpus_from_the_driver(tmp_path: Path) -> None:
    found = look(tree(tmp_path, GPU), told="999.9, a GPU that is not asked for")
    assert found.gpus == ("NVIDIA H200", "NVIDIA H200")
    assert found.gpu_driver == "570.86.15"
    assert found.gpu_nodes == ("nvidia0", "nvidia1")


def test_the_closed_driver_words_its_version_otherwise(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
    found = look(tree(tmp_path, {"proc/driver/nvidia/version": text}))
    assert found.gpu_driver == "535.104.05"


def test_gpus_from_nvidia_smi_where_proc_knows_none(tmp_path: Path) -> None:
    found = look(tmp_path, told="551.61, NVIDIA GeForce RTX 4090\n")
    assert found.gpus == ("NVIDIA GeForce RTX 4090",)
    assert found.gpu_driver == "551.61"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [("551.61, A", 0, "551.61, A"), ("No devices were found", 6, "")],
)
def test_nvidia_smi_counts_only_if_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, text: str, status: int, said: str
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, status, text, "")

    monkeypatch.setattr("shutil.which", lambda _: "/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", run)
    assert ask_nvidia_smi() == said


def test_an_nvidia_smi_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("shutil.which", lambda _: "/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", run)
    assert ask_nvidia_smi() == ""


def test_without_nvidia_smi_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("subprocess.run", None)
    assert ask_nvidia_smi() == ""


@pytest.mark.parametrize(
    ("file", "kind"), [(".dockerenv", "docker"), ("run/.containerenv", "podman")]
)
def test_containers_by_their_files(tmp_path: Path, file: str, kind: str) -> None:
    assert look(tree(tmp_path, {file: ""})).container == kind


def test_a_pod_by_its_environment(tmp_path: Path) -> None:
    found = look(tree(tmp_path, {".dockerenv": ""}), KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert found.container == "kubernetes"


@pytest.mark.parametrize(("text", "scope"), [("1\n", 1), ("nonsense\n", None)])
def test_ptrace_scope(tmp_path: Path, text: str, scope: int | None) -> None:
    files = {"proc/sys/kernel/yama/ptrace_scope": text}
    assert look(tree(tmp_path, files)).ptrace_scope == scope


def test_the_size_of_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    size = os.statvfs(tmp_path)
    assert look(tmp_path).shared_bytes == size.f_blocks * size.f_frsize
