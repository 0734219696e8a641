"""The contract of a transport under test: one end of it, in one process.

An adapter is a subclass of :class:`End` with about a dozen lines. Each end is made in a
process of its own, which may be stopped or killed. They are called *left*, which begins
operations, and *right*, whose memory these read and write.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Final

from kvwire.errors import UsageError, nearest

TARGETS: Final = {
    "gloo": "pip install torch",
    "kvwire": "",
    "lmcache": "pip install lmcache",
    "mooncake": "pip install mooncake-transfer-engine-non-cuda",
    "nixl": "pip install --no-deps nixl-cu12",
    "redis": "pip install redis",
    "s3": "pip install obstore",
    "toy": "",
    "ucx": "pip install libucx-cu12",
    "ucxx": "pip install ucxx-cu12",
    "vllm": "pip install vllm nixl",
    "vllm_tier": "pip install vllm",
}
"""Targets that come with kvwire, modules of ``kvwire.testing.certify.targets``, and how
to install what each needs."""


class End:
    """One end of the transport. Subclass it.

    :meth:`get` or :meth:`put` may be left out. What raises has failed, and whatever has
    failed, was cancelled or has returned False must not touch the memory any more.

    Attributes:
        variant: What stands behind the colon of a target, as in ``kvwire:tcp``.
        version: The version of what is certified, for reports.
    """

    variant: str = ""
    version: str = ""

    async def open(self, memory: memoryview) -> bytes:
        """Start; return the data that the other end needs to connect.

        Args:
            memory: This end's memory. What is offered, read and written lies in it.

        Cancel safety: is not cancelled.
        """
        raise NotImplementedError

    async def connect(self, peer: bytes) -> None:
        """Connect to the other end, which is open; both ends are called.

        Args:
            peer: What the other end's :meth:`open` has returned.

        Cancel safety: is not cancelled.
        """

    async def offer(self, data: memoryview) -> bytes:
        """Let the other end read and write some memory; return a reference to it.

        Cancel safety: is not cancelled.
        """
        raise NotImplementedError

    async def withdraw(self, reference: bytes) -> None:
        """End a reference; once this returns, its memory is reused.

        Cancel safety: is not cancelled.
        """
        raise NotImplementedError

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        """Read memory that the other end has offered.

        Args:
            reference: From the other end's :meth:`offer`; it may have ended.
            into: Where it goes, in this end's memory.
            timeout_s: After how long to raise TimeoutError; None for no limit.

        Returns:
            Whether all bytes have landed.

        Cancel safety: when a cancelled call ends, ``into`` is not written any more.
        """
        raise NotImplementedError

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        """Write to memory that the other end has offered.

        Args:
            reference: From the other end's :meth:`offer`; it may have ended.
            data: Memory of this end.
            timeout_s: After how long to raise TimeoutError; None for no limit.

        Returns:
            Whether all bytes are in the other end's memory.

        Cancel safety: when a cancelled call ends, ``data`` is not read any more.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End, and leave nothing behind; running operations fail.

        Cancel safety: is not cancelled.
        """

    @classmethod
    def can(cls, verb: str) -> bool:
        """Return whether it has ``get`` or ``put``."""
        return getattr(cls, verb) is not getattr(End, verb)


def load(target: str) -> End:
    """Make one end of a target.

    Args:
        target: One of :data:`TARGETS`, ``module:Class`` or ``file.py:Class``. What
            stands behind a further colon is its variant.

    Raises:
        UsageError: There is no such target, or it is no End.
        ImportError: The library that it needs is not installed.
    """
    name, _, rest = target.partition(":")
    if name in TARGETS:
        cls = importlib.import_module(f"kvwire.testing.certify.targets.{name}").TARGET
        variant = rest
    else:
        wanted, _, variant = rest.partition(":")
        if not wanted:
            raise UsageError(
                f"certify: target {target!r} is neither module:Class nor "
                f"file.py:Class; {nearest(name, TARGETS)}"
            )
        cls = getattr(_imported(name), wanted, None)
    if not (isinstance(cls, type) and issubclass(cls, End)):
        raise UsageError(
            f"certify: {target!r} must be a subclass of "
            f"kvwire.testing.certify.End, not {cls!r}"
        )
    made = cls()
    made.variant = variant
    return made


@functools.cache
def _imported(name: str) -> object:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name)
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None or not path.is_file():
        raise UsageError(f"certify: file {name} does not exist")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module
