"""A communicator: one identity, its listeners and connections, all on one loop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from typing import Any, Self, Unpack

from kvwire.aio import (
    FORKED,
    AsyncWith,
    Opening,
    run_to_completion,
    yields_before_raising,
)
from kvwire.config import Config, ConfigOptions
from kvwire.connection import Connection, Peer
from kvwire.directory import Record
from kvwire.directory.limits import MEMBER_LEASE_S
from kvwire.directory.selector import FIELDS
from kvwire.driver.counters import Counters
from kvwire.endpoint.communicator import CommunicatorState
from kvwire.endpoint.membership import spec_digests
from kvwire.endpoint.observers import Observers
from kvwire.endpoint.snapshot import Snapshot, TransferSnapshot
from kvwire.errors import UsageError, wrong_type
from kvwire.kv.blocks import Blocks
from kvwire.kv.paged import PagedCache
from kvwire.memory.buffers import Memory
from kvwire.region import Region
from kvwire.transfer import Incoming, Outgoing
from kvwire.transfers.coded import incoming_kind, outgoing_kind
from kvwire.transfers.options import PublishOptions, ReceiveOptions, check_options
from kvwire.types import Access, AccessName, Address


class open(Opening):  # noqa: A001, N801 - `kvwire.open` is the public name, and reads as a call
    """Open a communicator: ``await kvwire.open(...)``, or ``async with``.

    Args:
        config: A Config, the path of a TOML file, or None for the environment alone.
        **arguments: Keys of Config that override it, such as ``name="decode-0"``.

    Attributes:
        config: What they come to.

    Raises:
        UsageError: The configuration cannot be used.

    Cancel safety: safe, opening does not wait for anything.
    """

    _call = "kvwire.open"

    def __init__(
        self,
        config: Config | str | os.PathLike[str] | None = None,
        **arguments: Unpack[ConfigOptions],
    ) -> None:
        self.config: Config
        if isinstance(config, Config):
            # Checked here, since a Config that was made by hand has not been.
            self.config = config.replace(**arguments)
        else:
            self.config = Config.load(config, **arguments)
        self._communicator: Communicator | None = None

    def __await__(self) -> Generator[Any, Any, Communicator]:
        return self._open().__await__()

    async def __aenter__(self) -> Communicator:
        """Open the communicator; it is closed at the end of the block."""
        self._communicator = await self._open()
        return self._communicator

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, or abort if the block was left by an exception."""
        assert self._communicator is not None
        await self._communicator.__aexit__(kind, error, trace)

    @yields_before_raising
    async def _open(self) -> Communicator:
        self._begin()
        communicator = Communicator(self.config)
        if self.config.inspect or self.config.inspect_signal:
            try:
                await communicator._state.inspector.start()  # noqa: SLF001 - of this file
            except BaseException:
                await run_to_completion(communicator.close())
                raise
        return communicator


