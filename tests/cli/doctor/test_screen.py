"""The screen: 80 columns, 40 rows, nothing lost that matters."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from kvwire.backend import Finding
from kvwire.cli.doctor.checks import HostFiles, check
from kvwire.cli.doctor.examination import Transport
from kvwire.cli.doctor.screen import (
    COLUMNS_MAX,
    ROWS_MAX,
    fitting,
)
from tests.cli.doctor.hosts import GPU, IB, examination, limits, tree
from tests.support.compiled import without_compiled

WARNING = Finding(name="ptrace scope", state="warn", text="3: nobody", remedy="reboot")


def console() -> Console:
    return Console(file=io.StringIO(), width=COLUMNS_MAX, highlight=False)


def lines(shown: RenderableType) -> list[str]:
    where = console()
    where.print(shown)
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue().splitlines()


def test_a_host_where_all_is_well() -> None:
    found = lines(fitting(examination(), console()))
    assert found[0].startswith("kvwire 0.1.0")
    assert any(line.split() == ["ok", "tcp", "sockets"] for line in found)
    assert any(line.split() == ["ok", "descriptors", "20,000"] for line in found)
    assert found[-1] == "everything that the configuration requires is here"
    missing = Finding(name="require", state="missing", text="cannot run here: ucx")
    found = lines(fitting(examination(asked=(missing,), pid=4711), console()))
    assert found[-1].endswith("by the configuration: require")
    assert "machine and process 4711" in found


def test_a_finding_of_a_backend_stands_below_it_with_its_remedy() -> None:
    finding = Finding(name="verbs", state="warn", text="none", remedy="apt-get install")
    ucx = Transport(
        name="ucx", available=True, reason="libucp 1.21", findings=(finding,)
    )
    found = lines(fitting(examination(transports=(ucx,)), console()))
    place = next(i for i, line in enumerate(found) if "libucp 1.21" in line)
    assert found[place + 1].split() == ["warn", "verbs:", "none"]
    assert found[place + 2].split() == ["->", "apt-get", "install"]


def test_what_a_reason_has_said_is_not_said_again() -> None:
    same = Finding(name="GPU", state="missing", text="there is no GPU", remedy="buy")
    other = Finding(name="nccl4py", state="missing", text="none", remedy="buy")
    nccl = Transport(
        name="nccl",
        available=False,
        reason="there is no GPU",
        remedy="buy",
        findings=(same, other),
    )
    found = lines(fitting(examination(transports=(nccl,)), console()))
    assert sum("there is no GPU" in line for line in found) == 1
    assert sum("buy" in line for line in found) == 1
    assert any("nccl4py: none" in line for line in found)


def test_what_does_not_fit_is_said_in_brief() -> None:
    many = tuple(
        Finding(name=f"fact {i}", state="ok", text="in order") for i in range(50)
    )
    found = lines(fitting(examination(findings=(*many, WARNING)), console()))
    assert len(found) <= ROWS_MAX
    text = "\n".join(found)
    assert "in order" not in text
    assert "fact 49" in text
    assert "3: nobody" in text


def test_the_worst_host_keeps_every_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that can be the matter with one, at the length it has in earnest."""
    without_compiled(monkeypatch)
    reason = "libucp.so.0 of nvidia-ucx cannot be loaded: undefined symbol " * 2
    broken = tuple(
        Transport(
            name=name,
            available=False,
            reason=reason,
            remedy=f"pip install lib{name}, or the package of your system",
            findings=(WARNING,),
        )
        for name in ("inproc", "local", "nccl", "tcp", "ucx")
    )
    files = {k: v for k, v in (IB | GPU).items() if not k.startswith("dev")}
    place = "7f00-7f01 r-xp 00000000 08:01 11 /opt/venv/lib/python3.12/site-packages"
    files |= limits(files="256") | {
        "proc/sys/kernel/yama/ptrace_scope": "2",
        "proc/self/maps": f"{place}/.a.mesonpy.libs/libucp-9f.so\n{place}/libucp.so.0",
        ".dockerenv": "",
    }
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    host = HostFiles(root=tree(tmp_path, files), environment=settings)
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[1]")
    well = ("shared memory", "memory limit")
    ill = tuple(finding for finding in check(host) if finding.name not in well)
    assert all(finding.state == "warn" for finding in ill)
    shown = examination(container="docker", transports=broken, findings=ill)
    found = lines(fitting(shown, console()))
    assert max(map(len, found)) <= COLUMNS_MAX
    # Nothing of what is to be done is lost.
    words = "".join("".join(found).split())
    for finding in ill:
        assert any(finding.name in line for line in found)
        assert "".join(finding.remedy.split()) in words


def test_each_name_is_on_one_line(tmp_path: Path) -> None:
    findings = check(HostFiles(root=tmp_path, environment={}))
    found = "\n".join(lines(fitting(examination(findings=findings), console())))
    assert all(f"{each.name} " in found for each in findings)


def test_the_words_of_a_backend_steer_no_terminal() -> None:
    lacks = Finding(name="\x1b[2J", state="missing", text="a\nb", remedy="")
    found = lines(fitting(examination(asked=(lacks,)), console()))
    assert not any("\x1b[2J" in line for line in found)
    assert any("?[2J" in line and "a?b" in line for line in found)
