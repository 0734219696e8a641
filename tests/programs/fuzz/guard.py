"""What must not happen while hostile bytes are fed: running code, taking memory."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvwire.limits import KIB

Run = Callable[[bytes], int]

# Goal S2. The events of Python's audit hooks, one for each way to run what was sent.
FORBIDDEN: Final = frozenset(
    {"pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen"}
)
# Goal S7: what a target may take at its peak, for each byte that it was fed, and for
# all that does not depend on the input.
BYTES_PER_BYTE: Final = 4
BYTES_ALWAYS: Final = 64 * KIB
# What a target keeps of its own: the other side, and a record of all that happened. It
# hangs on when garbage is collected.
TARGET_BYTES: Final = 24 * KIB


class Ran(BaseException):
    """Something ran code; not an Exception, so that nothing on the way catches it."""


class _Watch:
    """An audit hook stays for the life of the process, so it can be switched off."""

    def __init__(self) -> None:
        self.on = False
        self.installed = False

    def __call__(self, event: str, _: object) -> None:
        if self.on and event in FORBIDDEN:
            raise Ran(event)


_watch = _Watch()


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Raise :exc:`Ran` if anything in the block runs code from data.

    An import would as well, so whatever is used in the block is imported before.
    """
    if not _watch.installed:
        sys.addaudithook(_watch)
        _watch.installed = True
    _watch.on = True
    try:
        yield
    finally:
        _watch.on = False


def peak_bytes(run: Run, data: bytes) -> tuple[int, int]:
    """The most memory that a run takes at once, and the bytes that it was fed."""
    tracemalloc.start()
    try:
        fed = run(data)
        return tracemalloc.get_traced_memory()[1], fed
    finally:
        tracemalloc.stop()


def allowed_bytes(data: bytes, fed: int) -> int:
    """How much memory such a run may take."""
    return BYTES_PER_BYTE * max(len(data), fed) + BYTES_ALWAYS + TARGET_BYTES
