"""Which UCX is taken, and what is said where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from pathlib import Path
from typing import Any, cast

import pytest

from kvwire.backend import registry
from kvwire.errors import BackendUnavailable
from kvwire.extras import install_command
from kvwire_ucx import UcxBackend, binding, diagnosis
from kvwire_ucx.binding import (
    ERR_BUSY,
    ERR_CANCELED,
    IN_PROGRESS,
    OK,
    EndpointParams,
    MapParams,
    Params,
    RequestParams,
    TagInfo,
    WorkerAttr,
    WorkerParams,
    request_of,
)
from kvwire_ucx.library import (
    ENVIRONMENT,
    VERSION_MIN,
    Machine,
    Ucp,
    UcxLibrary,
    Version,
    copies,
    find,
    load,
    require_new,
)
from tests.backends.kvwire_ucx.support import needs_ucx
from tests.support.runs import python


class Known(Machine):
    """A machine without UCX in this process, with both kinds of it and no devices."""

    def __init__(
        self,
        *,
        loaded: Sequence[str] = (),
        wheel: str | None = "/wheel/libucp.so.0",
        system: str | None = "/system/libucp.so.0",
        devices: tuple[str, ...] = (),
    ) -> None:
        self._loaded, self._wheel, self._system = loaded, wheel, system
        self._devices = devices
        self.looks = 0

    def loaded(self) -> Sequence[str]:
        return self._loaded

    def wheel(self) -> str | None:
        self.looks += 1
        return self._wheel

    def system(self) -> str | None:
        return self._system

    def rdma_devices(self) -> tuple[str, ...]:
        return self._devices


@pytest.mark.parametrize(
    ("there", "wanted", "found"),
    [
        ({}, "", "/wheel/libucp.so.0"),
        ({"wheel": None}, "", "/system/libucp.so.0"),
        ({"wheel": None, "system": None}, "", None),
        ({"devices": ("mlx5_0",)}, "", "/system/libucp.so.0"),
        ({"devices": ("mlx5_0",), "system": None}, "", "/wheel/libucp.so.0"),
        ({"loaded": ["/there"]}, "", "/there"),
        ({"loaded": ["/there"]}, "system", "/system/libucp.so.0"),
        ({"loaded": ["/there"]}, "wheel", "/wheel/libucp.so.0"),
    ],
)
def test_which_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    there: dict[str, Any],
    wanted: str,
    found: str | None,
) -> None:
    """The wheel's; with RDMA the system's; what is loaded or named goes before both."""
    monkeypatch.setenv(ENVIRONMENT, wanted)
    assert find(Known(**there)) == found


def test_the_environment_names_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "libucp.so"
    monkeypatch.setenv(ENVIRONMENT, str(path))
    with pytest.raises(BackendUnavailable, match="there is no such file"):
        find(Known())
    path.touch()
    assert find(Known()) == str(path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (None, "no libucp was found"),
        ("/wheel/libucp.so.0", "/wheel/libucp.so.0 cannot be loaded"),
    ],
)
def test_it_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, path: str | None, reason: str
) -> None:
    """Without one the remedy is said; a handshake asks nothing of the file system."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    machine = Known(wheel=path, system=None)
    first = diagnosis.availability(machine)
    assert not first.available
    assert first.reason.startswith(reason)
    assert first.remedy.startswith(install_command("ucx"))
    assert diagnosis.availability(machine) is first
    with pytest.raises(BackendUnavailable) as caught:
        load(machine)
    assert str(caught.value) == first.reason
    assert machine.looks == 1


def test_what_is_no_library_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("libucs.so.0", "libuct.so.0", "libucp.so.0"):
        (tmp_path / name).write_text("not one")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "libucp.so.0"))
    with pytest.raises(BackendUnavailable, match="cannot be loaded"):
        load(Known())


def test_without_a_library_the_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    machine = Known(wheel=None, system=None, devices=("mlx5_0",))
    library, rdma = diagnosis.findings(machine)
    assert (library.name, library.state) == ("libucp", "missing")
    assert "no UCX to use it" in rdma.text
    assert diagnosis.rank(machine) > registry.load("tcp").rank()


