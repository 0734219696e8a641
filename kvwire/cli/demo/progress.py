"""What the demo shows while it runs: steps, and two bars for each request."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from kvwire.cli.demo.lines import (
    Arrived,
    Event,
    LayerLanded,
    NewToken,
    Prefilled,
    Single,
    Up,
)
from kvwire.cli.demo.run import DemoRequest

_UP = {
    "prefill": "prefill has loaded the model and listens on {address}",
    "decode": "decode has loaded the model and is connected; requests start",
}


class Bars:
    """Shows events as they come; a context manager."""

    def __init__(
        self, console: Console, requests: list[DemoRequest], library: str
    ) -> None:
        self._console = console
        self._began = time.monotonic()
        self._left = sum(request.new for request in requests)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total} {task.fields[unit]}"),
            TextColumn("{task.fields[note]}"),
            console=console,
            # In a file, the report says the same.
            disable=not console.is_terminal,
        )
        self._kv: dict[str, TaskID] = {}
        self._text: dict[str, TaskID] = {}
        for request in requests:
            name = request.name
            add = self._progress.add_task
            self._kv[name] = add(f"{name}  KV", total=None, unit="layers", note="")
            self._text[name] = add(
                f"{name}  text", total=request.new, unit="tokens", note=""
            )
        tokens = len(requests[0].tokens)
        self._step(
            f"{len(requests)} requests of {tokens} tokens, a Llama of 2 million "
            f"weights in {library}"
        )
        self._step("starting three processes: prefill, decode, and one to compare with")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def note(self, event: Event) -> None:
        """Show an event, where it shows."""
        update = self._progress.update
        match event:
            case Up(role=role, address=address) if role in _UP:
                self._step(_UP[role].format(address=address))
            case Prefilled(request=request, marked=marked):
                update(self._kv[request], total=len(marked))
            case LayerLanded(request=request):
                update(self._kv[request], advance=1)
            case Arrived(request=request, missing=missing) if missing:
                update(self._kv[request], note=f"{len(missing)} blocks lost")
            case NewToken(request=request):
                update(self._text[request], advance=1)
                self._left -= 1
                if not self._left:
                    self._step("all is generated; now the same in a single process")
            case Single(request=request):
                update(self._text[request], note="compared")
            case _:
                pass

    def _step(self, text: str) -> None:
        at_s = time.monotonic() - self._began
        self._console.print(f"[dim]{at_s:5.1f} s[/]  {text}", highlight=False)
