"""NIXL as installed, and an agent of it that one lane has for itself.

The wheels are called ``nixl_cu12`` and ``nixl_cu13``; both move host memory without a
GPU. Only the compiled module of them is imported: what is above it in Python unpickles
what peers send, and opens listeners.
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
# The wheel has copies of these, and UCX's drivers load the system's after them, whose
# names then mean both: the process crashes when it exits, in `rtnl_tc_unregister`. Each
# keeps to its own where the system's are there first.
_TWICE: Final = ("libnl-3.so.200", "libnl-route-3.so.200")
# NIXL's own thread serves the peer when UCX wakes it; at this pace it looks by itself
# as well, for wake-ups that UCX may lose. 0, the default of NIXL, would be to poll
# without a pause: one core for each agent.
_WAKEUP_US: Final = 100_000

Rows = npt.NDArray[np.uint64]
# NIXL has ended the process where two agents of it ended at once.
_ENDING: Final = threading.Lock()


@lru_cache(maxsize=1)
def installed() -> str:
    """Return the name of the wheel that is installed; "" if there is none."""
    return next((name for name in _WHEELS if importlib.util.find_spec(name)), "")


@lru_cache(maxsize=1)
def version() -> str:
    """Return the version of NIXL that is installed."""
    if not installed():
        raise BackendUnavailable("NIXL is not installed")
    return metadata.version(installed().replace("_", "-"))


@lru_cache(maxsize=1)
def load() -> Any:
    """Import the compiled module of NIXL."""
    name = installed()
    version()
    try:
        for library in _TWICE:
            with contextlib.suppress(OSError):  # the system has none
                ctypes.CDLL(library)
        bindings = importlib.import_module(f"{name}._bindings")
    except ImportError as exc:
        raise BackendUnavailable(f"{name} cannot be loaded: {exc}") from exc
    for ucs in Path(str(bindings.__file__)).parents[1].glob(f"{name}.libs/libucs-*"):
        _calm(ctypes.CDLL(str(ucs)))
    return bindings


def _calm(ucs: ctypes.CDLL) -> None:
    """Keep the UCX of the wheel from what a library must not do, unless the user asks.

    It takes over the signals of crashes, and prints on standard output that a peer has
    gone, which it also returns as a status.
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
    """Return descriptors as NIXL takes them: address, length, device."""
    table = np.zeros((addresses.size, 3), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = lengths
    return table


class NixlAgent:
    """Wraps an agent with one plug-in; its calls may come from any thread."""

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
                f"here; there are {', '.join(sorted(found))}"
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
                f"NIXL's plug-in {settings.plugin} does not come up: {exc}"
            ) from exc

    # --- memory -----------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the plug-in."""
        self._checked("registerMem", self._region(address, nbytes), self._plugin)

    def deregister(self, address: int, nbytes: int) -> None:
        """Take memory back; nothing happens once the agent is closed."""
        with self._lock:
            if self._agent is not None:
                region = self._region(address, nbytes)
                self._checked("deregisterMem", region, self._plugin)

    def describe(self, address: int, nbytes: int, *, connection: bool = False) -> bytes:
        """Return what a peer's agent must know to read this memory."""
        region = self._region(address, nbytes)
        said = self._checked("getLocalPartialMD", region, connection, self._plugin)
        return bytes(said)

    def learn(self, said: bytes, name: str) -> None:
        """Take in what the peer's agent of that name has described."""
        heard = self._checked("loadRemoteMD", said)
        if heard.decode(errors="replace") != name:
            raise ConnectionLost("nixl: the peer describes memory of another agent")
        self._peer = name

    # --- moving -----------------------------------------------------------------------

    def prepare(self, local: Rows, remote: Rows) -> int:
        """Prepare to read the peer's memory into our own; both lists pair up."""
        kind, make = self._bindings.DRAM_SEG, self._bindings.nixlXferDList
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
        """Begin to read, then tell the peer ``note``; return whether that was all."""
        state = self._checked("postXferReq", handle, note)
        return bool(state == self._bindings.NIXL_SUCCESS)

    def is_done(self, handle: int) -> bool:
        """Return whether a read is over, and its note sent."""
        state = self._checked("getXferStatus", handle)
        return bool(state == self._bindings.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Forget a read that is over."""
        self._checked("releaseXferReq", handle)

    def notes(self) -> list[bytes]:
        """Return what has come with reads since the last call, whoever sent it."""
        heard: dict[str, list[bytes]] = self._checked("getNotifs", {}, self._plugin)
        return [note for notes in heard.values() for note in notes]

    def tell(self, note: bytes) -> None:
        """Send the peer a note by itself."""
        self._checked("genNotif", self._peer, note, self._plugin)

    def close(self) -> None:
        """End the agent: from here on nobody reaches memory by it."""
        with self._lock, _ENDING:
            self._agent = None

    def _checked(self, call: str, *args: object) -> Any:
        # No variable holds the agent: the error's traceback would, and so keep it open.
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
