"""The binding: layouts against the C headers, and statuses of one byte."""

from __future__ import annotations

import ctypes
from ctypes import Structure

import pytest

from kvwire_ucx import binding
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
from kvwire_ucx.library import load
from tests.backends.kvwire_ucx.support import needs_ucx


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
