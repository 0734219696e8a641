"""Actors of a local Ray, whose tensors go through kvwire; a program of its own.

Ray leaves threads and sockets in the process that has called it. Each check that passes
is a line of the output.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
import torch

from kvwire.integrations.ray import register

register()  # before a method is said to use it
register()  # again


class Source:
    """Has tensors; Ray keeps them where they are."""

    def __init__(self) -> None:
        self.made: Any = None

    @ray.method(tensor_transport="KVWIRE")  # type: ignore[untyped-decorator]
    def make(self, what: Any) -> Any:
        self.made = what
        return what

    @ray.method(tensor_transport="KVWIRE")  # type: ignore[untyped-decorator]
    def large(self, mib: int) -> Any:
        return torch.full((mib << 20,), 7, dtype=torch.uint8)

    def change_when_freed(self) -> None:
        ray.experimental.wait_tensor_freed(self.made, 30)
        self.made.fill_(-1)

    def pid(self) -> int:
        return os.getpid()


class Sink:
    """Takes tensors, as arguments or with ``ray.get``."""

    def back(self, what: Any) -> Any:
        return what

    def take(self, what: Any) -> None:
        pass

    def get(self, refs: list[Any]) -> Any:
        return ray.get(refs[0])

    def get_into(self, refs: list[Any], shape: tuple[int, ...]) -> tuple[Any, bool]:
        target = torch.zeros(shape)
        ray.experimental.set_target_for_ref(refs[0], [target])
        got = ray.get(refs[0])
        return got, got.data_ptr() == target.data_ptr()

    def fails(self, refs: list[Any]) -> str:
        try:
            ray.get(refs[0])
        except ray.exceptions.RayError as exc:
            return str(exc)
        return "it came"

    def get_in(self, refs: list[Any], timeout_s: float) -> str:
        try:
            ray.get(refs[0], timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return "not in time"
        return "there"


TENSORS = {
    "one": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    "bfloat16": torch.arange(10, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bool": torch.tensor([True, False, True]),
    "not contiguous": torch.arange(12).reshape(3, 4).T,
}


def tensors_arrive(source: Any, sink: Any) -> None:
    for name, tensor in TENSORS.items():
        back = ray.get(sink.back.remote(source.make.remote(tensor)))
        assert back.dtype == tensor.dtype, name
        assert torch.equal(back, tensor), name


def what_holds_many_arrives(source: Any, sink: Any) -> None:
    held = {"layers": [torch.full((3, i + 1), i) for i in range(50)], "words": "kept"}
    back = ray.get(sink.back.remote(source.make.remote(held)))
    assert back["words"] == "kept"
    assert all(
        torch.equal(*two) for two in zip(back["layers"], held["layers"], strict=True)
    )


def ray_get_and_its_target(source: Any, sink: Any) -> None:
    tensor = torch.rand(64, 64)
    ref = made(source.make.remote(tensor), sink)
    assert torch.equal(ray.get(sink.get.remote([ref])), tensor)
    got, in_place = ray.get(sink.get_into.remote([ref], (64, 64)))
    assert torch.equal(got, tensor)
    assert in_place


def the_driver_puts_and_gets(source: Any, sink: Any) -> None:
    tensor = torch.rand(1000)
    ref = ray.put(tensor, _tensor_transport="KVWIRE")
    assert torch.equal(ray.get(sink.get.remote([ref])), tensor)
    assert torch.equal(ray.get(source.make.remote(tensor)), tensor)


def a_freed_tensor_may_be_written_to(source: Any, sink: Any) -> None:
    tensor = torch.rand(1 << 20)
    ref = source.make.remote(tensor)
    back = sink.back.remote(ref)
    changing = source.change_when_freed.remote()
    del ref
    assert torch.equal(ray.get(back), tensor)
    ray.get(changing)


def a_stopped_or_dead_owner_is_an_error_and_kills_nobody(_: Any, sink: Any) -> None:
    source = actor(Source)
    pid = ray.get(source.pid.remote())
    ref = made(source.large.remote(64), sink)
    assert len(ray.get(sink.get.remote([ref]))) == 64 << 20
    os.kill(pid, signal.SIGSTOP)
    try:
        assert ray.get(sink.get_in.remote([ref], 1.0)) == "not in time"
    finally:
        os.kill(pid, signal.SIGKILL)
    said = ray.get(sink.fails.remote([ref]))
    assert "did not come through kvwire" in said, said
    assert ray.get(sink.back.remote("alive")) == "alive"


CHECKS = (
    tensors_arrive,
    what_holds_many_arrives,
    ray_get_and_its_target,
    the_driver_puts_and_gets,
    a_freed_tensor_may_be_written_to,
    a_stopped_or_dead_owner_is_an_error_and_kills_nobody,
)


def made(ref: Any, sink: Any) -> Any:
    """Wait until an object is there: before, Ray lends its reference to nobody."""
    ray.get(sink.take.remote(ref))
    return ref


def actor(kind: type) -> Any:
    return ray.remote(num_cpus=0, enable_tensor_transport=True)(kind).remote()


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="error")
    source, sink = actor(Source), actor(Sink)
    for check in CHECKS:
        check(source, sink)
        print(check.__name__, flush=True)
    ray.shutdown()
