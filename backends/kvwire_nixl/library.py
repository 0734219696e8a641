"""The installed NIXL, and one agent of it per lane.

The wheels are called ``nixl_cu12`` and ``nixl_cu13``; both move host memory without a
GPU. Only their compiled module is imported, because the Python code above it unpickles
data from peers and opens listeners.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import threading
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire.errors import BackendUnavailable, ConnectionLost, UsageError
from kvwire_nixl.settings import NixlSettings

_WHEELS: Final = ("nixl_cu12", "nixl_cu13")
# The wheel contains copies of these libraries, and UCX's drivers load the system's
# versions after them. Then symbols are resolved to both, and the process crashes at
# exit, in `rtnl_tc_unregister`. If the system's are loaded first, each copy uses its
# own symbols.
_TWICE: Final = ("libnl-3.so.200", "libnl-route-3.so.200")
# NIXL's own thread serves the peer when UCX wakes it. At this interval it also polls,
# in case UCX has lost a wake-up. 0, NIXL's default, would poll without a pause, which
# takes one core per agent.
_WAKEUP_US: Final = 100_000

Rows = npt.NDArray[np.uint64]
# NIXL has aborted the process when two of its agents were closed at the same time.
_ENDING: Final = threading.Lock()


@lru_cache(maxsize=1)
def installed() -> str:
    """Return the name of the installed wheel; "" if there is none."""
    return next((name for name in _WHEELS if importlib.util.find_spec(name)), "")


@lru_cache(maxsize=1)
def version() -> str:
    """Return the version of the installed NIXL.

    Raises:
        BackendUnavailable: It is not installed.
    """
    if not installed():
        raise BackendUnavailable("NIXL is not installed")
    return metadata.version(installed().replace("_", "-"))


@lru_cache(maxsize=1)
def load() -> Any:
    """Import the compiled module of NIXL.

    Raises:
        BackendUnavailable: It is not installed, or cannot be loaded.
    """
    name = installed()
    version()
    try:
        for library in _TWICE:
            with contextlib.suppress(OSError):  # the system does not have this library
                ctypes.CDLL(library)
        bindings = importlib.import_module(f"{name}._bindings")
    except ImportError as exc:
        raise BackendUnavailable(f"{name} cannot be loaded: {exc}") from exc
    for ucs in Path(str(bindings.__file__)).parents[1].glob(f"{name}.libs/libucs-*"):
        _calm(ctypes.CDLL(str(ucs)))
    return bindings


def _calm(ucs: ctypes.CDLL) -> None:
    """Turn off intrusive defaults of the wheel's UCX, unless the user has set them.

    By default UCX installs handlers for the signals of crashes, and prints to standard
    output that a peer is gone, although it also returns this as a status.
    """
    if "UCX_ERROR_SIGNALS" not in os.environ:
        ucs.ucs_debug_disable_signals()
    if "UCX_LOG_LEVEL" not in os.environ:
        ucs.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")


def plugins() -> list[str]:
    """Return the plug-ins that NIXL finds."""
    bindings = load()
    found: list[str] = _bare_agent(bindings).getAvailPlugins()
    return found


def rows(addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> Rows:
    """Return descriptors in NIXL's form: address, length, device."""
    table = np.zeros((addresses.size, 3), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = lengths
    return table


class NixlAgent:
    """A NIXL agent with one plug-in; its methods may be called from any thread.

    Raises:
        BackendUnavailable: The plug-in is missing, or does not start.
        UsageError: The plug-in does not have a parameter.
    """

    def __init__(self, settings: NixlSettings, name: str) -> None:
        self._bindings: Any = load()
        self._peer = ""
        # Guards `_agent`: memory may be freed, and so deregistered, on any thread.
        self._lock: threading.RLock = threading.RLock()
        self._agent: Any = _bare_agent(self._bindings, name)
        found: list[str] = self._agent.getAvailPlugins()
        if settings.plugin not in found:
            raise BackendUnavailable(
                f"NIXL {version()} finds no plug-in {settings.plugin!r} that works "
                f"here; it has {', '.join(sorted(found))}"
            )
        try:
            listed: Mapping[str, str] = self._agent.getPluginParams(settings.plugin)[0]
            settings.require_known(listed)
            params = dict(settings.params)
            self._plugin: list[int] = [
                self._agent.createBackend(settings.plugin, params)
            ]
        except UsageError:
            raise
        except Exception as exc:
            raise BackendUnavailable(
                f"NIXL's plug-in {settings.plugin} does not start: {exc}"
            ) from exc

    # --- memory -----------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        """Register memory with the plug-in."""
        self._checked("registerMem", self._region(address, nbytes), self._plugin)

    def deregister(self, address: int, nbytes: int) -> None:
        """Deregister memory; does nothing once the agent is closed."""
        with self._lock:
            if self._agent is not None:
                region = self._region(address, nbytes)
                self._checked("deregisterMem", region, self._plugin)

    def describe(self, address: int, nbytes: int, *, connection: bool = False) -> bytes:
        """Return the description that lets a peer's agent read this memory."""
        region = self._region(address, nbytes)
        metadata = self._checked("getLocalPartialMD", region, connection, self._plugin)
        return bytes(metadata)

    def learn(self, metadata: bytes, name: str) -> None:
        """Load a description from the peer's agent, which has that name.

        Raises:
            ConnectionLost: It comes from another agent.
        """
        loaded = self._checked("loadRemoteMD", metadata)
        if loaded.decode(errors="replace") != name:
            raise ConnectionLost("nixl: the peer described another agent's memory")
        self._peer = name

    # --- moving -----------------------------------------------------------------------

    def prepare(self, local: Rows, remote: Rows) -> int:
        """Prepare a read of the peer's memory; equal rows of the lists correspond."""
        kind = self._bindings.DRAM_SEG
        make = self._bindings.nixlXferDList
        handle: int = self._checked(
            "createXferReq",
            self._bindings.NIXL_READ,
            make(kind, local),
            make(kind, remote),
            self._peer,
            b"",
            self._plugin,
        )
        return handle

    def post(self, handle: int, note: bytes = b"") -> bool:
        """Start a read, followed by ``note`` to the peer; return whether it is done."""
        state = self._checked("postXferReq", handle, note)
        return bool(state == self._bindings.NIXL_SUCCESS)

    def is_done(self, handle: int) -> bool:
        """Return whether a read has ended and its note was sent."""
        state = self._checked("getXferStatus", handle)
        return bool(state == self._bindings.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Release an ended read."""
        self._checked("releaseXferReq", handle)

    def notes(self) -> list[bytes]:
        """Return the notes received since the last call, from all peers."""
        found: dict[str, list[bytes]] = self._checked("getNotifs", {}, self._plugin)
        return [note for notes in found.values() for note in notes]

    def send_note(self, note: bytes) -> None:
        """Send the peer a note without a read."""
        self._checked("genNotif", self._peer, note, self._plugin)

    def close(self) -> None:
        """Close the agent; then no peer reaches memory through it."""
        with self._lock, _ENDING:
            self._agent = None

    def _checked(self, call: str, *args: object) -> Any:
        # The agent is kept in no local variable: an error's traceback would reference
        # the variable, and keep the agent alive.
        if self._agent is None:
            raise ConnectionLost("nixl: the agent is closed")
        try:
            return getattr(self._agent, call)(*args)
        except Exception as exc:
            raise ConnectionLost(f"nixl: {call}: {exc}") from exc

    def _region(self, address: int, nbytes: int) -> Any:
        table = np.array([[address, nbytes, 0]], np.uint64)
        return self._bindings.nixlRegDList(self._bindings.DRAM_SEG, table)


def _bare_agent(bindings: Any, name: str = "kvwire") -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.useListenThread = False
    config.pthrDelay = _WAKEUP_US
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    return bindings.nixlAgent(name, config)
