"""Threads that encode and decode, at the end of their communicator."""

from __future__ import annotations

import time
from functools import partial

from kvwire.driver.codec_threads import CodecThreads
from tests.test_aio import no_more_threads


async def test_a_close_waits_for_its_jobs_if_no_thread_can_be_started() -> None:
    """A job that goes on would write to memory that has another owner."""
    ends: list[Exception | None] = []
    threads = CodecThreads()
    threads.run(partial(time.sleep, 0.05), ends.append)
    with no_more_threads():
        await threads.close()
    assert ends == [None]
