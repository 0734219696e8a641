"""The command line of the demo, and its progress bars."""

from __future__ import annotations

import asyncio
import sys
import time
from importlib.util import find_spec
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID

from demo.book import ANCHORS, Tokenizer, passages
from demo.lines import (
    Arrived,
    Event,
    LayerLanded,
    NewToken,
    Prefilled,
    Prompt,
    Single,
    Up,
)
from demo.llama import CONTEXT, blocks_for
from demo.plot import Plot, draw, save
from demo.run import run
from demo.show import print_report, summary
from kvwire import UsageError

_UP = {
    "prefill": "prefill has loaded the model and listens on {address}",
    "decode": "decode has loaded the model and is connected; requests start",
}
# The request that loses blocks; if there is only one, it is that one.
_UNLUCKY = 1

Requests = Annotated[int, Parameter(validator=Number(gte=1, lte=len(ANCHORS)))]
Gigabits = Annotated[float | None, Parameter(validator=Number(gt=0))]
Flag = Annotated[bool, Parameter(negative="")]

app = App(name="python examples/demo", suppress_keyboard_interrupt=False)


@app.default
def command(
    *,
    requests: Requests = 4,
    prompt: Annotated[int, Parameter(validator=Number(gte=64))] = 420,
    new: Annotated[int, Parameter(validator=Number(gte=1))] = 64,
    torch: Flag = False,
    wire_gbit: Gigabits = None,
    json: Flag = False,
    plot: Plot = None,
) -> int:
    """Prefill in one process, decode in another, KV layer by layer between them.

    One process computes the KV of prompts with a small Llama; another process pulls it
    meanwhile, and writes the continuation. One request loses blocks on purpose, and
    decode computes the tokens that it cannot use. At the end every token is compared
    with the output of a third process that works alone; the exit status is 1 if any
    differs.

    Args:
        requests: The number of concurrent requests.
        prompt: The tokens of a prompt.
        new: The number of tokens to generate.
        torch: Compute with torch and transformers instead of NumPy.
        wire_gbit: Simulate a wire of this many gigabits per second.
        json: Print the figures as JSON.
        plot: A file for a plot that shows when each layer was computed and moved.
    """
    if prompt + new > CONTEXT:
        raise UsageError(
            f"--prompt {prompt} --new {new}: together they may be at most {CONTEXT} "
            "tokens, the context that the model was trained on"
        )
    if torch and not (find_spec("torch") and find_spec("transformers")):
        raise UsageError(
            "--torch needs torch and transformers: pip install . ./packages/store "
            "'./packages/engines[transformers]', in the clone"
        )
    library = "torch" if torch else "numpy"
    screen = Console(stderr=json)
    console = Console(stderr=json, width=min(80, screen.width))
    tokenizer = Tokenizer()
    asked = _requests(tokenizer, requests, prompt, new)
    with Bars(console, asked, library) as bars:
        records = asyncio.run(
            run(asked, bars.note, library=library, wire_gbit=wire_gbit)
        )
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(summary(records)) + b"\n")
    else:
        prompts = {request.name: request.tokens for request in asked}
        print_report(console, records, prompts, tokenizer.decode)
    if plot:
        save(draw(records), plot)
    faults = [fault for record in records for fault in record.faults()]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _requests(tokenizer: Tokenizer, count: int, prompt: int, new: int) -> list[Prompt]:
    requests = []
    for index, (name, text) in enumerate(passages(count).items()):
        tokens = tokenizer.encode(text)[:prompt]
        # A third of the blocks, from the middle.
        third = blocks_for(prompt - 1) // 3
        unlucky = index == min(_UNLUCKY, count - 1)
        lose = (third, 2 * third) if unlucky else (0, 0)
        requests.append(Prompt(name, tokens, new, lose))
    return requests


class Bars(Progress):
    """Shows events as they arrive; a context manager."""

    def __init__(self, console: Console, requests: list[Prompt], library: str) -> None:
        super().__init__(
            "{task.description}",
            BarColumn(bar_width=24),
            "{task.completed}/{task.total} {task.fields[unit]}",
            "{task.fields[note]}",
            console=console,
            # When the output goes to a file, the report contains the same.
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
        """Show an event, if it is a visible one."""
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
