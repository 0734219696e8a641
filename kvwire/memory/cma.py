"""Reads another process's memory with cross-memory attach (``process_vm_readv``).

The kernel resolves the remote addresses in the other process's address space, and
checks that this process may trace it. So an address from a peer is safe here, and
nowhere else: a wrong one gives EFAULT, and never touches this process's memory.

https://man7.org/linux/man-pages/man2/process_vm_readv.2.html
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Final

from kvwire.memory.copy import address_of

Window = tuple[int, int]
"""Address and row count of a table of iovecs, as ``Iovecs.window`` returns them."""

# The usual cause of a refusal, by errno.
_REASONS: Final = {
    errno.EPERM: (
        "the kernel does not let us trace the peer: another user, a process that is "
        "not dumpable, kernel.yama.ptrace_scope, or a container without SYS_PTRACE"
    ),
    errno.ESRCH: "no such process here: it has ended, or is in another pid namespace",
    errno.ENOSYS: "the kernel or a seccomp profile has no process_vm_readv",
    errno.EFAULT: "the peer has no such memory",
}


def read(pid: int, local: Window, remote: Window) -> int:
    """Read memory of the process ``pid`` without holding the GIL.

    Args:
        pid: The process's number in this process's pid namespace.
        local: The destination, in this process.
        remote: The source, with addresses of that process.

    Returns:
        The number of bytes read: at least 1, at most the length of the shorter window.

    Raises:
        OSError: The system call failed; EFAULT if not even one byte could be read.
    """
    moved: int = _libc().process_vm_readv(pid, *local, *remote, 0)
    if moved <= 0:
        code = ctypes.get_errno() if moved < 0 else errno.EFAULT
        raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
    return moved


def read_bytes(pid: int, address: int, length: int) -> bytes:
    """Return a few bytes of another process, such as a cookie.

    Raises:
        OSError: Not all bytes can be read.
    """
    buffer = bytearray(length)
    local = (ctypes.c_uint64 * 2)(address_of(buffer), length)
    remote = (ctypes.c_uint64 * 2)(address, length)
    moved = read(pid, (ctypes.addressof(local), 1), (ctypes.addressof(remote), 1))
    if moved != length:
        raise OSError(errno.EFAULT, f"process_vm_readv: read {moved} of {length} bytes")
    return bytes(buffer)


def reason(error: OSError) -> str:
    """Return the errno's name and the usual causes of a refusal."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"{name}: {_REASONS.get(error.errno or 0, error.strerror)}"


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    iovecs = (ctypes.c_void_p, ctypes.c_ulong)
    libc.process_vm_readv.argtypes = (ctypes.c_int, *iovecs, *iovecs, ctypes.c_ulong)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc
