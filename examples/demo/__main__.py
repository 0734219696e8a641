"""Prefill in one process, decode in another, KV layer by layer between them.

    make demo
    .venv-demo/bin/python -m examples.demo --requests 6 --json

Two processes run the same transformer. One computes prompts; the other pulls their KV
while it is computed, and writes the continuation. One request loses blocks on purpose,
and the decode process computes exactly what is missing. At the end every token is
compared with what a third process says that does it all alone. Exit status 1 if any
differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from examples.demo.blocks import blocks_for
from examples.demo.picture import picture
from examples.demo.progress import Bars
from examples.demo.prompts import ANCHORS, passages
from examples.demo.record import Record
from examples.demo.report import print_report, summary
from examples.demo.run import Request, RoleFailed, run
from examples.demo.settings import CHECKPOINT
from examples.demo.trace import trace

# Which request loses blocks, and which of them: a third in the middle.
_UNLUCKY = 1


def main() -> None:
    """Run it, report, and check."""
    options = _options()
    console = Console(stderr=options.json)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    requests = _requests(tokenizer, options.requests, options.prompt, options.new)
    console.print(
        f"{len(requests)} requests; a prefill, a decode and a reference process start"
    )
    try:
        with Bars(console, requests) as bars:
            records = asyncio.run(run(requests, bars.note, options.wire_gbit))
    except RoleFailed as exc:
        sys.exit(f"the demo failed: {exc}")
    files = _write(records, options.out)
    if options.json:
        print(
            json.dumps({"requests": summary(records), "files": list(map(str, files))})
        )
    else:
        prompts = {request.name: request.tokens for request in requests}
        print_report(console, records, prompts, tokenizer.decode, files)
    faults = [fault for record in records for fault in record.faults()]
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "--requests", type=int, default=4, choices=range(1, len(ANCHORS) + 1)
    )
    parser.add_argument("--prompt", type=int, default=420, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument(
        "--wire-gbit", type=float, help="as over a wire of so many gigabits a second"
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder of the pictures"
    )
    options: argparse.Namespace = parser.parse_args()
    if options.wire_gbit is not None and options.wire_gbit <= 0:
        parser.error("--wire-gbit is more than 0")
    if options.prompt < 64 or options.new < 1 or options.prompt + options.new > 512:
        parser.error(
            "--prompt is at least 64, and --prompt + --new at most 512: more "
            "than 512 tokens the model has never seen"
        )
    return options


def _requests(tokenizer: Tokenizer, count: int, prompt: int, new: int) -> list[Request]:
    requests = []
    for index, (name, text) in enumerate(passages(count).items()):
        tokens = tokenizer.encode(text).ids[:prompt]
        third = blocks_for(prompt - 1) // 3
        # With one request only, that one.
        unlucky = index == min(_UNLUCKY, count - 1)
        lose = (third, 2 * third) if unlucky else (0, 0)
        requests.append(Request(name, tokens, new, lose))
    return requests


def _write(records: list[Record], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    timeline, events = folder / "timeline.svg", folder / "trace.json"
    timeline.write_text(picture(records))
    events.write_text(json.dumps(trace(records)))
    return [timeline, events]


if __name__ == "__main__":
    main()
