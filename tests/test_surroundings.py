"""What programs meet outside of this tree: one transfer and one store in each.

Each row changes a process's surroundings in one way, and the same program moves a cache
and stores it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import python


@pytest.mark.parametrize(
    ("name", "row"),
    list(
        {
            "as it is": {},
            "without asserts": {"options": ["-OO"]},
            "development mode": {"options": ["-X", "dev", "-W", "error"]},
            "isolated": {"options": ["-I"]},
            "no UTF-8": {
                "options": ["-X", "utf8=0"],
                "variables": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
            },
            "a time zone": {"variables": {"TZ": "Asia/Kathmandu"}},
            "no home": {"variables": {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}},
            "a working directory that has gone": {
                "before": "gone = sys.argv[1] + '/gone'\n"
                "os.mkdir(gone); os.chdir(gone); os.rmdir(gone)"
            },
            "few descriptors": {
                "before": "import resource\n"
                "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
            },
            "no standard streams": {
                "before": "os.dup2(1, 3); [os.close(n) for n in (0, 1)]"
            },
            "a strict mask of files": {"before": "os.umask(0o277)"},
            "no memory to share": {
                "before": "import errno\ndef refused(*_, **__):\n"
                "    raise OSError(errno.EPERM, 'Operation not permitted')\n"
                "os.memfd_create = refused"
            },
            "a full default executor": {
                "inside": """\
asyncio.get_running_loop().set_default_executor(
        concurrent.futures.ThreadPoolExecutor(1))
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 2)"""
            },
            "one thread that switches all the time": {
                "before": "sys.setswitchinterval(1e-6)"
            },
            "IPv6 alone": {"variables": {"AT": "[::1]"}},
        }.items()
    ),
)
def test_a_transfer_and_a_store(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    """What runs before the imports or inside, options of Python, and variables."""
    template = """\
import asyncio, concurrent.futures, os, sys, time
{before}
import numpy as np
import kvwire
from kvwire_store import BlockStore

SPEC = kvwire.KVSpec(
    layers=2, kv_heads=2, head_dim=16, block_tokens=16, dtype="float16"
)
FOLDER = sys.argv[1]

def cache(value):
    shape = (8, 2, 16, 2, 16)
    tensors = [np.full(shape, value, np.float16) for _ in range(2)]
    return kvwire.PagedCache(SPEC, tensors)

async def main():
    {inside}
    target = cache(0)
    host = os.environ.get("AT", "127.0.0.1")
    async with kvwire.open(name="far") as far, kvwire.open(name="near") as near:
        where = await far.listen(f"{{host}}:0")
        connection = await near.connect(where)
        out = far.publish("x", cache(1), [1, 2])
        out.ready()
        out.finish()
        outcome = await connection.pull("x", target, [5, 6])
        assert outcome.complete, str(outcome)
    hashes = [b"%032d" % number for number in range(8)]
    async with BlockStore.open(
        ["memory:1MiB", f"disk:{{FOLDER}}/kv?size=4MiB"]
    ) as store:
        put = await store.put(hashes, cache(2), range(8))
        assert put.complete, put.missing.reasons
        await store.flush()
    async with BlockStore.open(
        ["memory:1MiB", f"disk:{{FOLDER}}/kv?size=4MiB"]
    ) as store:
        got = await store.get(hashes, target, range(8))
        assert got.complete, got.missing.reasons

asyncio.run(main())
os.write(3 if {closed} else 1, b"well\\n")
"""
    if "IPv6" in name and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    text = template.format(
        before=row.get("before", ""),
        inside=row.get("inside", "pass"),
        closed="standard streams" in name,
    )
    program = tmp_path / "program.py"
    program.write_text(text, encoding="utf-8")
    done = python(
        *(*row.get("options", ()), program, tmp_path),
        cwd=tmp_path,
        env=os.environ | row.get("variables", {}),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "well\n"
