"""Finds libucp and loads it, once per process.

It takes the first of these that exists:

1. the library named by the variable ``LIBUCP``: a path of ``libucp.so``, ``system`` or
   ``wheel``;
2. a library that this process has already loaded, through ucxx for example: two copies
   of UCX in one process each patch libc's memory functions, and conflict;
3. on a machine with RDMA devices, the system's library: the ``libucx`` wheels on PyPI
   are built without RDMA, and would silently move the data over TCP;
4. the wheel's library, then the system's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from kvwire.errors import BackendUnavailable
from kvwire.extras import install_command
from kvwire_ucx import binding

ENVIRONMENT: Final = "LIBUCP"
# The first version with all functions and structures of `binding`.
VERSION_MIN: Final = (1, 13)
# Each is loaded before the next, so that the wheel's libraries need no search path.
_SONAMES: Final = ("libucs.so.0", "libuct.so.0", "libucp.so.0")
_INFINIBAND: Final = Path("/sys/class/infiniband")
ACTIVE: Final = "ACTIVE"
_SYSTEM: Final = "system"
_WHEEL: Final = "wheel"


def remedy() -> str:
    """Return the commands that install a libucp."""
    return (
        f"{install_command('ucx')} (shared memory, TCP and CUDA on one host), or for "
        f"RDMA the UCX of the system, such as apt install libucx0"
    )


class Version(NamedTuple):
    """A version of UCX."""

    major: int
    minor: int
    release: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.release}"


@final
class Ucp:
    """libucp's functions without their prefix: ``ucp.worker_progress(handle)``.

    Attributes:
        pointers: The functions' addresses, for loops in C.
    """

    def __init__(self, path: str) -> None:
        self.pointers: dict[str, int | None] = {}
        waiting = ctypes.CDLL(path)
        brief = ctypes.PyDLL(path)
        for library, functions in (
            (waiting, binding.MOVING),
            (brief, binding.BRIEF),
        ):
            for name, (result, *arguments) in functions.items():
                function = getattr(library, name)
                function.restype = result
                function.argtypes = arguments
                short = name.removeprefix("ucp_")
                setattr(self, short, function)
                self.pointers[short] = ctypes.cast(function, ctypes.c_void_p).value

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxLibrary:
    """A loaded libucp."""

    path: str
    version: Version
    ucp: Ucp = field(repr=False)

    @property
    def has_rdma(self) -> bool:
        """Return whether it has the RDMA plug-in, with or without devices."""
        return any(Path(self.path).parent.glob("ucx/libuct_ib*.so*"))

    def status_text(self, status: int) -> str:
        """Return UCX's text for a status."""
        return _status_text(self.path, status)


class Machine:
    """Where this machine and this process have a libucp, and what it could use."""

    def loaded(self) -> Sequence[str]:
        """Return the path of each libucp that this process has loaded."""
        return [path for path in copies() if Path(path).name.startswith("libucp.so")]

    def wheel(self) -> str | None:
        """Return the path of the one in the ``libucx`` wheel, without importing it."""
        try:
            spec = importlib.util.find_spec("libucx")
        except (ImportError, ValueError):
            return None
        for place in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(place, "lib", _SONAMES[-1])
            if path.is_file():
                return str(path)
        return None

    def system(self) -> str | None:
        """Return the path of the one that the dynamic linker would find.

        It searches the usual folders of distributions, because asking the linker would
        load the library, and ``ctypes.util.find_library`` runs a compiler.
        """
        machine = os.uname().machine
        folders = [
            *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
            f"/usr/lib/{machine}-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/usr/local/lib",
            "/usr/local/lib64",
            "/opt/ucx/lib",
        ]
        candidates = (Path(folder, _SONAMES[-1]) for folder in folders if folder)
        return next((str(path) for path in candidates if path.is_file()), None)

    def rdma_devices(self) -> tuple[str, ...]:
        """Return the RDMA devices that the kernel knows, usable by UCX or not."""
        try:
            return tuple(sorted(entry.name for entry in _INFINIBAND.iterdir()))
        except OSError:
            return ()


MACHINE: Final = Machine()


def load(machine: Machine = MACHINE) -> UcxLibrary:
    """Return the UCX of this process.

    The result is cached, even if there is none: after installing UCX, start a new
    process.

    Raises:
        BackendUnavailable: UCX is missing, cannot be loaded, or is too old.
    """
    found = answer(machine)
    if isinstance(found, str):
        raise BackendUnavailable(found)
    return found


