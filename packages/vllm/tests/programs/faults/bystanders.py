"""Requests that nothing is done to, beside those that are harmed: are they harmed too?

They are decode's own, and begin as all others do, so that they use the same blocks.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import httpx

from packages.vllm.tests.programs.faults.answers import Outcome, Reference, judged
from packages.vllm.tests.support.serving import prompt

if TYPE_CHECKING:
    from packages.vllm.tests.programs.faults.arena import Arena

TOKENS: Final = 200
# A block and a token behind what all begin with.
PROMPTS: Final = [prompt(33, seed=seed) for seed in (1000, 1001)]


class Bystanders:
    """Asks decode again and again, until the end of the block."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.harmed = 0  # requests that failed, or were answered wrongly
        self.computed = 0  # tokens of their prompts
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(known,))
            for known in arena.bystanders
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, known: Reference) -> None:
        arena = self._arena
        while not self._over.is_set():
            arena.await_decode()
            computed = 0
            try:
                said = arena.post(arena.decode, known.ids, None, TOKENS)
                harmed = judged(known, said) is Outcome.WRONG
                cached = said["usage"]["prompt_tokens_details"] or {}
                computed = len(known.ids) - cached.get("cached_tokens", 0)
            except httpx.HTTPError:
                harmed = not arena.killing
            with self._lock:
                self.harmed += harmed
                self.computed += computed


class DecodeLog:
    """Reads in decode's log whom vLLM sets back, or fails, for want of KV."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0

    def rewound(self) -> int:
        """Count requests that lacked nothing, since the last call."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            text = log.read().decode(errors="replace")
            self._read = log.tell()
        return rewound(text)


# What vLLM does to requests, and what kvwire has said of each that lacks blocks.
_DONE: Final = re.compile(r"(?:Recovered from KV load failure: |Failing )(\d+) request")
_LACKS: Final = re.compile(
    r"could not start transfer \w+:|"
    r"transfer \w+: (?:\d+ of \d+ blocks of|none of the ranks)"
)


def rewound(log: str) -> int:
    """Count the requests that vLLM has set back though they lacked nothing."""
    done = sum(int(count) for count in _DONE.findall(log))
    return max(0, done - len(_LACKS.findall(log)))
