"""The short examples, run as the documentation says, each in processes of its own.

They are run in a folder that knows nothing of this repository: only what pip installed
and what lies beside the example can be imported there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.depth import parameters
from tests.support.runs import python, ran
from tests.support.tree import ROOT

EXAMPLES = ROOT / "examples"
HELLO = [sys.executable, "-W", "error", str(EXAMPLES / "hello.py")]


def run_example(name: str, folder: Path, *arguments: str, timeout_s: float = 50) -> str:
    done = python(str(EXAMPLES / name), *arguments, cwd=folder, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", parameters(["prefill_decode_pull.py", "prefill_decode_push.py"], every=2)
)
def test_decode_says_what_one_process_says(name: str, tmp_path: Path) -> None:
    """The example asserts it too; here the words are seen to be no blanks."""
    said = re.search(
        r"decode writes '([^']*)', the same as one", run_example(name, tmp_path)
    )
    assert said
    assert len(set(said[1])) > 5


@pytest.mark.slow
def test_chunks_that_were_never_computed_are_what_decode_computes(
    tmp_path: Path,
) -> None:
    lines = run_example("chunked_prefill.py", tmp_path).splitlines()
    assert "whole: 13 of 13 blocks arrived" in lines
    # Two chunks of 50 tokens fill 6 blocks of 16; the prompt has 194 without its last.
    assert "broken: 6 of 13 blocks arrived" in lines
    assert "broken: decode computes tokens 96 to 193" in lines
    assert sum("the same as one process alone" in line for line in lines) == 2


def test_a_client_gives_up_and_goes_on(tmp_path: Path) -> None:
    assert run_example("request_reply.py", tmp_path).splitlines() == [
        "['HELLO', 'AGAIN']",
        "the client gave up",
        "the server stopped working on 1002",
        "AND GOES ON",
    ]


@pytest.mark.parametrize(
    "arguments", parameters([["--every", "0.1"], ["--every", "0.2", "--kill"]], every=2)
)
def test_requests_move_and_their_streams_stay_whole(
    arguments: list[str], tmp_path: Path
) -> None:
    """The example compares each stream with one process alone."""
    said = run_example(
        *("migrate.py", tmp_path, "--prompt", "100", "--new", "80"),
        *arguments,
        timeout_s=300,
    )
    assert re.match(r"\d+ streams, each with the tokens of one process alone", said), (
        said
    )
    # More requests follow until then, however fast this machine is.
    assert re.search(r" [1-9]\d* moved", said), said
    assert "--kill" not in arguments or re.search(r" [1-9]\d* asked again", said), said


def test_training_finds_the_files_of_the_demo(tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers", reason="transformers: `make test-torch` installs it"
    )
    assert "--steps" in run_example("train_demo.py", tmp_path, "--help")


def test_prefill_writes_what_decode_lends() -> None:
    with subprocess.Popen(
        [*HELLO, "decode"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as decode:
        assert decode.stdout is not None
        address = decode.stdout.readline().strip()
        prefill = ran(*HELLO, "prefill", address)
        said, errors = decode.communicate(timeout=300)
    assert (prefill.returncode, prefill.stdout, prefill.stderr) == (0, "", "")
    assert (decode.returncode, errors) == (0, "")
    assert said.splitlines() == [
        "prefill-0 over tcp: block 3 is written",
        "block 3 is there",
        "its neighbours are whole",
    ]


@pytest.mark.parametrize(
    "name",
    ["hello.py", "agent_cache.py", "fastapi_pair.py", "fleet.py", "threads.py"],
)
def test_called_wrong_it_says_how(name: str) -> None:
    if name == "fastapi_pair.py":
        pytest.importorskip("fastapi", reason="fastapi is not installed")
    done = python(EXAMPLES / name)
    assert done.returncode == 1
    assert f"python examples/{name}" in done.stderr


def test_the_table_lists_each_example() -> None:
    """What other examples import is no example."""
    listed = set(
        re.findall(
            r"\]\((\w+(?:\.py|/README\.md))\)", (EXAMPLES / "README.md").read_text()
        )
    )
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    projects = {
        f"{path.parent.name}/README.md" for path in EXAMPLES.glob("*/pyproject.toml")
    }
    assert listed == programs | projects
