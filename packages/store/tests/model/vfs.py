"""SQLite's calls to the system, each of which asks a hook first.

SQLite reaches files through a VFS: a table of functions, which may be replaced. This
one is that of the system, but for what writes. It becomes the default of the process.
"""

from __future__ import annotations

import _sqlite3
import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

Tear = Callable[[], object]
Ask = Callable[[Tear | None], object]
"""Called before each call that writes, with what does half of a write."""

_FULL: Final = 13
_IO_ERROR: Final = 10
_ENOSPC: Final = 28

# A name is passed on as the pointer that it is: parameters follow it in memory.
_Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
_Delete = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
_Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Sync = CFUNCTYPE(c_int, c_void_p, c_int)
_Close = CFUNCTYPE(c_int, c_void_p)


# SQLite has no end, and the functions are called until the process has.
_ALIVE: Final[list[Any]] = []


class _Vfs(Structure):
    """The beginning of ``sqlite3_vfs``, as long as it has been since its version 3."""

    _fields_ = [
        ("version", c_int),
        ("file_bytes", c_int),
        ("path_bytes", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", c_void_p),
        ("delete", c_void_p),
        ("others", c_void_p * 14),
    ]


class _Methods(Structure):
    """``sqlite3_io_methods``."""

    _fields_ = [
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("truncate", c_void_p),
        ("sync", c_void_p),
        ("others", c_void_p * 14),
    ]


class AskingVfs:
    """The table; made once in a process."""

    def __init__(self, ask: Ask, synced: Callable[[Path], None]) -> None:
        self._ask = ask
        self._synced = synced
        self._files: dict[int, tuple[Path, _Methods]] = {}
        # What C has pointers to.
        self._kept: list[Any] = []
        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = c_void_p
        usual = _Vfs.from_address(library.sqlite3_vfs_find(None))
        self._open_usual = _Open(usual.open)
        self._delete_usual = _Delete(usual.delete)
        vfs = _Vfs.from_buffer_copy(usual)
        vfs.name, vfs.next = b"asking", None
        vfs.open = self._pointer(_Open(self._open))
        vfs.delete = self._pointer(_Delete(self._delete))
        self._kept.append(vfs)
        library.sqlite3_vfs_register(ctypes.byref(vfs), 1)
        _ALIVE.append(self)

    def _pointer(self, function: Any) -> int | None:
        self._kept.append(function)
        return ctypes.cast(function, c_void_p).value

    # --- the calls --------------------------------------------------------------------

    def _open(self, vfs: int, name: int | None, file: int, how: int, got: Any) -> int:
        code = self._open_usual(vfs, name, file, how, got)
        # A file without a name is a temporary one.
        if code or name is None:
            return int(code)
        usual = _Methods.from_address(c_void_p.from_address(file).value or 0)
        methods = self._methods_like(usual)
        self._files[file] = _path_at(name), usual
        c_void_p.from_address(file).value = ctypes.addressof(methods)
        return 0

    def _methods_like(self, usual: _Methods) -> _Methods:
        """A table that asks, for files of one table; there are a few of these."""
        for kept in self._kept:
            if isinstance(kept, tuple) and kept[0] == ctypes.addressof(usual):
                found: _Methods = kept[1]
                return found
        methods = _Methods.from_buffer_copy(usual)
        methods.close = self._pointer(_Close(self._close))
        methods.write = self._pointer(_Write(self._write))
        methods.truncate = self._pointer(_Truncate(self._truncate))
        methods.sync = self._pointer(_Sync(self._sync))
        self._kept.append((ctypes.addressof(usual), methods))
        return methods

    def _delete(self, vfs: int, name: int, sync: int) -> int:
        failed = self._asked(0x0A)
        return failed or int(self._delete_usual(vfs, name, sync))

    def _close(self, file: int) -> int:
        _, usual = self._files.pop(file)
        c_void_p.from_address(file).value = ctypes.addressof(usual)
        return int(_Close(usual.close)(file))

    def _write(self, file: int, data: int, count: int, offset: int) -> int:
        _, usual = self._files[file]
        write = _Write(usual.write)
        half = max(1, count // 2)
        failed = self._asked(3, lambda: write(file, data, half, offset))
        return failed or int(write(file, data, count, offset))

    def _truncate(self, file: int, nbytes: int) -> int:
        _, usual = self._files[file]
        failed = self._asked(6)
        return failed or int(_Truncate(usual.truncate)(file, nbytes))

    def _sync(self, file: int, how: int) -> int:
        path, usual = self._files[file]
        failed = self._asked(4) or _Sync(usual.sync)(file, how)
        if not failed:
            self._synced(path)
        return int(failed)

    def _asked(self, kind: int, tear: Tear | None = None) -> int:
        try:
            self._ask(tear)
        except OSError as exc:
            return _FULL if exc.errno == _ENOSPC else _IO_ERROR | kind << 8
        return 0


def _path_at(name: int) -> Path:
    return Path(ctypes.string_at(name).decode())
