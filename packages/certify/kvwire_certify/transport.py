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
import traceback
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard

from kvwire.backend import registry
from kvwire.errors import UsageError, nearest


class Needs(NamedTuple):
    """The packages or the library that a target needs.

    Attributes:
        modules: The packages' names in Python.
        install: The command that installs them.
        backend: The backend of kvwire that looks for the library.
    """

    modules: tuple[str, ...] = ()
    install: str = ""
    backend: str = ""

    def found(self) -> list[str]:
        """Return the name and version of each package, without importing any.

        Raises:
            ModuleNotFoundError: One is not installed; the message is the reason.
        """
        if self.backend:
            found = registry.availability(self.backend)
            if not found.available:
                raise ModuleNotFoundError(found.reason)
            return [found.reason]
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"{module} is not installed", name=module)
        owners = metadata.packages_distributions() if self.modules else {}
        names = chain.from_iterable(owners.get(each, ()) for each in self.modules)
        return [f"{name} {metadata.version(name)}" for name in dict.fromkeys(names)]


TARGETS: Final = {
    "kvwire": Needs(),
    "llamacpp": Needs(
        ("kvwire_engines", "xllamacpp", "gguf"),
        "pip install ./packages/engines in a clone of kvwire, and "
        "pip install xllamacpp gguf",
    ),
    "mooncake": Needs(
        ("mooncake",),
        "pip install mooncake-transfer-engine-non-cuda, and "
        "apt-get install libibverbs1 libnuma1 libcurl4",
    ),
    "nixl": Needs(("nixl_cu12",), "pip install --no-deps nixl-cu12"),
    "toy": Needs(),
    "ucx": Needs(
        install="pip install libucx-cu12, or the UCX of the system", backend="ucx"
    ),
    "ucxx": Needs(("ucxx",), "pip install ucxx-cu12"),
    "vllm": Needs(("vllm", "nixl"), "pip install vllm nixl"),
}
"""The targets that come with kvwire (modules of ``kvwire_certify.targets``),
with the packages that each needs.
"""


class End:
    """One end of the transport. Subclass it.

    A subclass may leave out :meth:`get` or :meth:`put`. A call that raises has failed.
    An operation that has failed, was cancelled or has returned False must not touch the
    memory any more.

    Attributes:
        variant: The part of a target's name after the colon, as in ``kvwire:tcp``.
        version: The version of the transport, for reports.
        peer: The result of the other end's :meth:`open`, from :meth:`connect` on.
    """

    variant: str = ""
    version: str = ""
    peer: bytes = b""

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
        self.peer = peer

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
    ) -> bool | bytes:
        """Read memory that the other end has offered.

        Args:
            reference: The result of the other end's :meth:`offer`; it may have ended.
            into: The destination, in this end's memory.
            timeout_s: The time after which to raise TimeoutError; None for no limit.

        Returns:
            Whether all bytes have landed. A transport that does not read into memory of
            its caller returns the bytes.

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
        cls = importlib.import_module(f"kvwire_certify.targets.{name}").TARGET
        variant = rest
    else:
        wanted, _, variant = rest.partition(":")
        if not wanted and not name.endswith(".py"):
            raise UsageError(
                f"certify: target {target!r} is neither module:Class nor "
                f"file.py:Class; {nearest(name, TARGETS)}"
            )
        there = vars(_imported(name))
        if wanted not in there:
            ends = {each for each, one in there.items() if _is_end(one)}
            lacks = f"{name} has no {wanted}" if wanted else f"{target!r} lacks a class"
            raise UsageError(
                f"certify: {lacks}; {nearest(wanted, sorted(ends - {End.__name__}))}"
            )
        cls = there[wanted]
    if not _is_end(cls):
        raise UsageError(
            f"certify: {target!r} must be a subclass of kvwire_certify.End, not {cls!r}"
        )
    if not (cls.can("get") or cls.can("put")):
        raise UsageError(f"certify: {target} has neither get nor put")
    made = cls()
    made.variant = variant
    return made


def _is_end(found: object) -> TypeGuard[type[End]]:
    return isinstance(found, type) and issubclass(found, End)


def failure_text(error: BaseException, end: End) -> str:
    """Return an error's text, with its line in the adapter's file."""
    text = f"{type(error).__name__}: {error}"
    source = getattr(sys.modules.get(type(end).__module__), "__file__", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == source:
            return f"{text} ({Path(source).name}, line {frame.lineno})"
    return text


@functools.cache
def _imported(name: str) -> object:
    path = Path(name)
    # As Python does for a program: an adapter may have modules of its own beside it.
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    if not name.endswith(".py"):
        return importlib.import_module(name)
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None or not path.is_file():
        raise UsageError(f"certify: file {name} does not exist in {Path.cwd()}")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module
