"""NATS as a directory: a bucket of JetStream's key-value store, an entry a member.

The bucket forgets an entry that was not written again for ``lease_s`` of the URL, and
tells nobody; watchers count leases themselves. It is kept in memory. A server that was
restarted has it again with the next renewal.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import ClassVar, Final
from urllib.parse import urlunsplit

from kvwire.directory.base import Batch, Directory
from kvwire.directory.record import Record
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.limits import RECORD_BYTES_MAX

with needed_by("a directory in NATS", extra="nats"):
    import nats
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType
    from nats.js.kv import KeyValue

_CONNECT_S: Final = 2
# A server that does not answer two pings is gone.
_PING_S: Final = 5
_LEASE_S: Final = 30.0


class NatsDirectory(Directory):
    """Keeps records in a bucket: ``nats://host:4222`` or ``tls://``."""

    # Fleets that share a server have different buckets. Nobody's lease may be longer
    # than the bucket's.
    options: ClassVar[Mapping[str, str]] = {
        "bucket": "kvwire",
        "lease_s": str(_LEASE_S),
    }

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lease_s = self.seconds("lease_s")
        if not re.fullmatch(r"[-\w]+", self.given["bucket"], re.ASCII):
            raise UsageError(
                f"directory {self}: bucket={self.given['bucket']!r}; letters, digits, "
                f"- and _ are allowed"
            )
        self._server = urlunsplit((self.url.scheme, self.url.netloc, "", "", ""))
        self._client: Client | None = None
        self._bucket: KeyValue | None = None
        self._opening = asyncio.Lock()

    def check(self, record: Record) -> None:
        """Refuse a lease that is longer than the bucket keeps entries."""
        super().check(record)
        if record.lease_s > self._lease_s:
            raise UsageError(
                f"a lease of {record.lease_s:g} s, and the bucket keeps entries for "
                f"{self._lease_s:g} s: add ?lease_s= to the directory's URL"
            )

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        with self._failing():
            await (await self._opened()).put(_name(key), value)

    async def erase(self, key: str) -> None:
        with self._failing():
            await (await self._opened()).delete(_name(key))

    async def follow(self) -> AsyncGenerator[Batch, None]:
        with self._failing():
            client = await self._connected()
            try:
                entries = await self._subscribed(client)
                info = await entries.consumer_info()
                assert info.delivered is not None
                there: dict[str, bytes | None] = {}
                for _ in range((info.num_pending or 0) + info.delivered.consumer_seq):
                    there |= _read(await entries.next_msg(_CONNECT_S))
                yield there
                while True:
                    yield _read(await entries.next_msg(None))
            finally:
                await client.close()

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _opened(self) -> KeyValue:
        """Return the bucket on a connection that is up."""
        async with self._opening:
            if self._client is None or self._client.is_closed:
                self._client = self._bucket = None
                self._client = await self._connected()
            if self._bucket is None:
                self._bucket = await self._bucket_of(self._client)
            return self._bucket

    async def _subscribed(self, client: Client) -> JetStreamContext.PushSubscription:
        """Subscribe to the last entry of each key, and to what comes.

        Not with a watcher of the library, which leaves tasks behind when it ends.
        """
        bucket = self.given["bucket"]
        await self._bucket_of(client)
        return await client.jetstream().subscribe(
            f"$KV.{bucket}.>",
            stream=f"KV_{bucket}",
            config=ConsumerConfig(
                deliver_policy=DeliverPolicy.LAST_PER_SUBJECT, ack_policy=AckPolicy.NONE
            ),
        )

    async def _connected(self) -> Client:
        async def quiet(_: Exception) -> None:
            """Log nothing: what fails is raised where it was asked for."""

        return await nats.connect(
            self._server,
            # Who calls tries again, and reads everything anew.
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=_CONNECT_S,
            ping_interval=_PING_S,
            error_cb=quiet,
        )

    async def _bucket_of(self, client: Client) -> KeyValue:
        # Made by whoever comes first; the same again does nothing.
        return await client.jetstream().create_key_value(
            bucket=self.given["bucket"],
            ttl=self._lease_s,
            history=1,
            storage=StorageType.MEMORY,
            max_value_size=4 * RECORD_BYTES_MAX,
        )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        with self.failing(nats.errors.Error):
            try:
                yield
            except Exception:
                # The bucket may be gone with what the server has forgotten.
                self._bucket = None
                raise


def _name(key: str) -> str:
    """Return a key as the server takes it: letters and digits."""
    return key.encode().hex()


def _read(entry: Msg) -> dict[str, bytes | None]:
    name = entry.subject.rpartition(".")[2]
    with suppress(ValueError):
        name = bytes.fromhex(name).decode()
    # Who erases an entry leaves a marker in its place.
    erased = entry.headers and "KV-Operation" in entry.headers
    return {name: None if erased else entry.data}
