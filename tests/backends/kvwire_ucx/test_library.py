"""Which UCX is taken, and what is said where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure
from pathlib import Path
from typing import Any

import pytest

from kvwire.errors import BackendUnavailable
from kvwire.extras import install_command
from kvwire_ucx import UcxBackend, binding, diagnosis, library
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
from kvwire_ucx.library import ENVIRONMENT, VERSION_MIN, answer, copies, find, load
from tests.backends.kvwire_ucx.support import needs_ucx
from tests.support.runs import python


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is found out once for the process is, for this test, found out again."""
    for cached in (answer, diagnosis.availability):
        cached.cache_clear()
    yield
    for cached in (answer, diagnosis.availability):
        cached.cache_clear()


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without UCX, on a machine with both kinds of it and no devices."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(library, "_shared_objects", lambda prefix: [])
    monkeypatch.setattr(library, "_wheel", lambda: "/wheel/libucp.so.0")
    monkeypatch.setattr(library, "_system", lambda: "/system/libucp.so.0")
    monkeypatch.setattr(library, "rdma_devices", lambda: ())
    return monkeypatch


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({}, "/wheel/libucp.so.0"),
        ({"_wheel": None}, "/system/libucp.so.0"),
        ({"_wheel": None, "_system": None}, None),
        ({"rdma_devices": ("mlx5_0",)}, "/system/libucp.so.0"),
        ({"rdma_devices": ("mlx5_0",), "_system": None}, "/wheel/libucp.so.0"),
        ({"_shared_objects": ["/there"]}, "/there"),
        ({"_shared_objects": ["/there"], ENVIRONMENT: "system"}, "/system/libucp.so.0"),
        ({"_shared_objects": ["/there"], ENVIRONMENT: "wheel"}, "/wheel/libucp.so.0"),
    ],
)
def test_which_is_taken(
    nothing_loaded: pytest.MonkeyPatch, there: dict[str, Any], found: str | None
) -> None:
    """The wheel's; with RDMA the system's; what is loaded or named goes before both."""
    for name, value in there.items():
        if name == ENVIRONMENT:
            nothing_loaded.setenv(name, value)
        else:
            nothing_loaded.setattr(library, name, lambda *_, value=value: value)
    assert find() == found


def test_the_environment_names_a_path(
    nothing_loaded: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "libucp.so"
    nothing_loaded.setenv(ENVIRONMENT, str(path))
    with pytest.raises(BackendUnavailable, match="there is no such file"):
        find()
    path.touch()
    assert find() == str(path)


@pytest.mark.usefixtures("asked_anew")
def test_without_any_the_remedy_is_said(nothing_loaded: pytest.MonkeyPatch) -> None:
    nothing_loaded.setattr(library, "_wheel", lambda: None)
    nothing_loaded.setattr(library, "_system", lambda: None)
    found = UcxBackend.availability()
    assert not found.available
    assert found.reason == "no libucp was found"
    assert found.remedy.startswith(install_command("ucx"))


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("path", [None, "/wheel/libucp.so.0"])
def test_it_is_looked_for_once(
    nothing_loaded: pytest.MonkeyPatch, path: str | None
) -> None:
    looks: list[str] = []

    def look() -> str | None:
        looks.append("wheel")
        return path

    nothing_loaded.setattr(library, "_wheel", look)
    nothing_loaded.setattr(library, "_system", lambda: None)
    first = UcxBackend.availability()
    assert not first.available
    assert UcxBackend.availability() is first
    with pytest.raises(BackendUnavailable) as caught:
        load()
    assert str(caught.value) == first.reason
    assert looks == ["wheel"]


@needs_ucx
def test_a_handshake_asks_nothing_of_the_file_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = UcxBackend.availability()
    monkeypatch.setattr(diagnosis, "load", None)
    monkeypatch.setattr(diagnosis, "rdma_devices", None)
    assert UcxBackend.availability() is said


@pytest.mark.usefixtures("asked_anew")
def test_what_is_no_library_is_an_error(
    nothing_loaded: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "libucp.so.0"
    path.write_text("not one")
    nothing_loaded.setenv(ENVIRONMENT, str(path))
    nothing_loaded.setattr(library, "_SONAMES", ("libucp.so.0",))
    with pytest.raises(BackendUnavailable, match="cannot be loaded"):
        load()


@needs_ucx
def test_one_copy_is_loaded_and_described() -> None:
    loaded = load()
    assert loaded.version >= VERSION_MIN
    ours = [path for path in copies() if Path(path).name.startswith("libucp.so")]
    assert [Path(path).resolve() for path in ours] == [Path(loaded.path).resolve()]
    assert loaded.status_text(-25) == "Connection reset by remote peer (-25)"
    assert UcxBackend.availability().reason.startswith(f"UCX {loaded.version}, ")


@needs_ucx
@pytest.mark.usefixtures("asked_anew")
def test_one_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION_MIN", (99, 7))
    with pytest.raises(BackendUnavailable, match=r"kvwire needs 99\.7 or newer"):
        load()


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
