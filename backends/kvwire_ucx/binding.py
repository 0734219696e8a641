"""The Python binding of libucp: only the structures and functions that kvwire needs.

The layouts are those of UCX 1.13, to which later versions only append: every structure
begins with a mask of the fields its caller has set, so an older library never reads
fields it does not know. https://openucx.readthedocs.io documents each function.

Two details are easily missed. ``ucs_status_t`` is a packed enum of *one byte*: read as
an int, -15 (busy) is 241, which looks like success. And a call that returns a "status
pointer" returns NULL (done at once), a status in the last 100 addresses (failed), or a
request; see :func:`request_of`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import ClassVar, Final

# The version of the API for which these declarations were written. A newer library
# accepts callers of older versions with the same major number.
API_MAJOR: Final = 1
API_MINOR: Final = 13

OK: Final = 0
IN_PROGRESS: Final = 1
ERR_BUSY: Final = -15
ERR_CANCELED: Final = -16
ERR_MESSAGE_TRUNCATED: Final = -9
# Addresses from here on are statuses: UCS_ERR_LAST is -100.
_STATUS_POINTERS: Final = 2**64 - 100

FEATURE_TAG: Final = 1 << 0
FEATURE_RMA: Final = 1 << 1
FEATURE_WAKEUP: Final = 1 << 4

PARAM_FEATURES: Final = 1 << 0
PARAM_NAME: Final = 1 << 8

WORKER_THREAD_MODE: Final = 1 << 0
WORKER_FLAGS: Final = 1 << 5
WORKER_IGNORE_REQUEST_LEAK: Final = 1 << 0
THREAD_MODE_SINGLE: Final = 0

WORKER_ATTR_ADDRESS: Final = 1 << 1

EP_REMOTE_ADDRESS: Final = 1 << 0
EP_ERR_MODE: Final = 1 << 1
EP_ERR_HANDLER: Final = 1 << 2
ERR_MODE_PEER: Final = 1

OP_CALLBACK: Final = 1 << 1
OP_USER_DATA: Final = 1 << 2
OP_DATATYPE: Final = 1 << 3
OP_FLAGS: Final = 1 << 4
OP_MEMORY_TYPE: Final = 1 << 6
# Completions come through the callback, never as the call's result.
OP_NO_IMMEDIATE: Final = 1 << 16
CLOSE_FORCE: Final = 1 << 0
# The fields set for registered memory: its address, its length, and its protection.
MAP_ADDRESS: Final = 1 << 0
MAP_LENGTH: Final = 1 << 1
MAP_PROTECTION: Final = 1 << 3
PROTECTION_LOCAL_READ: Final = 1 << 0
PROTECTION_REMOTE_READ: Final = 1 << 8
MEMORY_HOST: Final = 0
MEMORY_CUDA: Final = 1
# ucp_dt_make_contig(1) and ucp_dt_make_iov().
DATATYPE_BYTES: Final = 1 << 3
DATATYPE_IOV: Final = 2


def request_of(pointer: int | None) -> tuple[int, int]:
    """Split a status pointer into (status, request); the request may be 0."""
    if pointer is None:
        return OK, 0
    if pointer >= _STATUS_POINTERS:
        return pointer - 2**64, 0
    return IN_PROGRESS, pointer


class Params(Structure):
    """The C struct ``ucp_params_t``."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
    ]


class WorkerParams(Structure):
    """The C struct ``ucp_worker_params_t``."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
    ]


class WorkerAttr(Structure):
    """The C struct ``ucp_worker_attr_t``."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("address_flags", c_uint32),
        ("address", c_void_p),
        ("address_length", c_size_t),
        ("max_am_header", c_size_t),
        ("name", ctypes.c_char * 32),
        ("max_debug_string", c_size_t),
    ]


class SockAddr(Structure):
    """The C struct ``ucs_sock_addr_t``."""

    _fields_: ClassVar = [("address", c_void_p), ("length", c_uint32)]


class EndpointParams(Structure):
    """The C struct ``ucp_ep_params_t``."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_callback", c_void_p),
        ("err_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", SockAddr),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", SockAddr),
    ]


class RequestParams(Structure):
    """The C struct ``ucp_request_param_t``, which UCX reads only during a call."""

    _fields_: ClassVar = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]


class MapParams(Structure):
    """The C struct ``ucp_mem_map_params_t``."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    ]


