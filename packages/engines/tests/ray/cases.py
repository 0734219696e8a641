"""What is tried of tensors of actors, on a local Ray; a program of its own.

Ray leaves threads and sockets in the process that has called it. Each case that passes
is a line of the output; after each of them no actor holds a tensor. Those under "Ray's"
try what the test of that name, ``test_...``, tries in Ray's own suite of tensor
transports, as far as it is about more than the transport it is written for.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch
from ray._common.test_utils import wait_for_condition
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from tensordict import TensorDict

from packages.engines.tests.ray.actors import (
    NAME,
    AsyncWorker,
    actor,
    doubled,
    gate,
    made,
    raises,
)

until = partial(wait_for_condition, timeout=30)

CASES: dict[str, Callable[[Any, Any], None]] = {}


def case(check: Callable[..., None]) -> Callable[..., None]:
    CASES[check.__name__] = check
    return check


def same(got: Any, want: Any) -> None:
    match want:
        case list() | dict():
            assert len(got) == len(want)
            for key in want if isinstance(want, dict) else range(len(want)):
                same(got[key], want[key])
        case torch.Tensor():
            assert got.dtype == want.dtype
            assert torch.equal(got, want), (got, want)
        case TensorDict():
            same(got.to_dict(), want.to_dict())
        case _:
            assert got == want


# --- kvwire's own ---------------------------------------------------------------------

KINDS = [
    torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    torch.arange(10, dtype=torch.bfloat16),
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.tensor([True, False, True]),
    torch.arange(12).reshape(3, 4).T,
    {"layers": [torch.full((3, i + 1), i) for i in range(50)], "words": "kept"},
]


@case
def tensors_of_all_kinds_arrive(a: Any, b: Any) -> None:
    for kind in KINDS:
        same(ray.get(b.back.remote(a.make.remote(kind))), kind)


@case
def the_driver_puts_and_gets(a: Any, b: Any) -> None:
    tensor = torch.rand(1000)
    ref = ray.put(tensor, _tensor_transport=NAME)
    same(ray.get(b.get.remote([ref])), [tensor])
    same(ray.get(a.make.remote(tensor)), tensor)


@case
def a_stopped_or_dead_owner_is_an_error_and_kills_nobody(_: Any, b: Any) -> None:
    a = actor()
    pid = ray.get(a.pid.remote())
    ref = made(a.make.remote(torch.zeros(64 << 20, dtype=torch.uint8)), b)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert ray.get(b.get_late.remote([ref])) == "not in time"
    finally:
        os.kill(pid, signal.SIGKILL)
    said = raises(RayError, ray.get, b.get.remote([ref]))
    assert "could not be fetched through kvwire" in said, said
    assert ray.get(b.back.remote("alive")) == "alive"


# --- Ray's: what arrives --------------------------------------------------------------

ONE = torch.randn(1)


def dictionary() -> TensorDict:
    return TensorDict({"a": torch.randn(2), "b": torch.randn(2)}, batch_size=[2])


ARRIVES: dict[str, list[Any]] = {
    "p2p": [ONE, torch.randn(500, 500)],
    "p2p_with_cpu_data": [123],
    "mix_cpu_gpu_data": [[ONE, 7]],
    "object_in_plasma": [[ONE, b"1" * 1_000_000]],
    "intra_rdt_tensor_transfer": [ONE, [ONE, 7], [ONE, torch.randn(2), 7]],
    "multiple_tensors": [[ONE, torch.randn(2), 7, dictionary(), dictionary()]],
    "tensordict_transfer": [dictionary()],
    "nested_tensordict": [
        TensorDict({"in": dictionary(), "a": torch.randn(2)}, batch_size=[2])
    ],
    "zmq_numpy_transport_large_tensor": [torch.ones(1_000_000)],
}


def arrives(values: list[Any], a: Any, b: Any) -> None:
    for value in values:
        for sink in (b, a):
            same(ray.get(sink.double.remote(a.make.remote(value))), doubled(value))


CASES |= {name: partial(arrives, values) for name, values in ARRIVES.items()}


@case
def gc_pass_ref_to_same_and_different_actors(a: Any, b: Any) -> None:
    ref = a.make.remote(ONE)
    same(ray.get([one.double.remote(ref) for one in (a, b, b)]), [ONE * 2] * 3)


@case
def transfer_from_not_actor_creator(a: Any, b: Any) -> None:
    same(ray.get(actor().pass_on.remote(a, b)), torch.arange(3) * 2)


@case
def out_of_order_actors(*_: Any) -> None:
    a, b = (actor(AsyncWorker, max_concurrency=10) for _ in range(2))
    refs = [b.back.remote(a.make.remote(torch.full((3,), i))) for i in range(100)]
    same(ray.get(refs), [torch.full((3,), i) for i in range(100)])


@case
def p2p_blocking(_: Any, b: Any) -> None:
    a, here = actor(), gate()
    refs = [a.make.remote(ONE), a.back.options(tensor_transport=NAME).remote(ONE)]
    blocked = a.block.remote(here)
    ray.get(here.entered.remote())
    for ref in refs:
        same(ray.get(b.double.remote(ref), timeout=30), ONE * 2)
    ray.get([here.open.remote(), blocked])


# --- Ray's: put, get and targets ------------------------------------------------------

# What one actor puts and another one gets.
ROWS = list(torch.arange(9).reshape(3, 3))
PUT: dict[str, list[Any]] = {
    "put_and_get_object_with_nixl": [torch.arange(size) for size in (3, 4, 5)],
    "shared_tensor_deduplication": [ROWS[:2], ROWS[1:]],
}


def put(values: list[Any], a: Any, b: Any) -> None:
    same(ray.get(b.get.remote(ray.get(a.put.remote(values)))), values)


CASES |= {name: partial(put, values) for name, values in PUT.items()}


@case
def nixl_get_into_tensor_buffers(a: Any, b: Any) -> None:
    tensors = [torch.arange(3), torch.arange(4)]
    (ref,) = ray.get(a.put.remote([tensors]))
    zeros = [torch.zeros_like(one) for one in tensors]
    got, in_place = ray.get(b.get_into.remote([ref], zeros))
    same(got, tensors)
    assert in_place
    wrong = b.get_into.remote([ref], [torch.zeros(2), torch.zeros(2)])
    assert "tensor_buffer at index 0" in raises(ValueError, ray.get, wrong)


# --- Ray's: what is freed -------------------------------------------------------------


@case
def put_gc(a: Any, _: Any) -> None:
    ray.get(a.put_and_free.remote())


@case
def wait_tensor_freed_views(a: Any, _: Any) -> None:
    ray.get(a.free_views_one_by_one.remote())


@case
def write_after_save(a: Any, b: Any) -> None:
    tensor = torch.randn(1 << 20)
    ref = a.make.remote(tensor)
    changed, got = a.change_when_freed.remote(), b.back.remote(ref)
    raises(GetTimeoutError, ray.get, changed, timeout=1)
    del ref
    same(ray.get([changed, got]), [tensor + 1, tensor])


# --- Ray's: what fails ----------------------------------------------------------------


def works(a: Any, b: Any) -> None:
    same(ray.get(b.double.remote(a.make.remote(ONE))), ONE * 2)


@case
def send_fails(_: Any, b: Any) -> None:
    """What Ray has forgotten is still offered: it comes, and nobody dies."""
    a = actor()
    ref = a.make.remote(ONE)
    ray.get(a.lose.remote())
    same(ray.get(b.double.remote(ref)), ONE * 2)


@case
def send_actor_dies_before_sending(_: Any, b: Any) -> None:
    a, here = actor(), gate()
    ref = a.make.remote(ONE)
    blocked = b.block_transfers.remote(here)
    ray.wait([ref])
    got = b.back.remote(ref)
    ray.kill(a)
    ray.get([here.open.remote(), blocked])
    assert "could not be fetched through kvwire" in raises(RayError, ray.get, got)
    works(actor(), b)


@case
def recv_actor_dies(a: Any, _: Any) -> None:
    b = actor()
    works(a, b)
    ref = a.make.remote(ONE)
    b.block_transfers.remote(gate())
    got = b.back.remote(ref)
    ray.kill(b)
    raises(ActorDiedError, ray.get, got)
    works(a, actor())


# --- all of them ----------------------------------------------------------------------


def empty(worker: Any) -> bool:
    return bool(ray.get(worker.held.remote()) == (0, 0))


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="error")
    first, second = actor(), actor()
    for name, check in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        check(first, second)
        until(lambda: empty(first) and empty(second))
        print(name, flush=True)
    ray.shutdown()
