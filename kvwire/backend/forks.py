"""Descriptors that a forked child must not keep.

A child that is forked has every descriptor of its parent. While it lives, a port of the
parent stays taken, its connections stay open and its locks stay locked, also after the
parent was killed: a restart fails, and peers wait for one that is dead. A program that
is started by ``exec``, as ``subprocess`` and ``forkserver`` do, has none of them.

In the child another file, which does nothing, takes the place of each. The numbers stay
taken, since objects of the child still hold them and will close them.
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
    """Keep the descriptors of an object from children that are forked later.

    Args:
        owner: Such as a socket; it is forgotten when nothing else holds it.
        descriptors: Returns those that it has now, -1 for one that is closed.

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
    with suppress(OSError):  # there is nothing that could be done about it here
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in found:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
