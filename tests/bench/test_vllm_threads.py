"""What the kernel's counters are read as, without vLLM."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the bench asks servers")

from tests.bench.vllm_requests import Sample
from tests.bench.vllm_running import chosen
from tests.bench.vllm_servers import varied
from tests.bench.vllm_threads import (
    Seen,
    Thread,
    Usage,
    descendants,
    spent,
    table,
    usages,
)

MAIN = ("engine", "main")
ENGINE = Thread("prefill", *MAIN)


def _task(proc: Path, pid: int, tid: int, name: str, children: str = "") -> Path:
    """A thread as the kernel shows it; the tenth field of stat is its page faults."""
    task = proc / str(pid) / "task" / str(tid)
    task.mkdir(parents=True)
    (proc / str(pid) / "comm").write_text("engine\n")
    (task / "comm").write_text(f"{name}\n")
    (task / "children").write_text(children)
    (task / "schedstat").write_text("2500000 500000 9\n")
    (task / "stat").write_text(f"{tid} (a) b) S 1 2 3 4 5 6 7 8 9\n")
    (task / "status").write_text(
        f"Name:\t{name}\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t3\n"
    )
    return task


def test_threads_are_read_and_added_up_by_name(tmp_path: Path) -> None:
    """Those of children too; one that ends meanwhile is left out."""
    tasks = [_task(tmp_path, 1, tid, "io", "3 " * (tid == 1)) for tid in (1, 2, 9)]
    _task(tmp_path, 3, 4, "io")
    assert sorted(descendants(1, tmp_path)) == [1, 3]
    before = usages([1, 77], tmp_path)
    assert before[1, 2] == (("engine", "io"), Usage(2.5, 0.5, 7, 3, 7))
    del before[1, 9]
    (tasks[1] / "schedstat").write_text("7500000 500000 9\n")
    (tmp_path / "3/task/4/schedstat").unlink()
    used = spent(before, usages([1, 3], tmp_path))
    # One was there before; the other is new, so all of it counts.
    assert used == {MAIN: Usage(), ("engine", "io"): Usage(5.0 + 2.5, 0.5, 7, 3, 7)}


@pytest.mark.skipif(sys.platform != "linux", reason="counters are read from /proc")
def test_our_own_threads_are_found() -> None:
    names, usage = usages([os.getpid()])[os.getpid(), threading.get_native_id()]
    assert names[1] == "main"
    assert min(usage.run_ms, usage.faults) > 0


def test_the_table_has_medians_of_busy_threads() -> None:
    idle = Thread("decode", *MAIN)
    used = [
        {ENGINE: Usage(run_ms, 2.0, 5, 1, 0), idle: Usage(0.5)}
        for run_ms in (30.0, 10.0, 20.0)
    ]
    samples = [Sample(prefill_s, 0.008) for prefill_s in (0.09, 0.07, 0.08)]
    lines = table({"kvwire tcp": Seen(samples, used)}).splitlines()
    assert lines[2:] == [
        "| kvwire tcp: prefill 80 ms, handover 8 ms | | | | | | |",
        "| prefill | engine: main | 20.0 | 2.0 | 5 | 1 | 0 |",
    ]


def test_a_varied_contender_has_servers_and_configuration_of_its_own() -> None:
    ((one,),) = chosen(["tcp, push"])
    other = varied(one, 3, {"group_bytes": 7})
    assert other.servers != one.servers
    assert other.name != one.name
    assert other.pushes
    said = one.connector("kv_producer", "h:1")["kv_connector_extra_config"]
    more = other.connector("kv_producer", "h:1")["kv_connector_extra_config"]
    assert more == {**said, "group_bytes": 7}
