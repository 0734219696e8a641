"""What an engine says of itself, as a proxy reads it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.directory import Change, ChangeKind, open_directory
from kvwire.errors import UsageError
from kvwire_vllm.announce import Announcer, http_url
from kvwire_vllm.config import VllmSettings
from kvwire_vllm.metadata import WorkerStep
from kvwire_vllm.proxy.members import AllowedHosts, read_member
from kvwire_vllm.worker import WorkerSide
from packages.vllm.tests.support.fakes import SHAPE, vllm_configs


def vllm_config(**said: Any) -> Any:
    said |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    return vllm_configs(**said)[0]


def caches() -> dict[str, Any]:
    shape = (8, SHAPE.block_tokens, SHAPE.kv_heads, 2 * SHAPE.head_dim)
    return {"model.layers.0.self_attn.attn": np.zeros(shape, np.float32)}


@pytest.mark.parametrize(
    ("said", "role", "announced"),
    [
        ("kv_producer", "", "prefill"),
        ("kv_consumer", "", "decode"),
        ("kv_both", "", "both"),
        ("kv_both", "decode", "decode"),
    ],
)
async def test_a_worker_announces_itself_until_it_is_closed(
    said: str, role: str, announced: str, tmp_path: Path
) -> None:
    """Its caches' specs, and its load as that changes; a proxy can use all of it."""
    url = f"file:{tmp_path}?interval_s=0.01"
    http = "http://127.0.0.1:8100"
    announcer = Announcer(http, role, vllm_config(role=said), 1, "a" * 32)
    config = kvwire.Config(directory=url)
    worker = WorkerSide(VllmSettings(), config, [SHAPE], announcer)
    directory = open_directory(url)
    try:
        async with aclosing(directory.watch()) as changes, asyncio.timeout(60):
            worker.register(caches())
            change: Change = await anext(changes)
            member = read_member(change.record, AllowedHosts())
            assert (member.url, member.address) == (http, worker.address)
            said_by = member.labels
            assert (said_by.rank, said_by.ranks, said_by.slots) == (1, 4, 4)
            found = member.record
            assert (found.role, found.model) == (announced, "a" * 32)
            assert len(change.record.specs) == 1
            worker.begin_step(WorkerStep(running=3))
            change = await anext(changes)
            assert (change.kind, change.record.load) == (ChangeKind.CHANGED, 0.75)
            await asyncio.to_thread(worker.close)
            assert (await anext(changes)).kind is ChangeKind.LEFT
    finally:
        worker.close()
        await directory.close()


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("http://h", "http://h:80"),
        ("https://H:1/", "https://h:1"),
        ("http://[::1]:8", "http://[::1]:8"),
    ],
)
def test_a_url(text: str, read: str) -> None:
    assert http_url(text) == read


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(UsageError, match="is not an http") as caught:
        http_url("http://user:secret@host:8000")
    assert "secret" not in str(caught.value)
