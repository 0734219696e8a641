"""The memory that a container may use: both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire.memory.container import memory_limit, resident_bytes
from tests.cli.doctor.hosts import tree

GROUPS = "sys/fs/cgroup"
V1_UNLIMITED = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("files", "nbytes", "file"),
    [
        ({}, None, ""),
        ({"proc/self/cgroup": "0::/a/b\n"}, None, ""),
        (
            {"proc/self/cgroup": "0::/a\n", f"{GROUPS}/a/memory.max": "max\n"},
            None,
            "",
        ),
        (
            {"proc/self/cgroup": "0::/a\n", f"{GROUPS}/a/memory.max": "4096\n"},
            4096,
            f"{GROUPS}/a/memory.max",
        ),
        # A group above it has less.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{GROUPS}/a/b/memory.max": "8192\n",
                f"{GROUPS}/a/memory.max": "4096\n",
            },
            4096,
            f"{GROUPS}/a/memory.max",
        ),
        # A container sees its own group at the top, and a path from outside.
        (
            {"proc/self/cgroup": "0::/pod/c\n", f"{GROUPS}/memory.max": "4096\n"},
            4096,
            f"{GROUPS}/memory.max",
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:cpu,memory:/a\n0::/\n",
                f"{GROUPS}/memory/a/memory.limit_in_bytes": "4096\n",
                f"{GROUPS}/memory/memory.limit_in_bytes": V1_UNLIMITED,
                f"{GROUPS}/memory/x/memory.limit_in_bytes": "1\n",
            },
            4096,
            f"{GROUPS}/memory/a/memory.limit_in_bytes",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                f"{GROUPS}/memory/a/memory.limit_in_bytes": V1_UNLIMITED,
            },
            None,
            "",
        ),
    ],
)
def test_the_limit(
    tmp_path: Path, files: dict[str, str], nbytes: int | None, file: str
) -> None:
    tree(tmp_path, files)
    found = memory_limit(tmp_path, tmp_path / "proc/self")
    if nbytes is None:
        assert found is None
    else:
        assert found == (nbytes, tmp_path / file)


def test_this_process_uses_memory() -> None:
    assert resident_bytes() > 1 << 20
