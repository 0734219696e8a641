"""The toy transport with one mistake each: what the kit has to find.

A mistake is a function in the place of one method: it is given the end, the method, and
what the method is called with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from kvwire_certify.targets.toy import Toy

KEPT: list[Any] = []
Usual = Callable[..., Any]


class Direct(Toy):
    """Writes the answer to its caller's memory itself."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        answer = await self.ask(reference, timeout_s)
        if len(answer) == len(into):
            into[:] = answer
        return len(answer) == len(into)


def planted(method: str, base: type[Toy] = Toy) -> Callable[[Usual], type[Toy]]:
    """Return a transport whose method is a function with a mistake."""

    def plant(mistake: Usual) -> type[Toy]:
        async def instead(end: Toy, *given: Any) -> Any:
            return await mistake(end, getattr(super(made, end), method), *given)

        made = type(mistake.__name__, (base,), {method: instead})
        return made

    return plant


async def late(into: memoryview, data: bytes = b"\xee" * 64) -> None:
    """Write a little later than one may."""
    await asyncio.sleep(0.002)
    into[: len(data)] = data


@planted("get", Direct)
async def writes_after_cancel(_: Toy, get: Usual, *given: Any) -> Any:
    """The answer to a cancelled get is written when it comes."""
    KEPT.append(asyncio.ensure_future(get(*given)))
    return await asyncio.shield(KEPT[-1])


@planted("get", Direct)
async def writes_after_timeout(_: Toy, get: Usual, *given: Any) -> Any:
    """The answer to a get that timed out is written when it comes."""
    *what, timeout_s = given
    work = asyncio.ensure_future(get(*what, None))
    KEPT.append(work)
    await asyncio.wait([work], timeout=timeout_s)
    if not work.done():
        raise TimeoutError
    return work.result()


@planted("get", Direct)
async def writes_after_death(end: Toy, get: Usual, *given: Any) -> Any:
    """A failed get still writes bytes that came before its peer died."""
    with contextlib.suppress(ConnectionError):
        if await get(*given):
            return True
    with contextlib.suppress(OSError):
        await end.ask(b"", 1)  # a peer that lives
        return False
    KEPT.append(asyncio.ensure_future(late(given[1])))
    return False


class WritesAfterClose(Direct):
    """What was under way when it was closed is written behind that."""

    views: tuple[memoryview, ...] = ()

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        self.views = (into,)
        landed = await super().get(reference, into, timeout_s)
        self.views = ()
        return landed

    async def close(self) -> None:
        KEPT.extend(map(asyncio.ensure_future, map(late, self.views)))
        await super().close()


@planted("serve")
async def writes_after_withdrawal(end: Toy, _: Usual, *given: Any) -> None:
    """Whether memory may be written is looked up before the bytes have come."""
    reader, writer = given
    view = end.offered.get(await reader.readexactly(16), memoryview(b""))
    with contextlib.suppress(ConnectionError):
        data = await reader.read()
        if not data:
            writer.write(view)
        elif len(data) == len(view):
            await asyncio.sleep(0.03)
            view[:] = data
            writer.write(b"done")
        await writer.drain()
    writer.close()


@planted("put")
async def reads_after_cancel(_: Toy, put: Usual, *given: Any) -> Any:
    """A put sends what its memory holds when there is time for it."""

    async def later() -> Any:
        await asyncio.sleep(0.02)
        return await put(*given)

    KEPT.append(asyncio.ensure_future(later()))
    return await asyncio.shield(KEPT[-1])


@planted("withdraw")
async def stale(end: Toy, withdraw: Usual, reference: bytes) -> None:
    """A reference is the place of its memory."""
    data = end.offered[reference]
    await withdraw(reference)
    end.offered[reference] = memoryview(bytearray(data))
    loop = asyncio.get_running_loop()
    loop.call_soon(end.offered.__setitem__, reference, data)


class OnlyGets(Toy):
    @classmethod
    def can(cls, verb: str) -> bool:
        return verb == "get"


