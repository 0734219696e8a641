"""Queries to running processes: open connections and transfers, and recent events.

A process answers if its configuration sets ``inspect``, and only to the same user; see
:mod:`kvwire.endpoint.inspector`, which answers.
"""

from __future__ import annotations

import socket
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from kvwire import Config, KVWireError, Snapshot, UsageError
from kvwire.errors import shown
from kvwire.spi import DECODE_ERRORS

# The largest answer to an inspector: several times a large snapshot or trace.
INSPECT_ANSWER_BYTES_MAX: Final = 64 << 20

# A busy loop answers late, a blocked one never.
_PATIENCE_S: Final = 5.0
_AT_ONCE: Final = 16
T = TypeVar("T")


class ProcessTrace(msgspec.Struct, frozen=True):
    """The last events of one process."""

    name: str
    pid: int
    events: tuple[tuple[int, str, str, tuple[str | int, ...]], ...]


_SNAPSHOT: Final = msgspec.json.Decoder(Snapshot)
_TRACE: Final = msgspec.json.Decoder(ProcessTrace)


def sockets(folder: Path | None) -> list[Path]:
    """Return the sockets in a folder, by default the configured one.

    Raises:
        UsageError: There is no such folder.
    """
    if folder is None:
        found = Config.load().inspect
        if not found:
            raise UsageError(
                "name the folder, or set KVWIRE_INSPECT to it, both here and for the "
                "processes that you want to inspect"
            )
        folder = Path(found)
    if folder.is_socket():
        return [folder]
    try:
        entries = sorted(folder.iterdir())
    except OSError as exc:
        raise UsageError(f"{folder}: {exc.strerror}") from None
    return [one for one in entries if _is_socket(one)]


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False  # its process has ended meanwhile


def snapshots(
    paths: list[Path], patience_s: float = _PATIENCE_S
) -> tuple[list[Snapshot], list[str]]:
    """Request a snapshot from each process; return the answers, and the failures."""
    return _ask_all(paths, "snapshot", _SNAPSHOT, patience_s)


def traces(paths: list[Path]) -> tuple[list[ProcessTrace], list[str]]:
    """Request each process's last events; return the answers, and the failures."""
    return _ask_all(paths, "trace", _TRACE)


def _ask_all(
    paths: list[Path],
    what: Literal["snapshot", "trace"],
    decoder: msgspec.json.Decoder[T],
    patience_s: float = _PATIENCE_S,
) -> tuple[list[T], list[str]]:
    answers = []
    silent = []
    # In parallel, so that several unresponsive processes cost no more time than one.
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for found in threads.map(
            lambda path: _answer(path, what, decoder, patience_s), paths
        ):
            if isinstance(found, str):
                silent.append(found)
            elif found is not None:
                answers.append(found)
    return answers, silent


def _answer(
    path: Path, what: str, decoder: msgspec.json.Decoder[T], patience_s: float
) -> T | str | None:
    """Return a process's answer, or the reason for none; None if it was killed."""
    try:
        return _ask(path, what, decoder, patience_s)
    except ConnectionRefusedError:
        return None
    except (OSError, KVWireError, *DECODE_ERRORS) as exc:
        return f"{path.name}: {str(exc) or type(exc).__name__}"


def _ask(
    path: Path, what: str, decoder: msgspec.json.Decoder[T], patience_s: float
) -> T:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(patience_s)
        client.connect(str(path))
        try:
            client.sendall(what.encode() + b"\n")
            with client.makefile("rb") as reader:
                answer = reader.readline(INSPECT_ANSWER_BYTES_MAX)
        except TimeoutError:
            raise KVWireError(_why_silent(_pid_of_peer(client), patience_s)) from None
    if not answer.endswith(b"\n"):
        raise KVWireError("the process did not answer completely")
    return decoder.decode(answer)


def _pid_of_peer(client: socket.socket) -> int:
    """Return the process at the other end; 0 if it is unknown."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    credentials = struct.Struct("3i")  # pid, uid, gid
    found = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid: int = credentials.unpack(found)[0]
    return pid


def _why_silent(pid: int, patience_s: float) -> str:
    late = f"no answer within {patience_s:g} s"
    process = Path("/proc", str(pid))
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").strip()
        # The state follows the name, which may itself contain spaces and parentheses.
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return late
    named = f"pid {pid}, {shown(command.decode(errors='replace'))}"
    if state in "tT":
        return f"{named}, is stopped; `kill -CONT {pid}` resumes it"
    return f"{named}: {late}; its event loop is busy or blocked"
