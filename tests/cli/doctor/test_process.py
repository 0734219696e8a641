"""Facts of a process, from a ``/proc`` that was made for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvwire import UsageError
from kvwire.cli.doctor.process import (
    CAP_IPC_LOCK,
    CAP_SYS_PTRACE,
    UNLIMITED,
    Process,
    look_at,
)
from tests.cli.doctor.trees import LIMITS, tree

MAPS = """\
55d0-55d1 r-xp 00000000 08:01 99 /usr/bin/python3.12
7f00-7f01 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libucp.so.0.0.0
7f01-7f02 r-xp 00001000 08:01 11 /usr/lib/x86_64-linux-gnu/libucp.so.0.0.0
7f03-7f04 r-xp 00000000 08:01 12 /opt/venv/nixl.libs/libucp-3a3c2ef6.so.0.0.0
7f05-7f06 r-xp 00000000 08:01 13 /opt/venv/nvidia/nccl/lib/libnccl.so.2
7f07-7f08 r-xp 00000000 08:01 14 /opt/a folder/libucpp.so.1
7ffd-7ffe rw-p 00000000 00:00 0 [stack]
"""


def test_limits(tmp_path: Path) -> None:
    limits = LIMITS.format(files=1024, locked=65536)
    found = look_at(root=tree(tmp_path, {"proc/self/limits": limits}))
    assert (found.files, found.locked_bytes) == (1024, 65536)


def test_a_process_that_is_not_there(tmp_path: Path) -> None:
    """An empty examination would look as if it were well."""
    root = tree(tmp_path, {"proc/self/limits": ""})
    with pytest.raises(UsageError, match="--pid 77: there is no such process"):
        look_at(77, root=root)
    with pytest.raises(UsageError, match="--pid 77: this system has no /proc"):
        look_at(77, root=tmp_path / "elsewhere")


def test_no_limit(tmp_path: Path) -> None:
    limits = LIMITS.format(files="unlimited", locked="unlimited")
    found = look_at(root=tree(tmp_path, {"proc/self/limits": limits}))
    assert (found.files, found.locked_bytes) == (UNLIMITED, UNLIMITED)


def test_capabilities(tmp_path: Path) -> None:
    status = f"Name:\tpython\nCapEff:\t{1 << CAP_IPC_LOCK:016x}\nCapBnd:\t0\n"
    found = look_at(root=tree(tmp_path, {"proc/self/status": status}))
    assert found.may(CAP_IPC_LOCK)
    assert not found.may(CAP_SYS_PTRACE)


@pytest.mark.parametrize(
    ("link", "own"), [("pid:[4026531836]", False), ("pid:[4026532281]", True)]
)
def test_the_namespace_of_the_host_has_a_fixed_number(
    tmp_path: Path, link: str, own: bool
) -> None:
    tree(tmp_path, {"proc/self/limits": ""})
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/pid").symlink_to(link)
    assert look_at(root=tmp_path).own_pid_namespace is own


def test_copies_of_a_library_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    found = look_at(root=tree(tmp_path, {"proc/self/maps": MAPS}))
    assert found.libraries == {
        "libnccl": ("/opt/venv/nvidia/nccl/lib/libnccl.so.2",),
        "libucp": (
            "/opt/venv/nixl.libs/libucp-3a3c2ef6.so.0.0.0",
            "/usr/lib/x86_64-linux-gnu/libucp.so.0.0.0",
        ),
    }


def test_only_settings_of_transports_are_kept(tmp_path: Path) -> None:
    environment = {
        "UCX_TLS": "tcp",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_TOKEN": "secret",
        "KVWIRE_PSK_FILE": "/etc/key",
    }
    found = look_at(root=tmp_path, environment=environment)
    assert set(found.settings) == {"UCX_TLS", "PYTORCH_CUDA_ALLOC_CONF"}


def test_another_process_has_an_environment_of_its_own(tmp_path: Path) -> None:
    files = {
        "proc/77/environ": "NCCL_DEBUG=INFO\0PATH=/bin\0UCX_TLS=sm,tcp\0",
        "proc/77/limits": LIMITS.format(files=9, locked=8),
        "proc/self/limits": LIMITS.format(files=1, locked=1),
    }
    found = look_at(77, root=tree(tmp_path, files), environment={"UCX_TLS": "mine"})
    assert found.settings == {"NCCL_DEBUG": "INFO", "UCX_TLS": "sm,tcp"}
    assert (found.pid, found.files, found.locked_bytes) == (77, 9, 8)


def test_where_there_is_no_proc_nothing_is_known(tmp_path: Path) -> None:
    assert look_at(root=tmp_path, environment={}) == Process()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_this_process_is_what_the_system_says() -> None:
    import resource

    found = look_at()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found.files == soft
    assert look_at(os.getpid()).capabilities == found.capabilities
