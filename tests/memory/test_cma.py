"""Reading memory by pid: of ourselves, and of those we may not read."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from kvwire.memory import cma
from kvwire.memory.copy import address_of, as_fragments
from kvwire.memory.iovec import Iovecs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="process_vm_readv is a system call of Linux"
)


def test_a_window_is_read_into_another() -> None:
    source = np.arange(10_000, dtype=np.uint8).data
    target = bytearray(10_000)
    remote, local = (
        Iovecs(as_fragments(source)),
        Iovecs(as_fragments(memoryview(target))),
    )
    assert cma.read(os.getpid(), local.window(6000), remote.window(1 << 20)) == 6000
    assert target[:6000] == source[:6000].tobytes()
    assert not any(target[6000:])


def test_a_few_bytes_are_read() -> None:
    secret = b"sixteen bytes..."
    assert cma.read_bytes(os.getpid(), address_of(secret), 16) == secret


def test_what_is_not_mapped_is_refused() -> None:
    with pytest.raises(OSError, match="process_vm_readv") as caught:
        cma.read_bytes(os.getpid(), 8, 16)
    assert caught.value.errno == errno.EFAULT
    assert cma.reason(caught.value) == "EFAULT: the peer has no such memory"


def test_what_is_read_only_in_part_is_refused() -> None:
    """The first page is mapped, and what follows it is not."""
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as mapping:
        page = address_of(mapping) + mmap.PAGESIZE
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert libc.mprotect(page, mmap.PAGESIZE, 0) == 0
        with pytest.raises(OSError, match="8 of 16 bytes"):
            cma.read_bytes(os.getpid(), page - 8, 16)


def test_a_process_that_has_gone_is_named_so() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(OSError, match="process_vm_readv") as caught:
        cma.read_bytes(gone.pid, 4096, 16)
    assert cma.reason(caught.value).startswith("ESRCH: no such process here")


def test_errors_without_a_known_cause_are_named_all_the_same() -> None:
    assert cma.reason(OSError(errno.ENOMEM, "no memory")) == "ENOMEM: no memory"
    assert "ptrace_scope" in cma.reason(OSError(errno.EPERM, "not permitted"))
    assert "seccomp" in cma.reason(OSError(errno.ENOSYS, "no such call"))
