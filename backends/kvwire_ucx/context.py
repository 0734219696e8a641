"""A UCX context: the transports and devices that UCX finds with given settings."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

from kvwire.errors import BackendUnavailable
from kvwire_ucx import binding
from kvwire_ucx.binding import OK
from kvwire_ucx.library import ACTIVE, MACHINE, UcxLibrary, load, port_state, remedy
from kvwire_ucx.locked import lock_limit, pinned_bytes, too_little_to_lock
from kvwire_ucx.settings import REQUIRE_RDMA, UcxSettings, parse
from kvwire_ucx.turns import Turns

# "#  resource 1  :  md 1  dev 1  flags -- tcp/eth0", as ucp_context_print_info prints
# it.
_RESOURCE: Final = re.compile(r"resource \d+\s*:.*?(\w+)/(\S+)")
_COMPONENT: Final = re.compile(r"component \d+\s*:\s*(\w+)")
# Transports of libuct_ib and its plug-ins, which belong to the component `ib`.
_RDMA_TRANSPORTS: Final = re.compile(r"(rc|ud|dc|srd)(_|$)|gga|efa")
_RDMA_COMPONENTS: Final = frozenset({"ib", "mlx5", "efa", "gga"})


# Of the process. Each holds queue pairs and their buffers, some MiB.
ABANDONED_MAX: Final = 8
# Held by the workers that UCX cannot free: those whose peers may yet answer, and
# abandoned ones, which call into their contexts for as long as the process runs.
_turns: Final = Turns(ABANDONED_MAX)


@dataclass(frozen=True, slots=True)
class Resource:
    """One transport on one device, such as ``tcp`` on ``eth0``."""

    transport: str
    device: str

    def __str__(self) -> str:
        return f"{self.transport}/{self.device}"

    @property
    def is_rdma(self) -> bool:
        """Return whether a network card moves the bytes."""
        return _RDMA_TRANSPORTS.match(self.transport) is not None


@final
class Context:
    """A UCX context. Its workers have to be closed first.

    Args:
        given: The user's settings.
        keys_end: Whether a key ends with the window or payload that it was made for.

    Raises:
        BackendUnavailable: UCX is missing or refuses a setting, or there is no RDMA
            device and the settings require one.
    """

    def __init__(self, given: Mapping[str, str], *, keys_end: bool = False) -> None:
        self.abandoned: list[object] = []
        self.library = library = load()
        self.settings = settings = parse(given, library.version, keys_end=keys_end)
        self.handle = _init(library, settings)
        text = printed(library.ucp.context_print_info, self.handle)
        self.resources = tuple(
            Resource(*found) for found in dict.fromkeys(_RESOURCE.findall(text))
        )
        self.knows_rdma = bool(_RDMA_COMPONENTS & set(_COMPONENT.findall(text)))
        if settings.require_rdma and not self.rdma:
            self.close()
            raise BackendUnavailable(self._no_rdma())

    def check_open(self) -> None:
        """Check that UCX may open one more worker.

        Raises:
            BackendUnavailable: No RDMA port is up, where UCX may end the process when
                it sends; the process may lock too little memory, where 1.13 tries to
                register its buffers for ever; or too many workers were abandoned.
        """
        devices = [one.device for one in self.rdma]
        why = no_port_up({device: port_state(device) for device in devices})
        if devices and not why:
            why = too_little_to_lock(lock_limit(), pinned_bytes())
        if why:
            raise BackendUnavailable(f"UCX: {why}")
        self._check_turns()

    def _check_turns(self) -> None:
        if _turns.none_left:
            raise BackendUnavailable(
                f"UCX {self.library.version} cannot free {ABANDONED_MAX} lanes that no "
                "peer has answered, so it gets no more; use UCX 1.15 or newer, or "
                "restart the process"
            )

    async def reserve(self, worker: object) -> None:
        """Wait until a worker may ask its peer; at most ABANDONED_MAX do at once.

        So no more than that can be abandoned. Release the worker when it has its
        answer, when UCX has freed it, or to end this wait.

        Raises:
            BackendUnavailable: So many were abandoned.

        Cancel safety: safe, the worker is then released.
        """
        if not await _turns.take(worker):
            self._check_turns()

    def release(self, worker: object) -> None:
        """Let another worker ask its peer."""
        _turns.give_back(worker)

    def keep(self, worker: object) -> None:
        """Keep a worker, and so this context, until the process ends."""
        self.abandoned.append(worker)  # bounded: ABANDONED_MAX
        _turns.keep(worker)

    @property
    def rdma(self) -> tuple[Resource, ...]:
        """Return the resources that use RDMA."""
        return tuple(one for one in self.resources if one.is_rdma)

    def close(self) -> None:
        """Free the context."""
        handle = self.handle
        self.handle = 0
        if handle and not self.abandoned:
            self.library.ucp.cleanup(handle)

    def _no_rdma(self) -> str:
        devices = ", ".join(MACHINE.rdma_devices()) or "none"
        if self.knows_rdma:
            built = "it was built with RDMA"
        else:
            built = f"it was built without RDMA; {remedy()}"
        found = ", ".join(map(str, self.resources))
        return (
            f"{REQUIRE_RDMA}: UCX {self.library.version} ({self.library.path}) finds "
            f"no RDMA device, only {found}; the kernel knows: {devices}; {built}"
        )


def no_port_up(states: Mapping[str, str]) -> str:
    """Return what is wrong if none of the RDMA ports is up; "" is an unknown state."""
    if not states or not {"", ACTIVE}.isdisjoint(states.values()):
        return ""
    found = ", ".join(f"{device} is {state}" for device, state in states.items())
    return f"no RDMA port is up: {found}"


def printed(function: Callable[[int, int], None], handle: int) -> str:
    """Return the text that one of UCX's ``print_info`` functions writes to a file."""
    libc = _libc()
    text = ctypes.c_void_p()
    length = ctypes.c_size_t()
    file = libc.open_memstream(ctypes.byref(text), ctypes.byref(length))
    if not file:
        return ""
    function(handle, file)
    libc.fclose(file)
    try:
        return ctypes.string_at(text, length.value).decode(errors="replace")
    finally:
        libc.free(text)


