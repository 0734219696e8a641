"""What crosses between libraries: memory, and events that another's stream waits for.

A stream is a pointer that both libraries take, an event is not: only the library that
made it can have a stream wait for it.
"""

from __future__ import annotations

from typing import Any

from kvwire.errors import UsageError
from kvwire.memory.device.ops import Event


class DeviceArray:
    """Shows device memory at an address, as libraries take it without a copy.

    Whoever uses it keeps the memory's owner, and sees to the order of streams.
    """

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


def wait_on_pointer(stream: int, index: int, event: object) -> None:
    """Have the stream at a pointer wait for a torch or CuPy event.

    Args:
        stream: The ``cudaStream_t``.
        index: Its GPU.
        event: Ours, or one of either library.

    Raises:
        UsageError: It is none of these.
    """
    native: Any = event.native if isinstance(event, Event) else event
    library = type(native).__module__.partition(".")[0]
    if library == "torch":
        import torch  # noqa: PLC0415 - there is an event of it, so it is imported

        torch.cuda.ExternalStream(stream, device=index).wait_event(native)
    elif library == "cupy":
        import cupy  # noqa: PLC0415 - likewise

        with cupy.cuda.Device(index):
            cupy.cuda.ExternalStream(stream, index).wait_event(native)
    else:
        raise UsageError(
            f"an event of type {type(native).__name__}: pass a torch.cuda.Event or a "
            f"cupy.cuda.Event that was recorded on the producing stream"
        )
