"""S3 as a KV store, by obstore: one object for each offer.

The variant is a bucket's address, such as ``s3:http://127.0.0.1:5000/bucket``; the
access keys come from the environment, as for every client of S3.
"""

from __future__ import annotations

import asyncio
import secrets
from importlib import metadata

from obstore.store import S3Store

from kvwire.errors import UsageError
from kvwire_certify.transport import End


class S3End(End):
    """A client of one bucket."""

    version = f"obstore {metadata.version('obstore')}"

    async def open(self, memory: memoryview) -> bytes:
        endpoint, _, bucket = self.variant.rpartition("/")
        if not endpoint:
            raise UsageError("certify: s3 needs a bucket: s3:http://HOST:PORT/BUCKET")
        self.store = S3Store(
            bucket,
            endpoint=endpoint,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        return b""

    async def offer(self, data: memoryview) -> bytes:
        reference = f"certify-{secrets.token_hex(8)}"
        await self.store.put_async(reference, bytes(data))
        return reference.encode()

    async def withdraw(self, reference: bytes) -> None:
        await self.store.delete_async(reference.decode())

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool | bytes:
        try:
            async with asyncio.timeout(timeout_s):
                found = await self.store.get_async(reference.decode())
                return bytes(await found.bytes_async())
        except FileNotFoundError:
            return False


TARGET = S3End
