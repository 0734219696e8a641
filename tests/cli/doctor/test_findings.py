"""Each finding, with the facts that bring it about and those that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvwire.cli.doctor import findings
from kvwire.cli.doctor.facts import (
    CAP_IPC_LOCK,
    CAP_SYS_PTRACE,
    UNLIMITED,
    Machine,
    Process,
)
from kvwire.limits import GIB, MIB
from tests.cli.doctor.hosts import machine, port

TRACER = Process(capabilities=1 << CAP_SYS_PTRACE)
IB = machine(rdma=(port(),), rdma_nodes=("uverbs0",))
TWO_COPIES: dict[str, tuple[str, ...]] = {
    "libucp": ("/usr/lib/libucp.so.0", "/opt/libucp-1f.so.0")
}
GPUS = {"gpus": ("NVIDIA H200",) * 2, "gpu_driver": "570.86.15"}
PLAIN = machine()

Judge = Callable[[Machine, Process], findings.Judgement]


@pytest.mark.parametrize(
    ("judge", "host", "process", "words"),
    [
        (findings.rdma, PLAIN, Process(), "no device"),
        (findings.rdma, IB, Process(), "mlx5_0:1 ACTIVE 200 Gb/sec InfiniBand"),
        (findings.locked_memory, PLAIN, Process(), "not known"),
        (findings.locked_memory, PLAIN, Process(locked_bytes=8 * MIB), "8 MiB"),
        (findings.locked_memory, IB, Process(locked_bytes=UNLIMITED), "unlimited"),
        (
            findings.locked_memory,
            IB,
            Process(locked_bytes=1, capabilities=1 << CAP_IPC_LOCK),
            "CAP_IPC_LOCK",
        ),
        (findings.gpus, PLAIN, Process(), "no NVIDIA driver"),
        (
            findings.gpus,
            machine(**GPUS, gpu_nodes=("nvidia0",)),
            Process(settings={"CUDA_VISIBLE_DEVICES": "1"}),
            "2 x NVIDIA H200, driver 570.86.15; CUDA_VISIBLE_DEVICES='1'",
        ),
        (
            findings.gpus,
            machine(**GPUS, system="Linux 5.15-microsoft-standard-WSL2 x86_64"),
            Process(),
            "2 x NVIDIA H200",
        ),
        (findings.gpus, machine(gpu_driver="570.1"), Process(), "no GPU"),
        (
            findings.expandable_segments,
            PLAIN,
            Process(settings={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
            "no expandable_segments",
        ),
        (findings.ptrace, PLAIN, Process(), "no Yama"),
        (findings.ptrace, machine(ptrace_scope=0), Process(), "0: processes of one"),
        (findings.ptrace, machine(ptrace_scope=1), Process(), "whom it names"),
        (findings.ptrace, machine(ptrace_scope=2), TRACER, "has CAP_SYS_PTRACE"),
        (findings.namespaces, PLAIN, Process(), "not known"),
        (
            findings.namespaces,
            machine(container="docker"),
            Process(own_pid_namespace=False),
            "the host's; in a container (docker)",
        ),
        (findings.shared_memory, PLAIN, Process(), "no /dev/shm"),
        (findings.shared_memory, machine(shared_bytes=2 * GIB), Process(), "2 GiB"),
        (findings.copies, PLAIN, Process(), "none"),
        (
            findings.copies,
            PLAIN,
            Process(libraries={"libucp": ("/usr/lib/libucp.so.0",)}),
            "/usr/lib/libucp.so.0",
        ),
        (findings.descriptors, PLAIN, Process(), "not known"),
        (findings.descriptors, PLAIN, Process(files=UNLIMITED), "unlimited"),
        (findings.descriptors, PLAIN, Process(files=1024), "1,024"),
    ],
)
def test_in_order(judge: Judge, host: Machine, process: Process, words: str) -> None:
    text, remedy = judge(host, process)
    assert words in text
    assert remedy == ""


@pytest.mark.parametrize(
    ("judge", "host", "process", "words", "remedy"),
    [
        (
            findings.rdma,
            machine(rdma=(port(),)),
            Process(),
            "no /dev/infiniband/uverbs*",
            "--device /dev/infiniband",
        ),
        (
            findings.rdma,
            machine(rdma=(port("DOWN"),), rdma_nodes=("uverbs0",)),
            Process(),
            "no port is up",
            "subnet manager",
        ),
        (
            findings.locked_memory,
            IB,
            Process(locked_bytes=64 * 1024),
            "at most 64 KiB",
            "ulimit -l unlimited",
        ),
        (findings.gpus, machine(**GPUS), Process(), "no /dev/nvidia*", "--gpus all"),
        (
            findings.expandable_segments,
            PLAIN,
            Process(
                settings={
                    "PYTORCH_CUDA_ALLOC_CONF": (
                        "max_split_size_mb:64,expandable_segments:True"
                    )
                }
            ),
            "PYTORCH_CUDA_ALLOC_CONF",
            "unset",
        ),
        (
            findings.ptrace,
            machine(ptrace_scope=2),
            Process(),
            "CAP_SYS_PTRACE",
            "sysctl kernel.yama.ptrace_scope=1",
        ),
        (findings.ptrace, machine(ptrace_scope=3), TRACER, "nobody", "reboot"),
        (
            findings.namespaces,
            machine(container="kubernetes"),
            Process(own_pid_namespace=True),
            "container (kubernetes)",
            "shareProcessNamespace",
        ),
        (
            findings.shared_memory,
            machine(shared_bytes=64 * MIB),
            Process(),
            "64 MiB",
            "--shm-size",
        ),
        (
            findings.copies,
            PLAIN,
            Process(libraries=TWO_COPIES),
            "/usr/lib/libucp.so.0 and /opt/libucp-1f.so.0",
            "keep one",
        ),
        (findings.descriptors, PLAIN, Process(files=256), "at most 256", "ulimit -n"),
    ],
)
def test_a_warning_says_what_follows_and_what_to_do(
    judge: Judge, host: Machine, process: Process, words: str, remedy: str
) -> None:
    text, what_to_do = judge(host, process)
    assert words in text
    assert remedy in what_to_do


def test_what_has_a_remedy_is_a_warning() -> None:
    found = {f.name: f.state for f in findings.judged(PLAIN, Process(files=256))}
    assert len(found) == 9
    assert [name for name, state in found.items() if state == "warn"] == ["descriptors"]
