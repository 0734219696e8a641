"""A prefill and a decode engine, asked without a proxy."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvwire.security.keys import read_key_file
from kvwire_vllm.references import UNSIGNED, References
from packages.vllm.tests.support.serving import (
    Engine,
    Process,
    engine,
    prompt,
    tokens_of,
)
from tests.support.waiting import eventually


class Pair:
    def __init__(
        self, prefill: Engine, decode: Engine, *, references: References = UNSIGNED
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self._signed = references.signed

    @property
    def idle(self) -> bool:
        """Whether no request and no block is in use."""
        return self.prefill.idle and self.decode.idle

    @property
    def fetched(self) -> float:
        """Tokens whose KV decode has not computed."""
        return self.decode.metric("vllm:external_prefix_cache_hits_total")

    def local(self, ids: list[int]) -> list[int]:
        return tokens_of(self.prefill.generate(ids, cache_salt=f"local-{ids[:4]}"))

    def check_alike(self, lengths: Iterable[int], seed: int) -> None:
        """Check that prompts asked at once are answered as one engine answers each."""
        prompts = [prompt(length, seed=seed) for length in lengths]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(self.both, prompts))
        assert answers == [self.local(ids) for ids in prompts]
        assert eventually(lambda: self.idle)

    def both(
        self, ids: list[int], there: str = "", back: str = "", **more: Any
    ) -> list[int]:
        name = secrets.token_hex(8)
        sends = {
            "do_remote_decode": True,
            "transfer_id": name,
            "remote": (back or self.decode.kv).split(","),
            "stages": self.decode.stages,
        }
        loads = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote": (there or self.prefill.kv).split(","),
            "stages": self.prefill.stages,
        }
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                self.decode.generate,
                ids,
                kv_transfer_params=self._signed(loads),
                **more,
            )
            sends = self._signed(sends)
            self.prefill.generate(ids, 1, kv_transfer_params=sends, **more)
            return tokens_of(answer.result())


@contextmanager
def running(*engines: Process) -> Iterator[None]:
    """Processes that serve, until the end of the block.

    A SIGTERM ends them and the program, so that a run under ``timeout`` leaves none.
    """
    with _ended_together(engines):
        try:
            for one in engines:
                one.start()
            for one in engines:
                one.wait()
            yield
        finally:
            for one in engines:
                one.kill()


@contextmanager
def _ended_together(engines: Sequence[Process]) -> Iterator[None]:
    """End them on SIGTERM: as process groups of their own they would live on."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def end(*_: object) -> None:
        for one in engines:  # first, since threads may wait for their answers
            one.signal(signal.SIGKILL)
        sys.exit(1)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def pair_of(
    model: Path,
    folder: Path,
    transfer: dict[str, Any],
    *arguments: str,
    prefill: tuple[int, int] = (1, 1),
    decode: tuple[int, int] = (1, 1),
    beside: Sequence[dict[str, Any]] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Pair]:
    """A pair that serves, of so many ranks and stages, with a key if there is one."""
    made = []
    for core, (name, shape) in enumerate((("prefill", prefill), ("decode", decode))):
        ranks, stages = shape
        one = engine(
            *(model, folder, name, core, transfer),
            *arguments,
            ranks=ranks,
            stages=stages,
            beside=beside,
        )
        one.environment |= environment
        made.append(one)
    references = UNSIGNED
    if "psk_file" in transfer:
        references = References([read_key_file(transfer["psk_file"])])
    with running(*made):
        yield Pair(*made, references=references)
