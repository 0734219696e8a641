"""Lives a round of the model in a directory, until it kills itself.

python -m tests.store.model.child SEED DIRECTORY ROOM

Reads from its input what is in the directory, and writes to its output what has to be
found there afterwards: when the round is over, or at the call that it is killed at.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import msgspec

from tests.store.model.kinds import Block
from tests.store.model.life import Shadow
from tests.store.model.rounds import Round

EVENTS = ("kill", "error", "short", "unreadable", "damage")

_Told = list[list[tuple[int, int]]]


def told(shadow: Shadow) -> bytes:
    sets = (getattr(shadow, field.name) for field in fields(shadow))
    return msgspec.json.encode([sorted(one) for one in sets]) + b"\n"


def heard(line: bytes) -> Shadow:
    sets = msgspec.json.decode(line, type=_Told)
    return Shadow(*({Block(*pair) for pair in one} for one in sets))


def in_process(seed: int, directory: Path, room: str, shadow: Shadow) -> Shadow:
    """Live a round in a process of its own; what has to be found afterwards."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(seed), str(directory), room],
        input=told(shadow),
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return heard(done.stdout.splitlines()[0])


def _die(shadow: Shadow) -> None:
    sys.stdout.buffer.write(told(shadow))
    sys.stdout.buffer.flush()
    # What nothing in this process can delay.
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    seed, directory, room = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    shadow = heard(sys.stdin.buffer.readline())
    this = Round(seed, directory, events=EVENTS, room=room, kill=_die, shadow=shadow)
    asyncio.run(this.run())
    sys.stdout.buffer.write(told(this.life.shadow))


if __name__ == "__main__":
    main()
