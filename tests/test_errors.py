"""Errors cross processes, as pools of workers and queues make them."""

from __future__ import annotations

import copy
import errno
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker

import pytest

from kvwire.errors import (
    HandshakeError,
    KVWireError,
    ProtocolError,
    _AtAddress,
    again,
)


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> None:
    """The helper process of multiprocessing stays for as long as this one."""
    resource_tracker.ensure_running()


def _tree(parent: type[KVWireError] = KVWireError) -> Iterator[type[KVWireError]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _tree(child)


# Once each: two of them have two parents.
KINDS = list(dict.fromkeys(_tree()))


def _made(kind: type[KVWireError]) -> KVWireError:
    """Make one with every field that its class has."""
    if issubclass(kind, ProtocolError):
        error: KVWireError = kind("KVW-HD-02", "a bad frame")
    elif issubclass(kind, HandshakeError):
        error = kind("they differ", fields=("model", "trust"))
    elif issubclass(kind, _AtAddress):
        error = kind("refused", address="10.0.0.1:7", errno=errno.ECONNREFUSED)
    else:
        error = kind("why")
    error.add_note("while a test ran")
    return error


def _fields(error: KVWireError) -> tuple[object, ...]:
    number = error.errno if isinstance(error, OSError) else None
    return type(error), str(error), error.args, vars(error), number


def _raised(kind: type[KVWireError]) -> None:
    raise _made(kind)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_copy_has_all_fields(
    kind: type[KVWireError], how: Callable[[KVWireError], KVWireError]
) -> None:
    error = _made(kind)
    found = how(error)
    assert found is not error
    assert _fields(found) == _fields(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_is_raised_again_is_another_one(
    kind: type[KVWireError],
) -> None:
    """The kept one refers to nobody's frames."""
    kept = _made(kind)
    kept.__cause__ = ValueError("why")
    with pytest.raises(kind) as raised:
        raise again(kept)
    assert raised.value is not kept
    assert kept.__traceback__ is None
    assert raised.value.__cause__ is kept.__cause__
    assert (str(raised.value), vars(raised.value)) == (str(kept), vars(kept))


def test_a_pool_of_processes_raises_what_its_worker_raised() -> None:
    spawn = multiprocessing.get_context("spawn")
    shipped = [kind for kind in KINDS if kind.__module__ == KVWireError.__module__]
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for kind in shipped:
            found = pool.submit(_raised, kind).exception()
            assert isinstance(found, KVWireError)
            assert _fields(found) == _fields(_made(kind))
