"""Every kind of planted mistake is found, and nothing where there is none."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from kvwire.errors import BackendUnavailable
from kvwire_certify import runner
from kvwire_certify.oracle import RULES
from kvwire_certify.player import Played
from kvwire_certify.runner import Stage, certify, play_again
from kvwire_certify.schedule import Schedule, Step, effective, make
from tests.support.depth import sample
from tests.support.pairs import until

# What hangs is known to hang after this; a machine with other work needs some of it.
LIMIT_S = 5.0
# An adapter whose import takes longer at the right end than a step may be silent.
SLOW = """
import sys, threading
from kvwire_certify.targets.toy import Toy as Slow
if "right" in sys.argv:
    threading.Event().wait(7)
"""
# One that makes a folder, and notes its name.
FILES = """
import tempfile
from pathlib import Path
from kvwire_certify.targets.toy import Toy

class Files(Toy):
    async def open(self, memory):
        with Path(__file__).with_name("made").open("a") as made:
            made.write(f"{tempfile.mkdtemp()} ")
        return await super().open(memory)
"""
LEAKS = ("leak-memory", "leak-descriptor", "leak-thread")
PLANTS = Path(__file__).with_name("plants.py")
# What it has to be found as, and seeds of which one finds it.
FOUND = {
    "reads_after_cancel": ("late-read", range(1, 97)),
    "writes_after_cancel": ("late-write", range(1, 97)),
    "writes_after_timeout": ("late-write", range(1, 97)),
    "writes_after_death": ("late-write", range(4, 320, 16)),
    "WritesAfterClose": ("late-write", range(8, 320, 16)),
    "writes_after_withdrawal": ("late-write", range(1, 97)),
    "stale": ("stale", range(1, 97)),
    "torn": ("torn", range(1, 97)),
    "hole": ("hole", range(1, 97)),
    "misplaced": ("misplaced", range(1, 97)),
    "damaged": ("foreign", range(1, 97)),
    "lost": ("lost", range(1, 97)),
    "forgets": ("lost", range(1, 97)),
    "fails": ("failed", range(1, 97)),
    "hangs": ("hang", range(1, 97)),
    "blocks": ("hang", range(1, 97)),
    "crashes": ("crash", range(1, 97)),
    "crashes_there": ("crash", range(1, 97)),
    "polls_while_idle": ("busy-idle", range(12, 13)),
    "keeps_memory": ("leak-memory", range(13, 14)),
    "keeps_descriptors": ("leak-descriptor", range(13, 14)),
    "keeps_threads": ("leak-thread", range(13, 14)),
}


@pytest.mark.parametrize("plant", FOUND)
async def test_a_planted_mistake_is_found(plant: str) -> None:
    rule, seeds = FOUND[plant]
    async with Stage(f"{PLANTS}:{plant}", LIMIT_S) as stage:
        for seed in seeds:
            played = await stage.play(make(seed))
            if played.rule == rule:
                break
    assert played.rule == rule, "no seed has found it"


async def test_a_breach_is_made_small_and_plays_again() -> None:
    found = await certify(f"{PLANTS}:hole", seeds=[9], times=1)
    (breach,) = found.breaches
    assert breach.seeds == (9,)
    assert [step.verb for step in breach.schedule.steps] == ["offer", "get"]
    assert (breach.again, breach.times) == (1, 1)
    assert (await play_again(breach, times=2)).breaches[0].again == 2
    healthy = msgspec.structs.replace(breach, target="toy")
    assert not (await play_again(healthy, times=1)).breaches
    other = msgspec.structs.replace(breach, target=f"{PLANTS}:never_opens")
    (instead,) = (await play_again(other, times=2)).breaches
    assert (instead.rule, instead.again) == ("failed", 2)


@pytest.mark.parametrize(
    ("plant", "rules"), [("slow", []), ("hangs", ["hang"])], ids=["slow", "hangs"]
)
async def test_what_is_only_slow_does_not_hang(plant: str, rules: list[str]) -> None:
    """A tier's close deleted files for longer than the limit on a busy machine."""
    seeds = [7] if plant == "slow" else range(1, 3)
    found = await certify(f"{PLANTS}:{plant}", seeds=seeds, limit_s=1.0, times=1)
    assert [breach.rule for breach in found.breaches] == rules


async def test_a_process_that_does_not_start_in_time_is_no_breach() -> None:
    with pytest.raises(
        BackendUnavailable, match=r"toy: .* not started within 0\.001 s"
    ):
        async with Stage("toy", LIMIT_S, start_s=0.001) as stage:
            await stage.play(make(1))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise OSError('there is no such device')", "there is no such device"),
        ("import os; os.abort()", "not started: SIGABRT"),
        ("import no_such_library", "No module named 'no_such_library'"),
    ],
)
async def test_an_adapter_that_fails_at_import_is_no_breach(
    tmp_path: Path, code: str, text: str
) -> None:
    """Only processes of the run import it: one that crashes ends no other."""
    adapter = tmp_path / "broken.py"
    adapter.write_text(f"{code}\n")
    with pytest.raises(BackendUnavailable, match=text):
        await certify(f"{adapter}:Thing", seeds=[1])


