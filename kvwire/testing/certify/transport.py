"""The contract of a transport under test: one end of it, in one process.

An adapter is a subclass of :class:`End` with about a dozen lines. Each end runs in a
separate process, which may be stopped or killed. The *left* end starts operations; they
read and write the memory of the *right* end.
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
"""The targets that come with kvwire (modules of ``kvwire.testing.certify.targets``),
with the command that installs what each needs.
"""


class End:
    """One end of the transport. Subclass it.

    A subclass may leave out :meth:`get` or :meth:`put`. A call that raises has failed.
    An operation that has failed, was cancelled or has returned False must not touch the
    memory any more.

    Attributes:
        variant: The part of a target's name after the colon, as in ``kvwire:tcp``.
        version: The version of the transport, for reports.
    """

    variant: str = ""
    version: str = ""

    async def open(self, memory: memoryview) -> bytes:
        """Start; return the data that the other end needs to connect.

        Args:
            memory: This end's memory. All memory that is offered, read and written is
                part of it.

        Cancel safety: never cancelled.
        """
        raise NotImplementedError

    async def connect(self, peer: bytes) -> None:
        """Connect to the other end, which is open; called on both ends.

        Args:
            peer: The result of the other end's :meth:`open`.

        Cancel safety: never cancelled.
        """

    async def offer(self, data: memoryview) -> bytes:
        """Let the other end read and write some memory; return a reference to it.

        Cancel safety: never cancelled.
        """
        raise NotImplementedError

    async def withdraw(self, reference: bytes) -> None:
        """End a reference; its memory is reused as soon as this returns.

        Cancel safety: never cancelled.
        """
        raise NotImplementedError

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        """Read memory that the other end has offered.

        Args:
            reference: The result of the other end's :meth:`offer`; it may have ended.
            into: The destination, in this end's memory.
            timeout_s: The time after which to raise TimeoutError; None for no limit.

        Returns:
            Whether all bytes have landed.

        Cancel safety: once a cancelled call has ended, nothing writes to ``into``.
        """
        raise NotImplementedError

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        """Write to memory that the other end has offered.

        Args:
            reference: The result of the other end's :meth:`offer`; it may have ended.
            data: The source, in this end's memory.
            timeout_s: The time after which to raise TimeoutError; None for no limit.

        Returns:
            Whether all bytes are in the other end's memory.

        Cancel safety: once a cancelled call has ended, nothing reads ``data``.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close this end completely; running operations fail.

        Cancel safety: never cancelled.
        """

    @classmethod
    def can(cls, verb: str) -> bool:
        """Return whether it has ``get`` or ``put``."""
        return getattr(cls, verb) is not getattr(End, verb)


def load(target: str) -> End:
    """Make one end of a target.

    Args:
        target: One of :data:`TARGETS`, ``module:Class`` or ``file.py:Class``. The part
            after a further colon is its variant.

    Raises:
        UsageError: There is no such target, or it is not an End.
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
