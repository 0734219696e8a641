"""Walks through a page as a reader does: types its first commands into a shell.

    python3 tests/programs/walk.py docs/tutorial/first-answer.md > build/answer.cast
    python -m tests.programs.walk build/answer.cast --picture build/answer.svg

A command that ends with ``# prints: TEXT`` has to print that. The output is a film of
the terminal (asciicast, version 2); a summary goes to the standard error. A walk needs
nothing but Python, so it runs on a bare Debian; a picture of a film's end needs rich.
"""

from __future__ import annotations

import argparse
import json
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
WIDTH = 110
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


class Film:
    """What a terminal shows, and when."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str]] = []
        self._start = time.monotonic()

    def show(self, text: str) -> None:
        """Add text."""
        seen = round(time.monotonic() - self._start, 3)
        self.events.append((seen, text.replace("\n", "\r\n")))

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for _, text in self.events).replace("\r\n", "\n")

    def cast(self) -> str:
        """The lines of a file of asciinema."""
        head = {"version": 2, "width": WIDTH, "height": 40, "idle_time_limit": 2}
        rows = [head, *([at, "o", text] for at, text in self.events)]
        return "".join(f"{json.dumps(row)}\n" for row in rows)


class Shell:
    """A bash, which is given commands one by one."""

    def __init__(self, folder: str, film: Film) -> None:
        self._film = film
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
        self._film.show(f"$ {command}\n")
        self._write(f"{command}\necho '{_DONE}' $?")
        before = len(self._film.text)
        end = time.monotonic() + PATIENCE_S
        status = ""
        while not status or prints not in self._film.text[before:]:
            status = self._read(end) or status
            if status not in ("", "0"):
                raise SystemExit(f"{command}: exit status {status}")
            if status and prints and time.monotonic() > end:
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

    def _read(self, end: float) -> str:
        """Show what has been printed; the status of a command that has ended."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if not ready.select(end - time.monotonic()):
                raise SystemExit(f"nothing was printed for {PATIENCE_S:g} s")
        part = os.read(self._process.stdout.fileno(), 65536)
        if not part:
            raise SystemExit("the shell has ended")
        self._unread += part.decode(errors="replace")
        *lines, self._unread = self._unread.split("\n")
        status = ""
        for line in lines:
            if line.startswith(_DONE):
                status = line.removeprefix(_DONE).strip()
            else:
                self._film.show(f"{line}\n")
        return status


def walk(page: str) -> Film:
    """Type the commands of a page into a shell of its own folder."""
    film = Film()
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(folder, film)
        try:
            for command, prints in commands(page):
                shell.run(command, prints)
        finally:
            shell.close()
    return film


def picture(cast: str, svg: Path, lines: int = 40) -> None:
    """Draw what the terminal shows at the end of a film."""
    from rich.console import Console
    from rich.text import Text

    _, *events = map(json.loads, cast.splitlines())
    shown = "".join(text for _, _, text in events).replace("\r\n", "\n").splitlines()
    with Path(os.devnull).open("w") as nothing:
        console = Console(record=True, width=WIDTH, file=nothing)
        console.print(Text("\n".join(shown[-lines:])))
    drawn = console.export_svg(title="a bare Debian")
    # Nothing is fetched when a page is read: the reader's own font.
    svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


def main() -> None:
    """Walk through a page, or draw the end of a film."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("page", type=Path, help="a page, or a film")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    options = parser.parse_args()
    text = options.page.read_text()
    if options.picture:
        picture(text, options.picture)
        return
    film = walk(text)
    typed = sum(len(command) + 1 for command, _ in commands(text))
    print(
        f"{typed} characters, {typed / TYPED_PER_S:.0f} s of typing, "
        f"and {film.events[-1][0]:.0f} s of waiting",
        file=sys.stderr,
    )
    sys.stdout.write(film.cast())


if __name__ == "__main__":
    main()
