"""Walks through a page as a reader does: types its first commands into a shell.

    python3 tests/programs/walk.py docs/tutorial/first-answer.md

A command that ends with ``# prints: TEXT`` has to print that. A walk needs nothing but
Python, so it runs on a bare Debian; ``asciinema rec --command`` makes a film of it.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Somebody who types forty words a minute.
TYPED_PER_S = 40 * 5 / 60
PATIENCE_S = 600.0
_DONE = "=== walked"
_PRINTS = re.compile(r"\s*# prints: (.+)$")


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page's first block, each with what it has to print."""
    found = re.search(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("the page has no block of commands")
    return [
        (_PRINTS.sub("", line), prints[1] if (prints := _PRINTS.search(line)) else "")
        for line in found[1].splitlines()
    ]


class Shell:
    """A bash, which is given commands one by one, and shows what it prints."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._unread = ""
        self._write("set -m")

    def run(self, command: str, prints: str) -> None:
        """Run a command to its end, and until it has printed what it has to."""
        print(f"$ {command}", flush=True)
        self._write(f"{command}\necho '{_DONE}' $?")
        end = time.monotonic() + PATIENCE_S
        status, seen = "", False
        while not (status and (seen or not prints)):
            for line in self._lines(end):
                if line.startswith(_DONE):
                    status = line.removeprefix(_DONE).strip()
                else:
                    print(line, flush=True)
                    seen = seen or prints in line
            if status not in ("", "0"):
                raise SystemExit(f"{command}: exit status {status}")
            if status and prints and not seen and time.monotonic() > end:
                raise SystemExit(f"{command}: has not printed {prints!r}")

    def close(self) -> None:
        """End it, and what still runs beside it."""
        assert self._process.stdin is not None
        self._write("kill $(jobs -p) 2>/dev/null")
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _lines(self, end: float) -> list[str]:
        """Wait until more was printed; the lines that are whole."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if not ready.select(end - time.monotonic()):
                raise SystemExit(f"nothing was printed for {PATIENCE_S:g} s")
        part = os.read(self._process.stdout.fileno(), 65536)
        if not part:
            raise SystemExit("the shell has ended")
        *lines, self._unread = (self._unread + part.decode(errors="replace")).split(
            "\n"
        )
        return lines


def walk(page: str) -> None:
    """Type the commands of a page into a shell of its own folder."""
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(folder)
        try:
            for command, prints in commands(page):
                shell.run(command, prints)
        finally:
            shell.close()


if __name__ == "__main__":
    walk(Path(sys.argv[1]).read_text())
