"""A client of a store server: requests, answers and redialling.

Without an active connection a request fails at once, with the reason, so an engine
continues without its store. A connection may end by itself. The client ends it if the
server does not answer within a request's deadline. The client then redials, after
pauses that grow.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import NamedTuple

import msgspec

import kvwire
from kvwire.aio import Upkeep, run_to_completion
from kvwire.backend.contexts import without_context
from kvwire.config import Config
from kvwire.errors import (
    ConnectError,
    ConnectionClosed,
    ConnectionLost,
    DeadlineExceeded,
    HandshakeTimeout,
    KVWireError,
    RequestError,
    UsageError,
    error_text,
)
from kvwire.spi import common_version, each_message, send_now, version_mismatch
from kvwire_store.host_blocks import HostBlocks
from kvwire_store.limits import (
    STORE_GRACE_S,
    STORE_REDIAL_S,
    STORE_REDIAL_S_MAX,
    STORE_REQUEST_BYTES_MAX,
    STORE_TIMEOUT_S,
    STORE_VERB_TIMEOUT_S,
)
from kvwire_store.placement import Placement, Verb
from kvwire_store.server.host_windows import HostWindows
from kvwire_store.server.messages import (
    TAG,
    VERSIONS,
    AnswerT,
    Apply,
    ClientMessage,
    Delete,
    Names,
    NumberedReply,
    NumberedRequest,
    Stats,
    StatsReport,
    StoreDone,
    StoreHello,
    VerbDone,
    Welcome,
    decode_reply,
    encode,
)

logger: logging.Logger = logging.getLogger("kvwire.store")

Answered = Callable[[NumberedReply | KVWireError], None]
"""Gets the answer to a request, or the reason why there is none."""


async def ask_report(address: str, config: Config) -> StatsReport:
    """Return a server's report: its tiers, clients and counts.

    Cancel safety: safe, nothing stays connected.
    """
    async with _connected(address, config) as active:
        return await active.call(Stats(1), StatsReport)


async def delete_all(address: str, config: Config, tenant: str) -> int:
    """Delete all blocks of a tenant from a server; return their number.

    Cancel safety: safe, it may be called again.
    """
    async with _connected(address, config) as active:
        done = await active.call(Delete(1, None, tenant=tenant), StoreDone)
        if done.reason:
            raise KVWireError(f"{address}: {done.reason}")
        return done.deleted


@asynccontextmanager
async def _connected(address: str, config: Config) -> AsyncIterator[ActiveConnection]:
    config = config.replace(message_bytes=STORE_REQUEST_BYTES_MAX, resume=False)
    async with kvwire.open(config) as communicator:
        client = StoreClient(
            communicator, address, STORE_TIMEOUT_S, lambda: None, in_place=False
        )
        try:
            await client.open()
            yield client.now()
        finally:
            await run_to_completion(client.close())


class ActiveConnection:
    """Sends requests over one connection, from the server's welcome to its end."""

    def __init__(
        self, connection: kvwire.Connection, welcome: Welcome, timeout_s: float
    ) -> None:
        self.connection = connection
        self.welcome = welcome
        self._timeout_s = timeout_s
        self._within = timedelta(seconds=timeout_s)
        # Half of the requests that the server allows are for calls, which wait for
        # their turn. The others are for requests that are posted at once or not at all.
        self._requests = asyncio.Semaphore(-(-welcome.requests // 2))
        self._may_post = welcome.requests // 2
        self.berths: asyncio.Semaphore = asyncio.Semaphore(welcome.berths)
        # The numbers of requests, and of the messages that carry their blocks.
        self.numbers: Iterator[int] = count(1)
        self._answers: dict[int, _Waiting] = {}
        # Ends the connection if an answer is late: one timer for all of them.
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self.windows: HostWindows | None = None
        # The server's blocks, once its memory is mapped here.
        self.mapped: HostBlocks | None = None
        # How many requests without a task wait for an answer.
        self._posted = 0
        # Why no answer can come any more, once that is so.
        self._ended = ""
        # Called with the first answer.
        self.works: Callable[[], object] | None = None

    async def close_windows(self) -> None:
        """Stop reading in place; running copies keep their memory mapped.

        Cancel safety: safe, they are closed either way.
        """
        if self.windows is not None:
            windows = self.windows
            self.windows = None
            self.mapped = None
            await windows.close()

    async def tell(self, request: ClientMessage) -> None:
        """Send a message without an answer.

        Cancel safety: safe, it is sent or not.
        """
        await self.connection.send(TAG, encode(request), deadline=self._within)

    async def call(
        self,
        request: NumberedRequest,
        kind: type[AnswerT],
        timeout_s: float | None = None,
    ) -> AnswerT:
        """Send a request, and wait for its answer within a timeout.

        Cancel safety: safe, the answer is dropped when it arrives. Until then the
        request keeps its turn, since the server works on it.
        """
        await self._requests.acquire()
        if self._ended:
            self._requests.release()
            raise ConnectionLost(self._ended)
        answer = asyncio.get_running_loop().create_future()
        number = request.number
        # Called once: the server may work on a request whose caller has gone.
        self._expect(number, partial(self._over, answer), timeout_s or self._timeout_s)
        try:
            body = encode(request)
            if not send_now(self.connection, TAG, body):
                await self.connection.send(TAG, body, deadline=self._within)
            found = await answer
        except asyncio.CancelledError:  # its message goes out nevertheless
            answer.cancel()
            raise
        except BaseException:
            if self._forget(number) is not None:
                self._requests.release()
            if answer.done():
                answer.exception()  # not retrieved yet if the send has failed
            raise
        finally:
            # The exception refers to this frame and so to the moved blocks, in a
            # cycle.
            del answer
        return self.checked(found, kind)

    def checked(self, found: NumberedReply, kind: type[AnswerT]) -> AnswerT:
        """Return an answer of the right kind; any other one ends the connection."""
        if not isinstance(found, kind):
            self.connection.abort(
                f"{type(found).__name__} does not answer this request"
            )
            raise ConnectionLost(
                "the server sent an answer that does not match the request"
            )
        return found

    def post(self, request: NumberedRequest, answered: Answered) -> bool:
        """Send a request whose answer is passed to a function, in the callback.

        Returns:
            Whether it was sent at once. Then the function is called once: with the
            answer, or with the reason why there is none.
        """
        if self._ended or self._posted >= self._may_post:
            return False
        if not send_now(self.connection, TAG, encode(request)):
            return False
        self._posted += 1
        self._expect(request.number, answered, self._timeout_s, posted=True)
        return True

    def _over(
        self, answer: asyncio.Future[NumberedReply], found: NumberedReply | KVWireError
    ) -> None:
        """End a call, whose caller may have gone, with its answer or an error."""
        self._requests.release()
        if answer.done():
            return
        if isinstance(found, KVWireError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def _expect(
        self, number: int, answered: Answered, within_s: float, *, posted: bool = False
    ) -> None:
        """Note the function that gets the answer to a request."""
        late_at = self._loop.time() + within_s + STORE_GRACE_S
        # bounded by the server's requests
        self._answers[number] = _Waiting(answered, late_at, within_s, posted)
        if late_at < self._timer_at:
            self._set_timer(late_at)

    def _forget(self, number: int) -> Answered | None:
        """Drop the answer to a request; return the function that would get it."""
        waiting = self._answers.pop(number, None)
        if waiting is None:
            return None
        self._posted -= waiting.posted
        return waiting.answered

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None
        if at < math.inf:
            self._timer = without_context(self._loop.call_at, at, self._look)

    def _look(self) -> None:
        """End the connection if an answer is late; else look again at the next one."""
        now = self._loop.time()
        for number, waiting in self._answers.items():
            if waiting.late_at <= now:
                error = DeadlineExceeded(f"no answer within {waiting.within_s:g} s")
                self._forget(number)
                self.connection.abort(str(error))
                waiting.answered(error)
                return
        answers = self._answers.values()
        self._set_timer(min((one.late_at for one in answers), default=math.inf))

    async def apply(
        self, verb: Verb, names: Names, namespace: msgspec.Raw
    ) -> Placement:
        """Let the server execute a verb.

        Raises:
            KVWireError: The server did not execute it, or the connection has ended.

        Cancel safety: safe, the server may go on.
        """
        request = Apply.of(next(self.numbers), verb, names, namespace)
        placed = await self.call(request, VerbDone, STORE_VERB_TIMEOUT_S)
        if placed.reason:
            raise UsageError(placed.reason)
        if len(placed.states) != len(names):
            self.connection.abort(f"{len(placed.states)} states of {len(names)} blocks")
            raise ConnectionLost("the server answered for other blocks than requested")
        return placed.placement

    async def listen(self) -> None:
        """Receive answers until the connection ends; then fail the waiting requests.

        Cancel safety: the waiting requests fail.
        """
        why = "the client was closed"
        lives = True
        lost = False
        try:
            await each_message(self.connection, TAG, self._answered)
        except KVWireError as exc:
            lost = True
            why = str(exc)
            raise
        except Exception as exc:
            # The next connection may do better; nothing else would dial it.
            lost = True
            why = f"an answer could not be handled here: {error_text(exc)}"
            logger.exception("store client: an answer could not be handled")
            raise ConnectionLost(why) from None
        except GeneratorExit:  # the loop was dropped, with everything that waits
            lives = False
            raise
        finally:
            if lives:
                self.end(why, lost=lost)
                await self.close_windows()

    def _answered(self, raw: memoryview) -> bool:
        """Pass an answer to the call that waits for it; more may come."""
        reply = decode_reply(raw)
        if not isinstance(reply, NumberedReply):
            raise UsageError("the server sent a second welcome")
        if self.works is not None:
            self.works()
            self.works = None
        answered = self._forget(reply.number)
        if answered is not None:
            answered(reply)
        return True

    def end(self, why: str, *, lost: bool) -> None:
        """Fail every waiter, from a frame that no traceback references.

        The connection is aborted if it was lost, or if an answer was still to come.
        """
        self._ended = why
        self._set_timer(math.inf)
        if lost or self._answers:
            self.connection.abort(why)
        for number in list(self._answers):
            answered = self._forget(number)
            assert answered is not None
            # A separate exception for each waiter, since it collects the frames that it
            # passes.
            answered(ConnectionLost(why))


class _Waiting(NamedTuple):
    """A request that waits for its answer.

    Attributes:
        answered: Gets the answer.
        late_at: When the connection ends if there is none, on the loop's clock.
        within_s: The time that the answer has.
        posted: Whether a callback, and no task, waits for the answer.
    """

    answered: Answered
    late_at: float
    within_s: float
    posted: bool


class StoreClient:
    """Keeps a connection to a server, and redials after a loss. One event loop."""

    def __init__(
        self,
        communicator: kvwire.Communicator,
        address: str,
        timeout_s: float,
        changed: Callable[[], None],
        *,
        in_place: bool = True,
    ) -> None:
        self.reason: str = "it has not been dialled yet"
        self.active: ActiveConnection | None = None
        self._communicator = communicator
        self._address = address
        self._timeout_s = timeout_s
        self._changed = changed
        # Whether a server on this host is read in place.
        self._in_place = in_place
        self._upkeep = Upkeep(STORE_REDIAL_S, STORE_REDIAL_S_MAX)

    def now(self) -> ActiveConnection:
        """Return the active connection, or raise the reason why there is none."""
        if self.active is None:
            raise ConnectionLost(self.reason)
        return self.active

    async def open(self) -> None:
        """Dial for the first time; if the server is down, redial later.

        Raises:
            KVWireError: Dialling again would not help: the address or the key is wrong.

        Cancel safety: safe, nothing stays connected.
        """
        first: ActiveConnection | None = None
        try:
            first = await self._dial()
        except (ConnectError, ConnectionClosed, HandshakeTimeout, RequestError) as exc:
            self._went_down(exc)
        self._upkeep.start(partial(self._keep, first))

    async def close(self) -> None:
        """Close the connection, and stop dialling.

        The server learns that its client has gone, and does not take it for lost.

        Cancel safety: safe, it may be called again.
        """
        active = self.active
        await self._upkeep.close()
        if active is not None:  # it may not have started to listen
            await active.close_windows()
            # A server that is stuck does not keep its client.
            with suppress(TimeoutError):
                async with asyncio.timeout(STORE_GRACE_S):
                    await active.connection.close()
            active.connection.abort("the client was closed")

    # --- inside -----------------------------------------------------------------------

    async def _keep(self, active: ActiveConnection | None) -> None:
        """Receive answers while connected, and redial otherwise."""
        async for _ in self._upkeep:
            try:
                await (active or await self._dial()).listen()
            except KVWireError as exc:
                self._went_down(exc)
                active = None

    async def _dial(self) -> ActiveConnection:
        connection = await self._communicator.connect(
            self._address, timeout_s=self._timeout_s
        )
        try:
            active = await self._welcomed(connection)
        except BaseException as exc:
            connection.abort(str(exc))
            raise
        self.active = active
        self.reason = ""
        # Pauses become short again only after the server has answered a request.
        active.works = self._upkeep.back
        self._changed()
        return active

    async def _welcomed(self, connection: kvwire.Connection) -> ActiveConnection:
        within = timedelta(seconds=self._timeout_s)
        await connection.send(TAG, encode(StoreHello(*VERSIONS)), deadline=within)
        try:
            welcome = decode_reply(await connection.recv(TAG, deadline=within))
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"no welcome within {self._timeout_s:g} s: {self._address} speaks "
                f"kvwire, but is stuck or is not a store server"
            ) from None
        if not isinstance(welcome, Welcome):
            raise UsageError(
                f"the server's first message is {type(welcome).__name__}, not a welcome"
            )
        theirs = welcome.version, welcome.version
        if not common_version(VERSIONS, theirs):
            raise version_mismatch(VERSIONS, theirs, "the store server")
        active = ActiveConnection(connection, welcome, self._timeout_s)
        if self._in_place:
            await self._open_windows(active)
        return active

    async def _open_windows(self, active: ActiveConnection) -> None:
        """Read the server's memory in place as soon as that is possible."""
        welcome = active.welcome
        if not welcome.slab_bytes:
            return
        try:
            active.windows = await HostWindows.open(
                active.connection,
                welcome.slab_bytes,
                alone=welcome.alone,
                timeout_s=self._timeout_s,
            )
        except KVWireError as exc:
            logger.info("the store server is not read in place: %s", exc)
            return
        active.windows.blocks.add_done_callback(partial(self._mapped, active))

    def _mapped(
        self, active: ActiveConnection, blocks: asyncio.Future[HostBlocks]
    ) -> None:
        if not blocks.cancelled():
            active.mapped = blocks.result()
            self._changed()

    def _went_down(self, error: Exception) -> None:
        self.active = None
        self.reason = error_text(error)
        self._upkeep.lost(self.reason)
        self._changed()