def _init(library: UcxLibrary, settings: UcxSettings) -> int:
    ucp = library.ucp
    config = ctypes.c_void_p()
    handle = ctypes.c_void_p()
    _check(library, ucp.config_read(None, None, ctypes.byref(config)), "configuration")
    try:
        _modify(library, config, settings.ucx, settings.named)
        params = binding.Params(
            field_mask=binding.PARAM_FEATURES | binding.PARAM_NAME,
            features=binding.FEATURE_TAG | binding.FEATURE_RMA | binding.FEATURE_WAKEUP,
            name=b"kvwire",
        )
        status = ucp.init_version(
            binding.API_MAJOR,
            binding.API_MINOR,
            ctypes.byref(params),
            config,
            ctypes.byref(handle),
        )
        _check(library, status, "no context")
    finally:
        ucp.config_release(config)
    return handle.value or 0


def _modify(
    library: UcxLibrary,
    config: ctypes.c_void_p,
    values: Mapping[str, str],
    named: frozenset[str],
) -> None:
    for name, value in values.items():
        status = library.ucp.config_modify(config, name.encode(), value.encode())
        # Older versions do not know every setting of our defaults.
        if status != OK and name in named:
            raise BackendUnavailable(
                f"UCX {library.version} does not take the setting {name} = {value!r}: "
                f"{library.status_text(status)}"
            )


def _check(library: UcxLibrary, status: int, what: str) -> None:
    if status != OK:
        raise BackendUnavailable(
            f"UCX {library.version}: {what}: {library.status_text(status)}"
        )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    libc.fclose.argtypes = (ctypes.c_void_p,)
    libc.free.argtypes = (ctypes.c_void_p,)
    return libc
