"""NATS as a directory: a bucket of JetStream's key-value store, one entry per member.

An existing bucket is used as it is. If there is none, the first member creates one in
memory, which drops entries that were not written again within the URL's ``lease_s``.
The bucket does not report this, so watchers count leases themselves. After a restart of
the server, the next renewals restore the entries.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final
from urllib.parse import unquote, urlunsplit

import msgspec

from kvwire.aio import run_to_completion
from kvwire.config import local_path
from kvwire.directory.base import Batch, Directory
from kvwire.directory.limits import RECORD_BYTES_MAX
from kvwire.directory.record import Record
from kvwire.directory.tls import client_context
from kvwire.errors import UsageError
from kvwire.extras import needed_by

with needed_by("a directory in NATS", extra="nats"):
    import nats
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType
    from nats.js.errors import NotFoundError, ServiceUnavailableError
    from nats.js.kv import KeyValue

_CONNECT_S: Final = 2
_CLOSE_S: Final = 1.0
# A server that does not answer two pings is gone.
_PING_S: Final = 5
_LEASE_S: Final = 30.0
_REPLICAS_MAX: Final = 5


class NatsDirectory(Directory):
    """Keeps records in a bucket: ``nats://host:4222``, or ``tls://``, or a cluster.

    Fleets that share a server need different buckets. A lease must not be longer than
    the time for which the bucket keeps entries.
    """

    # After this silence, the server is asked whether it still has the watch.
    silence_s: float = 5.0
    options: ClassVar[Mapping[str, str]] = {
        "bucket": "kvwire",
        "lease_s": str(_LEASE_S),
        "replicas": "1",
        "tls_ca_file": "",
        "tls_cert_file": "",
        "tls_key_file": "",
    }
    many_hosts = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lease_s = self.seconds("lease_s")
        if not re.fullmatch(r"[-\w]+", self.given["bucket"], re.ASCII):
            raise UsageError(
                f"directory {self}: bucket={self.given['bucket']!r}; use letters, "
                "digits, - and _"
            )
        replicas = self.given["replicas"]
        if not replicas.isdecimal() or not 1 <= int(replicas) <= _REPLICAS_MAX:
            raise UsageError(
                f"directory {self}: replicas={replicas!r}; pass 1 to {_REPLICAS_MAX}"
            )
        credentials, _, hosts = self.url.netloc.rpartition("@")
        if not all(hosts.split(",")):
            raise UsageError(
                f"directory {self}: write {self.url.scheme}://HOST:PORT,HOST:PORT"
            )
        self._servers = [
            urlunsplit((self.url.scheme, host, "", "", "")) for host in hosts.split(",")
        ]
        # The library would send them in the URL's encoding.
        name, colon, password = map(unquote, credentials.partition(":"))
        self._user = name if colon else None
        self._password = password if colon else None
        self._token = None if colon else name or None
        self._tls = self._tls_context()
        self._kept_s = 0.0
        self._client: Client | None = None
        self._bucket: KeyValue | None = None
        self._opening = asyncio.Lock()

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        with self._failing():
            bucket = await self._opened()
            if lease_s > self._kept_s:
                raise UsageError(
                    f"directory {self}: a lease of {lease_s:g} s is longer than the "
                    f"{self._kept_s:g} s for which bucket {self.given['bucket']!r} "
                    "keeps entries: make the bucket with a longer TTL; kvwire makes "
                    "it with ?lease_s="
                )
            await bucket.put(_name(key), value)

    async def erase(self, key: str) -> None:
        with self._failing():
            await (await self._opened()).delete(_name(key))

    async def follow(self) -> AsyncGenerator[Batch, None]:
        with self._failing():
            client = await self._connected()
            try:
                entries = await self._subscribed(client)
                delivered, pending = await _progress(entries)
                received = delivered + pending
                first = [await entries.next_msg(_CONNECT_S) for _ in range(received)]
                yield _living(first, await self._now(client))
                while True:
                    # Everything that the server has already sent arrives within the
                    # silence.
                    try:
                        yield _read(await entries.next_msg(self.silence_s))
                        received += 1
                    except nats.errors.TimeoutError:
                        if delivered > received:
                            raise ConnectionError(
                                "the server skipped entries"
                            ) from None
                        # It fails if the consumer, or its stream, no longer exists.
                        delivered, _ = await _progress(entries)
            finally:
                # A close that was cut is never finished: the library takes it for done.
                await run_to_completion(_closed(client))

    async def disconnect(self) -> None:
        if self._client is not None:
            await run_to_completion(_closed(self._client))

    async def _opened(self) -> KeyValue:
        """Return the bucket, after connecting if needed."""
        async with self._opening:
            if self._client is None or self._client.is_closed:
                self._client = self._bucket = None
                self._client = await self._connected()
            if self._bucket is None:
                self._bucket, self._kept_s = await self._bucket_of(self._client)
            return self._bucket

    async def _subscribed(self, client: Client) -> JetStreamContext.PushSubscription:
        """Subscribe to the last entry of each key, and to all later ones.

        The library's own watcher leaves tasks behind when it ends, so it is not used.
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

    def _tls_context(self) -> ssl.SSLContext | None:
        ca, cert, key = (
            local_path(self.given[f"tls_{part}_file"]) for part in _TLS_FILES
        )
        if not (ca or cert or key):
            return None
        try:
            context = client_context(ca)
            if cert or key:
                context.load_cert_chain(cert, key or None)
        except OSError as exc:  # an SSLError is an OSError
            raise UsageError(
                f"directory {self}: tls_ca_file, tls_cert_file or tls_key_file: {exc}"
            ) from None
        return context

    async def _connected(self) -> Client:
        """Connect to the first server that answers.

        Raises:
            ConnectionError: No server answers; the text gives a reason for each.
        """
        reasons = []
        for server in self._servers:
            try:
                return await self._connected_to(server)
            except (nats.errors.Error, OSError) as exc:
                if len(self._servers) == 1:
                    raise
                where = server.rpartition("/")[2]
                reasons.append(f"{where}: {str(exc) or type(exc).__name__}")
        raise ConnectionError("; ".join(reasons))

    async def _connected_to(self, server: str) -> Client:
        async def quiet(_: Exception) -> None:
            """Ignore errors reported here, because the failing call raises them too."""

        client = Client()
        try:
            await client.connect(
                server,
                tls=self._tls,
                user=self._user,
                password=self._password,
                token=self._token,
                # The caller tries again, and reads everything again.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=_CONNECT_S,
                ping_interval=_PING_S,
                error_cb=quiet,
            )
        except BaseException:
            # After a refused login the library leaves its socket open.
            await run_to_completion(_closed(client))
            raise
        return client

    async def _bucket_of(self, client: Client) -> tuple[KeyValue, float]:
        """Return the bucket, and how many seconds it keeps entries.

        An existing bucket is used as it is, whoever created it.
        """
        bucket = self.given["bucket"]
        stream = client.jetstream()
        try:
            found = await stream.key_value(bucket)
        except NotFoundError:
            # If others create it differently meanwhile, this fails, and is tried again.
            found = await stream.create_key_value(
                bucket=bucket,
                ttl=self._lease_s,
                history=1,
                storage=StorageType.MEMORY,
                max_value_size=4 * RECORD_BYTES_MAX,
                replicas=int(self.given["replicas"]),
            )
        status = await found.status()
        if status.stream_info.config.mirror is not None:
            raise UsageError(
                f"directory {self}: the bucket {bucket!r} mirrors another bucket and "
                "takes no entries; name the original"
            )
        return found, status.ttl or float("inf")

    async def _now(self, client: Client) -> datetime | None:
        """Return the time by the server's clock; None before NATS 2.10."""
        subject = f"$JS.API.STREAM.INFO.KV_{self.given['bucket']}"
        answer = await client.request(subject, timeout=_CONNECT_S)
        with suppress(msgspec.MsgspecError):
            return _SERVER_TIME.decode(answer.data).ts
        return None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        with self.failing(nats.errors.Error):
            try:
                yield
            except ServiceUnavailableError as exc:
                self._bucket = None
                if exc.description:  # such as a bucket that is full
                    raise ConnectionError(exc.description) from exc
                raise ConnectionError(
                    "JetStream is missing or not ready: start nats-server with -js; "
                    "a cluster needs most of its servers"
                ) from exc
            except Exception:
                # The bucket may be gone, if the server has lost its data.
                self._bucket = None
                raise