@planted("serve", OnlyGets)
async def torn(end: Toy, _: Usual, *given: Any) -> None:
    """Answers in parts, and looks at the right to them only once."""
    reader, writer = given
    view = end.offered.get(await reader.read(), memoryview(b""))
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(view), len(view) // 8 or 1):
            writer.write(view[start : start + (len(view) // 8 or 1)])
            await writer.drain()
            await asyncio.sleep(0.0005)
    writer.close()


@planted("get", Direct)
async def hole(end: Toy, _: Usual, *given: Any) -> bool:
    """The last bytes of a get are forgotten."""
    reference, into, timeout_s = given
    answer = await end.ask(reference, timeout_s)
    if len(answer) == len(into):
        into[: len(into) - 512] = answer[:-512]
    return len(answer) == len(into)


@planted("get")
async def misplaced(_: Toy, get: Usual, *given: Any) -> Any:
    """Two pieces of a get change their places."""
    answer, half = await get(*given), len(given[1]) // 2
    return answer and answer[half:] + answer[:half]


@planted("get", Direct)
async def damaged(_: Toy, get: Usual, *given: Any) -> Any:
    """A byte is changed on its way."""
    landed = await get(*given)
    if landed:
        given[1][100] ^= 1
    return landed


@planted("put")
async def lost(*_: object) -> bool:
    """A put is acknowledged before it is written, and then it is not."""
    return True


@planted("offer")
async def forgets(end: Toy, offer: Usual, data: memoryview) -> Any:
    """What was offered is not there any more."""
    reference = await offer(data)
    end.offered[reference] = memoryview(b"")
    return reference


@planted("get", Direct)
async def fails(end: Any, get: Usual, *given: Any) -> Any:
    """An operation behind a cancelled one fails."""
    if hasattr(end, "cancelled"):
        raise ConnectionError("broken by a cancel")
    try:
        return await get(*given)
    except asyncio.CancelledError:
        end.cancelled = True
        raise


@planted("get", Direct)
async def slow(_: Toy, get: Usual, *given: Any) -> Any:
    """A get takes longer than the limit of the test, and ends."""
    await asyncio.sleep(1.5)
    return await get(*given)


@planted("open")
async def never_opens(*_: object) -> None:
    """The right end has no device."""
    raise OSError("there is no such device")


@planted("offer")
async def offers_nothing(*_: object) -> None:
    """The right end cannot offer its memory."""
    raise OSError("memory cannot be registered")


@planted("get", Direct)
async def hangs(_: Toy, get: Usual, *given: Any) -> bool:
    """A get waits for an answer that nobody will send."""
    return await get(*given) or await asyncio.Event().wait()


@planted("get", Direct)
async def blocks(_: Toy, get: Usual, *given: Any) -> Any:
    """The same, in a call that stops the loop."""
    landed = await get(*given)
    if not landed:
        time.sleep(60)  # noqa: ASYNC251 - it is the mistake
    return landed


@planted("get", Direct)
async def crashes(_: Toy, get: Usual, *given: Any) -> Any:
    """A get by a reference that has ended takes its process with it."""
    landed = await get(*given)
    if not landed:
        os.kill(os.getpid(), signal.SIGSEGV)
    return landed


@planted("withdraw")
async def crashes_there(*_: object) -> None:
    """The same at the other end."""
    os.kill(os.getpid(), signal.SIGSEGV)


@planted("connect")
async def polls_while_idle(_: Toy, connect: Usual, peer: bytes) -> None:
    """A task looks for something to do, again and again."""

    async def poll() -> None:
        while True:  # noqa: ASYNC110 - it is the mistake
            await asyncio.sleep(0)

    await connect(peer)
    KEPT.append(asyncio.ensure_future(poll()))


@planted("ask")
async def keeps_memory(_: Toy, ask: Usual, *given: Any) -> Any:
    """Every answer is kept for ever."""
    KEPT.append(await ask(*given))
    return KEPT[-1]


@planted("close")
async def keeps_descriptors(_: Toy, close: Usual) -> None:
    """Each connection leaves a descriptor open."""
    KEPT.append(os.dup(0))
    await close()


@planted("close")
async def keeps_threads(_: Toy, close: Usual) -> None:
    """Each connection leaves a thread."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    await close()
