"""What the demo shows while it runs: steps, and two bars for each request."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID

from kvwire.cli.demo.lines import (
    Arrived,
    Event,
    LayerLanded,
    NewToken,
    Prefilled,
    Prompt,
    Single,
    Up,
)

_UP = {
    "prefill": "prefill has loaded the model and listens on {address}",
    "decode": "decode has loaded the model and is connected; requests start",
}


class Bars(Progress):
    """Shows events as they come; a context manager."""

    def __init__(self, console: Console, requests: list[Prompt], library: str) -> None:
        super().__init__(
            "{task.description}",
            BarColumn(bar_width=24),
            "{task.completed}/{task.total} {task.fields[unit]}",
            "{task.fields[note]}",
            console=console,
            # In a file, the report says the same.
            disable=not console.is_terminal,
        )
        self._began = time.monotonic()
        self._left = sum(request.new for request in requests)
        self._kv: dict[str, TaskID] = {}
        self._text: dict[str, TaskID] = {}
        for r in requests:
            self._kv[r.name] = self.add_task(
                f"{r.name}  KV", total=None, unit="layers", note=""
            )
            self._text[r.name] = self.add_task(
                f"{r.name}  text", total=r.new, unit="tokens", note=""
            )
        self._step(
            f"{len(requests)} requests of {len(requests[0].tokens)} tokens, a Llama of "
            f"2 million weights in {library}"
        )
        self._step("starting three processes: prefill, decode, and one to compare with")

    def note(self, event: Event) -> None:
        """Show an event, where it shows."""
        match event:
            case Up(role=role, address=address) if role in _UP:
                self._step(_UP[role].format(address=address))
            case Prefilled(request=request, marked=marked):
                self.update(self._kv[request], total=len(marked))
            case LayerLanded(request=request):
                self.update(self._kv[request], advance=1)
            case Arrived(request=request, missing=missing) if missing:
                self.update(self._kv[request], note=f"{len(missing)} blocks lost")
            case NewToken(request=request):
                self.update(self._text[request], advance=1)
                self._left -= 1
                if not self._left:
                    self._step("all is generated; now the same in a single process")
            case Single(request=request):
                self.update(self._text[request], note="compared")

    def _step(self, text: str) -> None:
        at_s = time.monotonic() - self._began
        self.console.print(f"[dim]{at_s:5.1f} s[/]  {text}", highlight=False)
