"""Descriptors that a forked child must not keep.

A forked child has every descriptor of its parent. While it lives, the parent's ports
stay taken, its connections open and its locks held, even after the parent was killed: a
restart fails, and peers wait for a dead process. Programs started with ``exec``, as by
``subprocess`` and ``forkserver``, do not inherit these descriptors.

In the child, ``/dev/null`` replaces the file behind each descriptor. The numbers stay
in use, because the child's objects still have them and will close them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")
_kept: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[int]]]] = (
    weakref.WeakKeyDictionary()
)


def _own(owner: Any) -> Iterable[int]:
    return (owner.fileno(),)


def keep_from_children(owner: T, descriptors: Callable[[T], Iterable[int]] = _own) -> T:
    """Withhold an object's descriptors from children that are forked later.

    Args:
        owner: The object, such as a socket; held by a weak reference.
        descriptors: Returns the owner's descriptors at that time, -1 for a closed one.

    Returns:
        The owner.
    """
    _kept[owner] = descriptors
    return owner


def _forked() -> None:
    found = {
        number
        for owner, of in list(_kept.items())
        for number in of(owner)
        if number >= 0
    }
    _kept.clear()
    if not found:
        return
    with suppress(OSError):  # a failure cannot be handled here
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in found:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