@pytest.mark.parametrize("devices", [(), ("mlx5_0",)])
@pytest.mark.parametrize("plug_in", ["", "ucx/libuct_ib.so.0"])
def test_it_goes_before_tcp_only_with_rdma(
    tmp_path: Path, devices: tuple[str, ...], plug_in: str
) -> None:
    """With a device and the plug-in for it."""
    (tmp_path / "ucx").mkdir()
    (tmp_path / (plug_in or "none")).touch()
    path = str(tmp_path / "libucp.so.0")
    found = UcxLibrary(path=path, version=Version(1, 22, 0), ucp=cast("Ucp", None))
    before = diagnosis.rank_with(found, devices) < registry.load("tcp").rank()
    assert before is bool(devices and plug_in)


@needs_ucx
def test_one_copy_is_loaded_and_described() -> None:
    loaded = load()
    assert loaded.version >= VERSION_MIN
    ours = [path for path in copies() if Path(path).name.startswith("libucp.so")]
    assert [Path(path).resolve() for path in ours] == [Path(loaded.path).resolve()]
    assert loaded.status_text(-25) == "Connection reset by remote peer (-25)"
    assert UcxBackend.availability().reason.startswith(f"UCX {loaded.version}, ")


def test_one_that_is_too_old_is_refused() -> None:
    major, minor = VERSION_MIN
    require_new("a path", Version(major, minor, 0))
    with pytest.raises(BackendUnavailable, match=rf"needs {major}\.{minor} or newer"):
        require_new("a path", Version(major, minor - 1, 9))


@needs_ucx
def test_crash_handlers_stay_who_they_were() -> None:
    """UCX takes SIGSEGV when it is loaded, which is faulthandler's."""
    code = (
        "import faulthandler\n"
        "from pathlib import Path\n"
        "from kvwire_ucx.library import load\n"
        "def caught():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(x for x in lines if x.startswith('SigCgt'))\n"
        "before = caught()\n"
        "load()\n"
        "assert caught() == before, (before, caught())\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


# --- the binding: layouts against the C headers, and statuses of one byte -------------


# What a C compiler says for the ucp.h of 1.22 on a 64-bit machine, and of 1.13 as far
# as that goes.
@pytest.mark.parametrize(
    ("structure", "offsets"),
    [
        (Params, {"mt_workers_shared": 48, "estimated_num_eps": 56, "name": 72}),
        (WorkerParams, {"cpu_mask": 16, "events": 144, "event_fd": 160, "flags": 168}),
        (WorkerAttr, {"address_flags": 12, "address": 16, "address_length": 24}),
        (
            EndpointParams,
            {
                "err_mode": 16,
                "err_callback": 24,
                "err_arg": 32,
                "user_data": 40,
                "flags": 48,
                "sockaddr": 56,
                "name": 80,
            },
        ),
        (
            RequestParams,
            {
                "callback": 16,
                "datatype": 24,
                "user_data": 32,
                "memory_type": 48,
                "recv_info": 56,
                "memh": 64,
            },
        ),
        (MapParams, {"flags": 24, "prot": 28, "memory_type": 32}),
        (TagInfo, {"length": 8}),
    ],
)
def test_fields_lie_where_the_headers_put_them(
    structure: type[Structure], offsets: dict[str, int]
) -> None:
    found = {name: getattr(structure, name).offset for name in offsets}
    assert found == offsets


@pytest.mark.parametrize(
    ("pointer", "expected"),
    [
        (None, (OK, 0)),
        (0x5500_0000_1000, (IN_PROGRESS, 0x5500_0000_1000)),
        (2**64 - 16, (ERR_CANCELED, 0)),
        (2**64 - 100, (-100, 0)),
        (2**64 - 101, (IN_PROGRESS, 2**64 - 101)),
    ],
)
def test_a_status_pointer_is_a_status_or_a_request(
    pointer: int | None, expected: tuple[int, int]
) -> None:
    assert request_of(pointer) == expected


def test_a_status_has_one_byte() -> None:
    functions = {**binding.MOVING, **binding.BRIEF}
    statuses = {
        name for name, (result, *_) in functions.items() if result is ctypes.c_int8
    }
    assert {"ucp_worker_arm", "ucp_init_version", "ucp_ep_create"} <= statuses
    assert ctypes.c_int8(0xF1).value == ERR_BUSY
    seen: list[int] = []
    callback = binding.SendCallback(lambda _request, status, _data: seen.append(status))
    as_c_calls_it = ctypes.cast(
        callback, ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    )
    as_c_calls_it(None, 0x1234_56F0, None)
    assert seen == [ERR_CANCELED]


@needs_ucx
def test_every_function_is_there() -> None:
    ucp = load().ucp
    for name in (*binding.MOVING, *binding.BRIEF):
        assert callable(getattr(ucp, name.removeprefix("ucp_")))