class Communicator(AsyncWith):
    """Connects to peers and is connected to. Made by :func:`kvwire.open`."""

    __slots__ = ("__weakref__", "_state")

    def __init__(self, config: Config) -> None:
        self._state = CommunicatorState(config, Connection)

    def __repr__(self) -> str:
        return repr(self._state)

    @property
    def config(self) -> Config:
        """Return its configuration."""
        return self._state.config

    @property
    def counters(self) -> Counters:
        """Count what has happened so far."""
        return self._state.counters

    @property
    def watchers(self) -> Observers[Connection]:
        """Hold those who are told when KV transfers begin and end."""
        return self._state.watchers

    @property
    def incarnation(self) -> bytes:
        """Return 16 random bytes, by which a peer knows this start from others."""
        return self._state.incarnation

    @property
    def name(self) -> str:
        """Return the name that peers see."""
        return self._state.name

    @property
    def closed(self) -> bool:
        """Tell whether it is closing, or closed."""
        return self._state.closed

    @property
    def open_transfers(self) -> int:
        """Count the transfers that have no outcome."""
        return self._state.open_transfers

    @property
    def quarantined_bytes(self) -> int:
        """Count the bytes of ended requests that a transport may still touch."""
        return self._state.quarantined_bytes

    @property
    def live_connections(self) -> tuple[Connection, ...]:
        """Return the connections that have not ended; a snapshot."""
        return tuple(c.public for c in self._state.live_connections)

    # --- connections ------------------------------------------------------------------

    async def listen(self, address: str | Address) -> Address:
        """Accept connections on an address; they come out of :meth:`connections`.

        Args:
            address: ``"host:port"`` or ``"scheme://..."``; port 0 takes any free one.
                Every address of a host's name is listened on, with the same port.

        Returns:
            The bound address, with the real port; the first one of a name.

        Raises:
            UsageError: The address cannot be used, or needs a trust mode.
            BackendUnavailable: Its transport is not installed, or ruled out by config.
            ListenError: It is taken, or not of this host. It is an OSError as well.

        Cancel safety: safe, nothing stays bound.
        """
        self._state.thread.check("Communicator.listen")
        return await self._state.listen(address)

    async def connect(
        self,
        address: str | Address,
        *,
        transport: str | Iterable[str] | None = None,
        timeout_s: float | None = None,
    ) -> Connection:
        """Connect to a communicator that listens.

        Args:
            address: Where it listens. The addresses of a name are dialled in turn, a
                quarter of a second apart, and the first that answers is used.
            transport: Require one, or one of several in order of preference.
            timeout_s: Until the connection is usable; None for the configured
                ``handshake_timeout_s``.

        Raises:
            UsageError: The address cannot be used, or needs a trust mode.
            BackendUnavailable: No required transport can run here.
            HandshakeError: The sides do not agree; names the fields.
            ConnectionClosed: The peer ended the connection during the handshake.
            ConnectError: Nobody listens there, it cannot be reached, or this
                communicator itself listens there. It is an OSError as well.

        Cancel safety: safe, a half-made connection is aborted.
        """
        self._state.thread.check("Communicator.connect")
        state = await self._state.connect(address, transport, timeout_s)
        connection: Connection = state.public
        return connection

    def connections(self) -> AsyncIterator[Connection]:
        """Iterate inbound connections, in the order their handshakes ended.

        Ends when the communicator is closed. Several tasks may iterate; each
        connection goes to one of them.

        Cancel safety: safe, no connection is lost, and the iterator can be used again.
        """
        self._state.thread.check("Communicator.connections")
        return self._state.connections()

    async def accept(self) -> Connection:
        """Wait for the next inbound connection.

        Raises:
            ClosedOK: The communicator was closed.

        Cancel safety: safe, no connection is lost.
        """
        self._state.thread.check("Communicator.accept")
        connection: Connection = await self._state.accept()
        return connection

    # --- fleets -----------------------------------------------------------------------

    def peer(self, where: str | Record) -> Peer:
        """Name a peer by its address, or by what it says of itself in the directory.

        Nothing is dialled before it is used. The same text names the same peer, and a
        peer has one connection: to spread load, name a peer for each of
        :meth:`members`.

        Args:
            where: ``"host:port"``, a selector such as ``"role=decode,model=demo"``, or
                one of :meth:`members`.

        Raises:
            UsageError: The text is neither, the directory of the configuration cannot
                be used, or there are too many peers.
            BackendUnavailable: The library of the directory is missing.
            ClosedOK: The communicator is closed.
        """
        self._state.thread.check("Communicator.peer")
        return Peer(self._state.peer(where))

    @yields_before_raising
    async def members(self, selector: str = "") -> tuple[Record, ...]:
        """Return the members of the directory that a selector means, but not this one.

        The directory is watched from the first call on, and later ones return at once
        with what is known. Those with the least ``load`` come first, equal ones in
        random order.

        Args:
            selector: As for :meth:`peer`; everybody by default.

        Raises:
            ConnectError: Nobody is known yet, and the directory cannot be reached.
            UsageError: The text is no selector, or the directory cannot be used.
            BackendUnavailable: The library of the directory is missing.
            ClosedOK: The communicator is closed.

        Cancel safety: safe, it only looks.
        """
        self._state.thread.check("Communicator.members")
        return await self._state.members(selector)

    def announce(
        self,
        *,
        role: str = "",
        model: str = "",
        cache: PagedCache | None = None,
        labels: Mapping[str, str] | None = None,
        load: float = 0.0,
        address: str | Address | None = None,
        lease_s: float = MEMBER_LEASE_S,
    ) -> None:
        """Announce this communicator in the directory of its configuration.

        Returns at once: the record is written as soon as the directory can be reached,
        renewed, and withdrawn by :meth:`close`. Another call replaces it, for instance
        with another load. What a record says is believed by nobody: see
        docs/topics/directories.md.

        Args:
            role: What it does, such as ``"decode"``.
            model: A fingerprint of its model; by default the cache's.
            cache: Its cache, of whose specs the record has digests.
            labels: Whatever else selectors may ask for.
            load: How busy it is, from 0 to 1; the least busy is dialled first.
            address: Where it can be reached; by default where it has listened first.
            lease_s: How long it is believed to be there after its last sign of life.

        Raises:
            UsageError: It listens nowhere, or on all addresses, and ``address`` is not
                given; or a value is not allowed.
            BackendUnavailable: The library of the directory is missing.
            ClosedOK: The communicator is closed.
        """
        self._state.thread.check("Communicator.announce")
        if cache is not None and not isinstance(cache, PagedCache):
            raise wrong_type("cache", cache, "a kvwire.PagedCache")
        if labels is not None and not isinstance(labels, Mapping):
            raise wrong_type("labels", labels, "a mapping of names to texts")
        for name in FIELDS & (labels or {}).keys():
            raise UsageError(
                f"labels: selectors take {name!r} for what a record says by itself; "
                f"give the label another name"
            )
        specs = {} if cache is None else spec_digests(cache)
        if cache is not None and not model:
            model = next(iter(cache.groups.values())).spec.fingerprint
        self._state.announce(
            address,
            role=role,
            model=model,
            specs=specs,
            labels=dict(labels or {}),
            load=load,
            lease_s=lease_s,
        )

    async def withdraw(self) -> None:
        """Take the announcement back: nobody who asks the directory is sent here now.

        Connections stay as they are. Never raises; if the directory cannot be reached
        the lease ends the record.

        Cancel safety: safe, it is not renewed any more.
        """
        self._state.thread.check("Communicator.withdraw")
        await self._state.membership.withdraw()

    # --- memory -----------------------------------------------------------------------

    def register(self, buffer: Memory, access: AccessName | Access = "read") -> Region:
        """Lend memory that peers may reach, each with a grant.

        Args:
            buffer: Contiguous memory, or fragments; writable if it may be put into.
            access: ``"read"`` lets peers get, ``"write"`` put, ``"readwrite"`` both.

        Raises:
            UsageError: The memory cannot be used.
        """
        self._state.thread.check("Communicator.register")
        return Region(self._state, self._state.register(buffer, access))

    # --- KV transfers -----------------------------------------------------------------

    def publish(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[PublishOptions],
    ) -> Outgoing:
        """Offer a transfer to whoever pulls it by its id.

        Args:
            id: The name both applications know it by; free again once it has ended.
            cache: Where it lies.
            blocks: Block ids in token order, or ``{group: ids}``.
            consumers: How many pull it, such as the ranks of a tensor-parallel group.
            deadline: When it ends with what has landed; as for ``send``.
            priority: 0 to 255; chunks of a higher one go first.
            tokens: Valid tokens in the list, where the last block is not full.
            hashes: One for each block.
            content: A name of all the tokens, which both sides compare in place of
                their hashes: for blocks of other sizes.
            lease_s: How long the blocks are held while nobody is at work on them.
            codec: Encodes what moves, with loss: ``"fp8"``, ``"int8"`` or ``"int4"``;
                the peer names the same. See docs/topics/codecs.md.
            group_bytes: Layers smaller than this together travel together; None for
                the default, 1 for layer by layer.
            growing: Not all blocks that ``tokens`` need are known yet, as in chunked
                prefill; ``extend`` names the rest.

        Raises:
            UsageError: The id is in use, or the cache or blocks cannot be used.
        """
        self._state.thread.check("Communicator.publish")
        check_options("publish", options)
        consumers = options.get("consumers", 1)
        state = outgoing_kind(options)(
            self._state, id, cache, blocks, options, consumers
        )
        self._state.start(state)
        return Outgoing(state)

    def expect(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> Incoming:
        """Give memory to a transfer that a peer pushes by its id.

        The arguments are those of :meth:`Connection.pull <kvwire.Connection.pull>`.

        Raises:
            UsageError: The id is in use, or the cache or blocks cannot be used.
        """
        self._state.thread.check("Communicator.expect")
        check_options("expect", options)
        state = incoming_kind(options)(self._state, id, cache, blocks, options)
        self._state.start(state)
        return Incoming(state)

    def transfers(self) -> tuple[TransferSnapshot, ...]:
        """Show the transfers that are open now, oldest first, and what each waits for.

        For operators and logs: it looks at every open transfer.
        """
        self._state.thread.check("Communicator.transfers")
        return self._state.transfers()

    def snapshot(self) -> Snapshot:
        """Show what is open now: connections, transfers, stores on this loop, counters.

        Plain values, which ``msgspec.json.encode`` takes; ``kvwire top`` shows the same
        of a live process. See docs/howto/observe.md.
        """
        self._state.thread.check("Communicator.snapshot")
        return self._state.snapshot()

    async def fired(self, event: Any) -> None:
        """Wait until an event on a stream of a GPU has fired; the stream does not wait.

        For blocks that kernels still read when ``pull`` or ``expect`` wants them: those
        write from streams of their own.

        Args:
            event: Of torch or CuPy, recorded behind the kernels.

        Raises:
            UsageError: It is no such event.
            BackendUnavailable: Its GPU has failed, or does not work.
            ClosedOK: The communicator is closed.

        Cancel safety: safe, it only watches.
        """
        self._state.thread.check("Communicator.fired")
        await self._state.fired(event)

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """Close every listener and connection, gracefully; at most ``close_timeout_s``.

        A producer whose transfer is settled here, and whose link was lost before it
        knew, is told so over another link within that time.

        A transport that cannot say by then that it touches no memory any more is left
        alone with it, and an error is logged: that memory stays in quarantine.

        Cancel safety: safe. What has begun to close goes on; call it again for the
        rest.
        """
        self._state.thread.check("Communicator.close")
        await self._state.close()

    def abort(self) -> None:
        """End every connection now. Never raises; ``close`` waits for what is left."""
        self._state.thread.check("Communicator.abort")
        self._state.abort()

    async def __aenter__(self) -> Self:
        """Return the communicator; it is closed at the end of the block."""
        self._state.thread.check("async with Communicator")
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, or abort if the block was left by an exception."""
        thread = self._state.thread
        if error is not None and thread.ident != FORKED:
            self.abort()
        await thread.leave(self.close)


open._opens = Communicator  # noqa: SLF001 - of this file
