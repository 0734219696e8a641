"""Every directory keeps every promise: one test for each.

One of your own does too if ``DIRECTORY=mine://host`` names it in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.directory.contract import PROMISES, Promise, check
from tests.support.servers import nats_server, redis_server

OWN = os.environ.get("DIRECTORY", "")


@pytest.fixture(
    scope="module", params=["file", "redis", "nats", *([OWN] if OWN else ())]
)
def url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    match request.param:
        case "file":
            yield f"file:{tmp_path_factory.mktemp('fleet')}?interval_s=0.05"
        case "redis":
            with redis_server() as server:
                yield f"redis://127.0.0.1:{server.port}?prefix=kit"
        case "nats":
            with nats_server() as server:
                yield f"nats://127.0.0.1:{server.port}?bucket=kit"
        case own:
            yield own


@pytest.mark.parametrize("promise", PROMISES)
async def test_directory(url: str, promise: Promise) -> None:
    await check(url, promise)
