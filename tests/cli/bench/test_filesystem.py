"""Which file system a directory lies on, by what the kernel says is mounted."""

from __future__ import annotations

from pathlib import Path

from kvwire.cli.bench.filesystem import filesystem

LINE = "36 35 98:0 / {} rw,noatime master:1 - {} {} rw"


def mounted(tmp_path: Path, *mounts: tuple[Path, str, str]) -> Path:
    file = tmp_path / "mountinfo"
    lines = [
        LINE.format(str(where).replace(" ", r"\040"), kind, device)
        for where, kind, device in mounts
    ]
    file.write_text("\n".join(["", "no such line", *lines]) + "\n")
    return file


def test_the_nearest_mount_counts(tmp_path: Path) -> None:
    inner = tmp_path / "kv store"
    inner.mkdir()
    mounts = mounted(
        tmp_path,
        (inner, "xfs", "/dev/nvme0n1"),
        (Path("/"), "ext4", "/dev/vda"),
        (Path(f"{inner}er"), "tmpfs", "none"),
    )
    assert filesystem(inner, mounts) == "xfs on /dev/nvme0n1"
    assert filesystem(tmp_path, mounts) == "ext4 on /dev/vda"


def test_of_two_at_one_place_the_later_is_seen(tmp_path: Path) -> None:
    mounts = mounted(tmp_path, (tmp_path, "ext4", "a"), (tmp_path, "tmpfs", "b"))
    assert filesystem(tmp_path, mounts) == "tmpfs on b"


def test_nothing_is_known_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert "not name" in filesystem(tmp_path, tmp_path / "missing")
    assert "unknown" in filesystem(tmp_path, mounted(tmp_path))


def test_this_machine_has_one(tmp_path: Path) -> None:
    assert filesystem(tmp_path)
