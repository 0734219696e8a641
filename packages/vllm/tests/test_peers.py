"""Connections that a worker keeps."""

from __future__ import annotations

import asyncio

import pytest

import kvwire
from kvwire_vllm.peers import Peers
from tests.support.servers import free_port


async def test_what_could_not_be_dialled_is_forgotten() -> None:
    """Where all of this host is trusted, requests name any address of it."""
    async with kvwire.open() as here, kvwire.open() as there:
        peers, address = Peers(), str(await there.listen("127.0.0.1:0"))
        kept = await peers.connection(here, address)
        port = free_port()
        for host in range(1, 6):
            with pytest.raises(kvwire.ConnectError):
                await peers.connection(here, f"127.0.0.{host}:{port}")
        assert await peers.connection(here, address) is kept
        assert len(peers._dials) <= 2


async def test_those_that_ask_at_once_share_a_connection() -> None:
    async with kvwire.open() as here, kvwire.open() as there:
        peers, address = Peers(), str(await there.listen("127.0.0.1:0"))
        asked = (peers.connection(here, address) for _ in range(5))
        assert len(set(await asyncio.gather(*asked))) == 1
