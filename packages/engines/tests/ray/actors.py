"""Actors for cases.py: they make, take and lose tensors."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError
from ray.experimental.rdt.util import get_tensor_transport_manager

from kvwire_engines.ray import register

register()  # before a method is said to use it
register()  # again

NAME = "KVWIRE"
through_kvwire = ray.method(tensor_transport=NAME)
on_system_thread = ray.method(concurrency_group="_ray_system")


def store() -> Any:
    """Ray's own, of this process."""
    return ray._private.worker.global_worker.rdt_manager


def doubled(what: Any) -> Any:
    match what:
        case list():
            return [doubled(one) for one in what]
        case dict():
            return {key: doubled(one) for key, one in what.items()}
    return what * 2


class Worker:
    """Has tensors that Ray keeps where they are, and takes those of others."""

    def __init__(self) -> None:
        self.made: Any = None

    @through_kvwire  # type: ignore[untyped-decorator]
    def make(self, what: Any) -> Any:
        self.made = what
        return what

    def back(self, what: Any) -> Any:
        return what

    def take(self, what: Any) -> None:
        pass

    def double(self, what: Any) -> Any:
        return doubled(what)

    def put(self, each: list[Any]) -> list[Any]:
        register()
        return [ray.put(one, _tensor_transport=NAME) for one in each]

    def get(self, refs: list[Any]) -> list[Any]:
        return [ray.get(one) for one in refs]

    def get_into(self, refs: list[Any], targets: list[Any]) -> Any:
        ray.experimental.set_target_for_ref(refs[0], targets)
        got = ray.get(refs[0])
        return got, all(one is two for one, two in zip(got, targets, strict=True))

    def get_late(self, refs: list[Any]) -> str:
        try:
            ray.get(refs[0], timeout=1.0)
        except GetTimeoutError:
            return "not in time"
        return "there"

    def pass_on(self, source: Any, sink: Any) -> Any:
        register()
        return ray.get(sink.double.remote(source.make.remote(torch.arange(3))))

    def change_when_freed(self) -> Any:
        ray.experimental.wait_tensor_freed(self.made, 30)
        self.made += 1
        return self.made

    def free_views_one_by_one(self) -> None:
        views = [torch.arange(5)[start : start + 3] for start in range(3)]
        refs = [ray.put(one, _tensor_transport=NAME) for one in views]
        for place, view in enumerate(views):
            for other in views[place:]:
                raises(
                    TimeoutError, ray.experimental.wait_tensor_freed, other, timeout=0.1
                )
            refs[place] = None
            ray.experimental.wait_tensor_freed(view, timeout=10)

    def put_and_free(self) -> None:
        made = torch.arange(3)
        ref = ray.put(made, _tensor_transport=NAME)
        name = ref.hex()
        assert store().rdt_store.has_tensor(made)
        assert store().is_managed_object(name)
        del ref
        ray.experimental.wait_tensor_freed(made, timeout=10)
        assert not store().is_managed_object(name)

    def block(self, gate: Any) -> None:
        ray.get(gate.enter.remote())

    @on_system_thread  # type: ignore[untyped-decorator]
    def block_transfers(self, gate: Any) -> None:
        ray.get(gate.enter.remote())

    @on_system_thread  # type: ignore[untyped-decorator]
    def held(self) -> tuple[int, int]:
        """Tensors that Ray holds here, and objects that kvwire offers.

        Ray 2.60 keeps an entry of each object that came here and has no tensor.
        """
        offers = get_tensor_transport_manager(NAME).exchange()._offers
        return len(store().rdt_store._tensor_to_object_ids), len(offers)

    def lose(self) -> None:
        """Forget all objects, as none of Ray's code does."""
        store().rdt_store._rdt_store.clear()

    def pid(self) -> int:
        return os.getpid()


class AsyncWorker:
    @through_kvwire  # type: ignore[untyped-decorator]
    async def make(self, what: Any) -> Any:
        return what

    async def back(self, what: Any) -> Any:
        return what


class Gate:
    def __init__(self) -> None:
        self._entered, self._open = asyncio.Event(), asyncio.Event()

    async def enter(self) -> None:
        self._entered.set()
        await self._open.wait()

    async def entered(self) -> None:
        await self._entered.wait()

    async def open(self) -> None:
        self._open.set()


def actor(kind: type = Worker, **options: Any) -> Any:
    options = {"num_cpus": 0, "enable_tensor_transport": True} | options
    return ray.remote(**options)(kind).remote()


def gate() -> Any:
    return ray.remote(num_cpus=0, max_concurrency=10)(Gate).remote()


def made(ref: Any, sink: Any) -> Any:
    """Wait until an object is there: before, Ray lends its reference to nobody."""
    ray.get(sink.take.remote(ref))
    return ref


def raises(kind: type[BaseException], call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except kind as exc:
        return str(exc)
    raise AssertionError(f"no {kind.__name__}")
