"""The prefill and the decode process of ``kvwire bench overlap``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.pair import SideProcess


@dataclass(frozen=True, slots=True)
class Span:
    """One transfer: CPU of both sides, and from its first and last mark to its end."""

    from_first_s: float
    from_last_s: float
    cpu_s: float


class Pair:
    """A prefill and a decode process."""

    def __init__(self, transport: str, loop: str) -> None:
        options = [f"transport={transport}", f"loop={loop}"]
        self.facts: dict[str, Any] = {}
        self._sides: list[SideProcess] = []
        try:
            for _ in range(2):
                self._sides.append(SideProcess("overlap", options))
            self._decode, self._prefill = self._sides
            address = self._prefill.call("listen")["address"]
            self._prefill.ask("accept")
            self.facts = self._decode.call("connect", address=address)
            self._prefill.answer()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End both processes."""
        for side in self._sides:
            side.stop()

    def check(self, layers: int, layer_bytes: int) -> None:
        """Show that the bytes arrive as they were sent; not timed.

        Raises:
            BenchError: They do not.
        """
        said = _said("streamed", layers, layer_bytes)
        self._prefill.ask("check_right", work=said)
        arrived = self._decode.call("check_left", work=said)["digest"]
        sent = self._prefill.answer()["digest"]
        if sent != arrived:
            raise BenchError(f"what arrived ({arrived}) is not what was sent ({sent})")

    def move(
        self,
        way: str,
        layers: int,
        layer_bytes: int,
        *,
        compute_s: float = 0.0,
        repeat: int = 1,
        group_bytes: int | None = None,
    ) -> Span:
        """Compute and transfer a request, ``repeat`` times; the medians and means.

        Raises:
            BenchError: It broke.
        """
        said = _said(way, layers, layer_bytes)
        before_s = self._cpu_s()
        self._prefill.ask(
            "serve",
            work=said,
            repeat=repeat,
            compute_s=compute_s,
            group_bytes=group_bytes,
        )
        over = self._decode.call("drive", work=said, repeat=repeat)["over"]
        marked = self._prefill.answer()
        return Span(
            median(a - b for a, b in zip(over, marked["first"], strict=True)),
            median(a - b for a, b in zip(over, marked["last"], strict=True)),
            (self._cpu_s() - before_s) / repeat,
        )

    def _cpu_s(self) -> float:
        return sum(float(side.call("cpu")["cpu_s"]) for side in self._sides)


@contextmanager
def started(transport: str, loop: str) -> Iterator[Pair]:
    """Two processes, ended at the end."""
    pair = Pair(transport, loop)
    try:
        yield pair
    finally:
        pair.stop()


def _said(way: str, layers: int, layer_bytes: int) -> dict[str, Any]:
    return asdict(Work(verb=way, nbytes=layer_bytes, count=layers))