def _name(key: str) -> str:
    """Return a key in the letters and digits that the server accepts."""
    return key.encode().hex()


_TLS_FILES: Final = ("ca", "cert", "key")


class _ServerTime(msgspec.Struct, frozen=True):
    """The field of a stream's description that the library omits."""

    ts: datetime | None = None


_SERVER_TIME: Final = msgspec.json.Decoder(_ServerTime)


async def _closed(client: Client) -> None:
    """Close a client; after a failed TLS, and with a silent server, it may hang."""
    with suppress(nats.errors.Error, OSError):
        async with asyncio.timeout(_CLOSE_S):
            await client.close()


async def _progress(entries: Any) -> tuple[int, int]:
    """Return the numbers of sent and of pending entries of a subscription."""
    info = await entries.consumer_info()
    return info.delivered.consumer_seq, info.num_pending or 0


def _living(entries: Sequence[Msg], now: datetime | None) -> dict[str, bytes | None]:
    """Return the entries of a bucket whose lease has not expired.

    A bucket may keep entries far longer than leases. Ages are measured by the server's
    clock, since this machine's clock may differ.
    """
    there: dict[str, bytes | None] = {}
    for entry in entries:
        with suppress(UsageError):
            age = now - entry.metadata.timestamp if now else timedelta()
            if age.total_seconds() > Record.decode(entry.data).lease_s:
                continue
        there |= _read(entry)
    return there


def _read(entry: Msg) -> dict[str, bytes | None]:
    name = entry.subject.rpartition(".")[2]
    with suppress(ValueError):
        name = bytes.fromhex(name).decode()
    # Erasing an entry leaves a marker in its place.
    erased = entry.headers and "KV-Operation" in entry.headers
    return {name: None if erased else entry.data}
