"""A prefill and a decode engine, asked without a proxy."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvwire.integrations.vllm.references import UNSIGNED, References
from tests.integrations.vllm.serving import Engine, tokens_of


class Pair:
    """A prefill and a decode engine, asked at once.

    Args:
        prefill: The one.
        decode: The other.
        references: Signs what they are told of each other.
    """

    def __init__(
        self, prefill: Engine, decode: Engine, *, references: References = UNSIGNED
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self._signed = references.signed

    def local(self, ids: list[int]) -> list[int]:
        return tokens_of(self.prefill.generate(ids, cache_salt=f"local-{ids[:4]}"))

    def both(self, ids: list[int], there: str = "", back: str = "") -> list[int]:
        """What the two make of a prompt.

        Args:
            ids: The prompt.
            there: Where decode finds prefill, if not where it listens.
            back: Where prefill finds decode, likewise.
        """
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
                self.decode.generate, ids, kv_transfer_params=self._signed(loads)
            )
            self.prefill.generate(ids, 1, kv_transfer_params=self._signed(sends))
            return tokens_of(answer.result())


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Engines that serve, until the end of the block."""
    try:
        for one in engines:
            one.start()
        for one in engines:
            one.wait()
        yield
    finally:
        for one in engines:
            one.kill()