class TagInfo(Structure):
    """The C struct ``ucp_tag_recv_info_t``: a received message's tag and length."""

    _fields_: ClassVar = [("sender_tag", c_uint64), ("length", c_size_t)]


# (request, status, user data), for sends, puts, gets, flushes and closes.
SendCallback = CFUNCTYPE(None, c_void_p, c_int8, c_void_p)
# (request, status, tag info, user data), for receives.
ReceiveCallback = CFUNCTYPE(None, c_void_p, c_int8, POINTER(TagInfo), c_void_p)
# (user data, endpoint, status), for endpoints.
ErrorCallback = CFUNCTYPE(None, c_void_p, c_void_p, c_int8)

# Posts an operation with the given parameters; returns UCX's status pointer.
Post = Callable[[object], "int | None"]

_HANDLE = c_void_p
_OUT = POINTER(c_void_p)
_PARAMS = POINTER(RequestParams)

# name: (result, *arguments). These may move payload, so they run without the GIL.
MOVING: Final = {
    "ucp_worker_progress": (c_uint, _HANDLE),
    "ucp_tag_send_nbx": (
        c_void_p,
        _HANDLE,
        c_void_p,
        c_size_t,
        c_uint64,
        _PARAMS,
    ),
    "ucp_tag_send_sync_nbx": (
        c_void_p,
        _HANDLE,
        c_void_p,
        c_size_t,
        c_uint64,
        _PARAMS,
    ),
    "ucp_tag_recv_nbx": (
        c_void_p,
        _HANDLE,
        c_void_p,
        c_size_t,
        c_uint64,
        c_uint64,
        _PARAMS,
    ),
    "ucp_mem_map": (c_int8, _HANDLE, POINTER(MapParams), _OUT),
    "ucp_mem_unmap": (c_int8, _HANDLE, _HANDLE),
    "ucp_init_version": (
        c_int8,
        c_uint,
        c_uint,
        POINTER(Params),
        c_void_p,
        _OUT,
    ),
    "ucp_cleanup": (None, _HANDLE),
    "ucp_worker_create": (c_int8, _HANDLE, POINTER(WorkerParams), _OUT),
    "ucp_worker_destroy": (None, _HANDLE),
    "ucp_ep_create": (c_int8, _HANDLE, POINTER(EndpointParams), _OUT),
    "ucp_ep_close_nbx": (c_void_p, _HANDLE, _PARAMS),
    "ucp_ep_flush_nbx": (c_void_p, _HANDLE, _PARAMS),
}
# These return at once; releasing the GIL would take longer than the call itself.
BRIEF: Final = {
    "ucp_get_nbx": (
        c_void_p,
        _HANDLE,
        c_void_p,
        c_size_t,
        c_uint64,
        _HANDLE,
        _PARAMS,
    ),
    "ucp_put_nbx": (
        c_void_p,
        _HANDLE,
        c_void_p,
        c_size_t,
        c_uint64,
        _HANDLE,
        _PARAMS,
    ),
    "ucp_get_version": (None, *(POINTER(c_uint),) * 3),
    "ucp_config_read": (c_int8, c_char_p, c_char_p, _OUT),
    "ucp_config_modify": (c_int8, _HANDLE, c_char_p, c_char_p),
    "ucp_config_release": (None, _HANDLE),
    "ucp_context_print_info": (None, _HANDLE, c_void_p),
    "ucp_worker_query": (c_int8, _HANDLE, POINTER(WorkerAttr)),
    "ucp_worker_release_address": (None, _HANDLE, c_void_p),
    "ucp_worker_get_efd": (c_int8, _HANDLE, POINTER(c_int)),
    "ucp_worker_arm": (c_int8, _HANDLE),
    "ucp_ep_print_info": (None, _HANDLE, c_void_p),
    "ucp_request_cancel": (None, _HANDLE, c_void_p),
    "ucp_request_check_status": (c_int8, c_void_p),
    "ucp_request_free": (None, c_void_p),
    "ucp_rkey_pack": (c_int8, _HANDLE, _HANDLE, _OUT, POINTER(c_size_t)),
    "ucp_rkey_buffer_release": (None, c_void_p),
    "ucp_ep_rkey_unpack": (c_int8, _HANDLE, c_char_p, _OUT),
    "ucp_rkey_destroy": (None, _HANDLE),
}
