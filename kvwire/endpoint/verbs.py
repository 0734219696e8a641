"""The four verbs of KV transfers: pull and push ask a peer, publish and expect wait.

They are the same two ends with the same arguments; what differs is who speaks first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvwire.errors import UsageError
from kvwire.kv.blocks import Blocks
from kvwire.kv.geometry import Tokens
from kvwire.kv.paged import PagedCache
from kvwire.transfer import Incoming, Outgoing
from kvwire.transfers.dedup import Hashes, Have
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.outgoing import OutgoingState
from kvwire.types import Deadline

if TYPE_CHECKING:
    from kvwire.endpoint.communicator import CommunicatorState


class PullPush(ABC):
    """What a connection can ask its peer for."""

    communicator: CommunicatorState

    @abstractmethod
    def start(self, end: IncomingState | OutgoingState) -> None:
        """Ask the peer."""

    def pull(  # noqa: PLR0913 - each is a choice of the caller
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        *,
        deadline: Deadline = None,
        priority: int = 0,
        tokens: Tokens = None,
        hashes: Hashes = None,
        have: Have = None,
        lease_s: float | None = None,
    ) -> Incoming:
        """Ask the peer for a transfer that it publishes, now or later.

        Args:
            id: The name both applications know it by.
            cache: Where it lands.
            blocks: Block ids in token order, or ``{group: ids}``.
            deadline: As for :meth:`send`; the outcome then is what has landed.
            priority: 0 to 255; chunks of a higher one go first.
            tokens: Valid tokens in the list, where the last block is not full.
            hashes: One for each block; lets ``have`` name what is here already.
            have: Hashes this side has, or a predicate: those blocks are not sent.
            lease_s: How long to wait for another link after a lost one.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent.
            ConnectionClosed: The connection is closing or closed.
        """
        state = IncomingState(
            self.communicator,
            id,
            cache,
            blocks,
            deadline=deadline,
            priority=priority,
            tokens=tokens,
            lease_s=lease_s,
            hashes=hashes,
            have=have,
        )
        self.start(state)
        return Incoming(state)

    def push(  # noqa: PLR0913 - each is a choice of the caller
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        *,
        deadline: Deadline = None,
        priority: int = 0,
        tokens: Tokens = None,
        hashes: Hashes = None,
        lease_s: float | None = None,
        group_bytes: int | None = None,
        growing: bool = False,
    ) -> Outgoing:
        """Send the peer a transfer that it expects, now or later.

        Args:
            id: The name both applications know it by.
            cache: Where it lies.
            blocks: Block ids in token order, or ``{group: ids}``.
            deadline: As for :meth:`send`.
            priority: 0 to 255; chunks of a higher one go first.
            tokens: Valid tokens in the list, where the last block is not full.
            hashes: One for each block.
            lease_s: How long to wait for another link after a lost one.
            group_bytes: Layers smaller than this together travel together; None for
                the default, 1 for layer by layer.
            growing: Not all blocks that ``tokens`` need are known yet, as in chunked
                prefill; ``extend`` names the rest.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent.
            ConnectionClosed: The connection is closing or closed.
        """
        state = OutgoingState(
            self.communicator,
            id,
            cache,
            blocks,
            deadline=deadline,
            priority=priority,
            tokens=tokens,
            lease_s=lease_s,
            hashes=hashes,
            group_bytes=group_bytes,
            growing=growing,
        )
        self.start(state)
        return Outgoing(state)


class PublishExpect(ABC):
    """What a communicator can offer to, or take from, whoever asks."""

    @property
    @abstractmethod
    def communicator(self) -> CommunicatorState:
        """Itself."""

    @abstractmethod
    def start(self, end: IncomingState | OutgoingState) -> None:
        """Wait for the peer, or meet one that waits."""

    def publish(  # noqa: PLR0913 - each is a choice of the caller
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        *,
        consumers: int = 1,
        deadline: Deadline = None,
        priority: int = 0,
        tokens: Tokens = None,
        hashes: Hashes = None,
        lease_s: float | None = None,
        group_bytes: int | None = None,
        growing: bool = False,
    ) -> Outgoing:
        """Offer a transfer to whoever pulls it by its id.

        Args:
            id: The name both applications know it by; free again once it has ended.
            cache: Where it lies.
            blocks: Block ids in token order, or ``{group: ids}``.
            consumers: How many pull it, such as the ranks of a tensor-parallel group.
            deadline: An instant of the loop's clock, or a duration; see ``send``.
            priority: 0 to 255; chunks of a higher one go first.
            tokens: Valid tokens in the list, where the last block is not full.
            hashes: One for each block.
            lease_s: How long the blocks are held while nobody is at work on them.
            group_bytes: Layers smaller than this together travel together; None for
                the default, 1 for layer by layer.
            growing: Not all blocks that ``tokens`` need are known yet, as in chunked
                prefill; ``extend`` names the rest.

        Raises:
            UsageError: The id is in use, or the cache or blocks cannot be used.
        """
        if consumers < 1:
            raise UsageError(f"consumers={consumers}: at least 1")
        state = OutgoingState(
            self.communicator,
            id,
            cache,
            blocks,
            consumers=consumers,
            deadline=deadline,
            priority=priority,
            tokens=tokens,
            lease_s=lease_s,
            hashes=hashes,
            group_bytes=group_bytes,
            growing=growing,
        )
        self.start(state)
        return Outgoing(state)

    def expect(  # noqa: PLR0913 - each is a choice of the caller
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        *,
        deadline: Deadline = None,
        priority: int = 0,
        tokens: Tokens = None,
        hashes: Hashes = None,
        have: Have = None,
        lease_s: float | None = None,
    ) -> Incoming:
        """Give memory to a transfer that a peer pushes by its id.

        The arguments are those of :meth:`Connection.pull <kvwire.Connection.pull>`.

        Raises:
            UsageError: The id is in use, or the cache or blocks cannot be used.
        """
        state = IncomingState(
            self.communicator,
            id,
            cache,
            blocks,
            deadline=deadline,
            priority=priority,
            tokens=tokens,
            lease_s=lease_s,
            hashes=hashes,
            have=have,
        )
        self.start(state)
        return Incoming(state)