async def test_an_adapter_that_never_opens_is_no_breach() -> None:
    """As a store whose server is not running: there is nothing to test."""
    with pytest.raises(BackendUnavailable, match="open: in the right process: OSError"):
        await certify(f"{PLANTS}:never_opens", seeds=[1])


async def test_what_no_schedule_has_checked() -> None:
    assert (await certify("toy", seeds=[])).unchecked == tuple(RULES)
    found = await certify("toy", seeds=[1], without=["torn"])
    assert found.unchecked == ("torn", "busy-idle", *LEAKS)


@pytest.mark.parametrize(
    ("plant", "seed", "rule", "others"),
    [
        ("offers_nothing", 1, "failed", {"hang", "crash"}),
        # It breaks its promise before the step that measures an idle process.
        ("hole", 12, "hole", {*RULES} - {"late-read", "busy-idle", *LEAKS}),
        ("crashes_there", 7, "crash", {*RULES} - {"late-read", "busy-idle", *LEAKS}),
    ],
)
async def test_what_comes_after_a_breach_is_not_checked(
    plant: str, seed: int, rule: str, others: set[str]
) -> None:
    found = await certify(f"{PLANTS}:{plant}", seeds=[seed], times=0)
    assert [breach.rule for breach in found.breaches] == [rule]
    assert {*RULES} - {*found.unchecked} == {rule, *others}
    assert (found.operations > 0) is ("foreign" in others)


@pytest.mark.parametrize(
    ("replayed", "rule", "seeds"),
    [
        (Played(0, "hang", "the same"), "hang", (1,)),
        (Played(0, "foreign", "something worse"), "foreign", (1, 2)),
    ],
)
async def test_only_confirmed_hangs_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    replayed: Played,
    rule: str,
    seeds: tuple[int, ...],
) -> None:
    """A second hang may be a schedule that was only slow."""

    async def play(stage: Stage, schedule: Schedule, *, patience: float = 1) -> Played:
        return replayed if patience > 1 else Played(0, "hang", "slow")

    monkeypatch.setattr(Stage, "play", play)
    monkeypatch.setattr(runner, "shrink", lambda steps: iter(()))
    (breach,) = (await certify("toy", seeds=[1, 2], times=0)).breaches
    assert (breach.rule, breach.seeds) == (rule, seeds)


async def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    adapter = tmp_path / "files.py"
    adapter.write_text(FILES)
    schedule = msgspec.structs.replace(make(4), steps=(Step("kill"),))
    async with Stage(f"{adapter}:Files", LIMIT_S) as stage:
        await stage.play(schedule)
        made = [Path(name) for name in (tmp_path / "made").read_text().split()]
        assert len(made) == 4
        assert all(folder.is_dir() for folder in made)
    assert not any(folder.exists() for folder in made)


async def test_an_error_names_its_line_in_the_adapter() -> None:
    schedule = msgspec.structs.replace(
        make(4), steps=(Step("offer"), Step("get", way="cancel"), Step("get"))
    )
    async with Stage(f"{PLANTS}:fails", LIMIT_S) as stage:
        text = (await stage.play(schedule)).text
    assert "ConnectionError: broken by a cancel (plants.py, line " in text


def test_steps_that_do_nothing_are_left_out() -> None:
    offer = Step("offer", 1)
    get = Step("get", 1)
    idle = [Step("withdraw", 1), Step("get", 2), Step("put", 1)]
    assert effective([*idle, offer, get, Step("kill")]) == (offer, get, Step("kill"))


@pytest.mark.slow
async def test_a_restart_may_take_as_long_as_a_start(
    tmp_path: Path,
) -> None:
    """The imports of vLLM took longer than a step may be silent."""
    adapter = tmp_path / "slow.py"
    adapter.write_text(SLOW)
    schedule = msgspec.structs.replace(make(4), steps=(Step("kill"),))
    async with Stage(f"{adapter}:Slow", 2.0, blocked_s=0.0) as stage:
        assert (await stage.play(schedule)).text == ""


@pytest.mark.parametrize("theme", range(16))
async def test_no_false_alarm(theme: int) -> None:
    found = await certify("toy", seeds=sample(range(theme, 320, 16), 20))
    assert found.breaches == ()
    assert found.schedules


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
async def test_a_stopped_right_end_ends_with_its_stage() -> None:
    async with Stage("toy", LIMIT_S) as stage:
        await stage.play(make(1))
        (left,) = children(os.getpid(), b"left")
        (right,) = children(left, b"right")
        os.kill(right, signal.SIGSTOP)
    await until(lambda: not runs(right))
    assert not children(os.getpid(), b"left")


def children(parent: int, role: bytes) -> list[int]:
    """Return the processes of certify with a role that a process has started."""
    found = []
    for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
        found += [int(pid) for pid in tasks.read_text().split()]
    wanted = [b"kvwire_certify", role]
    arguments = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
    return [pid for pid in found if arguments[pid].split(b"\0")[2:4] == wanted]


def runs(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False
