"""Two bars for each request: layers that have landed, tokens that were generated."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from examples.demo.lines import Arrived, Event, Landed, Prefilled, Token
from examples.demo.run import Request


class Bars:
    """Shows events as they come; a context manager."""

    def __init__(self, console: Console, requests: list[Request]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[unit]}"),
            TextColumn("{task.fields[note]}"),
            console=console,
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
        """Move a bar, where the event moves one."""
        update = self._progress.update
        match event:
            case Prefilled(request=request, marked=marked):
                update(self._kv[request], total=len(marked))
            case Landed(request=request):
                update(self._kv[request], advance=1)
            case Arrived(request=request, missing=missing) if missing:
                update(self._kv[request], note=f"{len(missing)} blocks lost")
            case Token(request=request):
                update(self._text[request], advance=1)
            case _:
                pass