@functools.cache
def answer(machine: Machine) -> UcxLibrary | str:
    """Return the library, or the reason for its absence; cached."""
    try:
        return _load(machine)
    except BackendUnavailable as exc:
        return str(exc)


def _load(machine: Machine) -> UcxLibrary:
    path = find(machine)
    if path is None:
        raise BackendUnavailable("no libucp was found")
    try:
        ucs = _load_dependencies(path)
        ucp = Ucp(path)
    except (OSError, AttributeError) as exc:
        raise BackendUnavailable(f"{path} cannot be loaded: {exc}") from exc
    _calm(ucs)
    version = _version(ucp)
    require_new(path, version)
    return UcxLibrary(path=path, version=version, ucp=ucp)


def require_new(path: str, version: Version) -> None:
    """Raise :class:`BackendUnavailable` for a UCX that is too old."""
    if version < VERSION_MIN:
        oldest = ".".join(map(str, VERSION_MIN))
        raise BackendUnavailable(
            f"{path} is UCX {version}, and kvwire needs {oldest} or newer"
        )


def find(machine: Machine = MACHINE) -> str | None:
    """Return the path of the libucp for :func:`load`; None if there is none."""
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted not in ("", _SYSTEM, _WHEEL):
        if not Path(wanted).is_file():
            raise BackendUnavailable(f"{ENVIRONMENT}={wanted}: there is no such file")
        return wanted
    if not wanted and (loaded := machine.loaded()):
        return loaded[0]
    order = {_SYSTEM: machine.system, _WHEEL: machine.wheel}
    if wanted:
        order = {wanted: order[wanted]}
    elif not machine.rdma_devices():
        order = {_WHEEL: machine.wheel, _SYSTEM: machine.system}
    return next((path for look in order.values() if (path := look())), None)


def copies() -> list[str]:
    """Return the paths of all copies of libucp in this process; there should be one.

    Wheels that bundle UCX rename it: ``libucp-0a1b2c3d.so``.
    """
    return _shared_objects("libucp")


def port_state(device: str, devices: Path = _INFINIBAND) -> str:
    """Return the kernel's word for a port such as ``mlx5_0:1``, or "" without one."""
    name, _, port = device.partition(":")
    try:
        text = (devices / name / "ports" / (port or "1") / "state").read_text()
    except OSError:
        # A removed device differs from a machine whose /sys is not shown.
        return "" if not devices.is_dir() else "gone"
    return text.strip().rpartition(" ")[2]  # "4: ACTIVE"


def _shared_objects(prefix: str) -> list[str]:
    """Return the distinct mapped files whose name begins with a prefix."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    found = (path for path in paths if Path(path).name.startswith(prefix))
    return list(dict.fromkeys(found))


def _load_dependencies(path: str) -> ctypes.CDLL:
    """Load the libraries that libucp needs from its folder; return libucs.

    Their symbols stay local. Otherwise a second UCX in the process, such as the one in
    NIXL's wheel, would call ours instead of its own, and fail if they differ. Plug-ins
    that UCX opens later declare their dependencies, and find them by name.
    """
    folder = Path(path).parent
    loaded = []
    for name in _SONAMES:
        beside = folder / name
        target = str(beside) if beside.is_file() else name
        loaded.append(ctypes.CDLL(target, mode=ctypes.RTLD_LOCAL))
    return loaded[0]


def _calm(ucs: ctypes.CDLL) -> None:
    """Turn off UCX's intrusive defaults, unless the user has set them.

    By default it takes over the signals of crashes, which ``faulthandler`` uses, and
    prints errors to standard output although it also returns them as statuses.
    """
    if "UCX_ERROR_SIGNALS" not in os.environ:
        ucs.ucs_debug_disable_signals()
    if "UCX_LOG_LEVEL" not in os.environ:
        ucs.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")


def _version(ucp: Ucp) -> Version:
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucp.get_version(*(ctypes.byref(number) for number in numbers))
    return Version(*(number.value for number in numbers))


@functools.cache
def _status_text(path: str, status: int) -> str:
    folder = Path(path).parent
    beside = folder / _SONAMES[0]
    ucs = ctypes.PyDLL(str(beside) if beside.is_file() else _SONAMES[0])
    describe = ucs.ucs_status_string
    describe.restype = ctypes.c_char_p
    describe.argtypes = (ctypes.c_int8,)
    text: bytes = describe(status)
    return f"{text.decode()} ({status})"
