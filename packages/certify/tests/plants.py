"""The toy transport with one mistake each: what the kit has to find."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from typing import Any

from kvwire_certify.targets.toy import Toy

KEPT: list[Any] = []


async def late(into: memoryview, data: bytes = b"\xee" * 64) -> None:
    """Write a little later than one may."""
    await asyncio.sleep(0.002)
    into[: len(data)] = data


class Direct(Toy):
    """Writes the answer to its caller's memory itself."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        answer = await self.ask(reference, timeout_s)
        if len(answer) == len(into):
            into[:] = answer
        return len(answer) == len(into)


class WritesAfterCancel(Direct):
    """The answer to a cancelled get is written when it comes."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        work = asyncio.ensure_future(super().get(reference, into, timeout_s))
        KEPT.append(work)
        return await asyncio.shield(work)


class WritesAfterTimeout(Direct):
    """So is that to a get whose time is over."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        work = asyncio.ensure_future(super().get(reference, into, None))
        KEPT.append(work)
        done, _ = await asyncio.wait([work], timeout=timeout_s)
        if not done:
            raise TimeoutError
        return work.result()


class WritesAfterDeath(Direct):
    """What has come from a peer that died is written after the get has failed."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        try:
            landed = await super().get(reference, into, timeout_s)
        except ConnectionError:
            landed = False
        if not landed:
            with contextlib.suppress(OSError):
                await super().ask(b"", 1)  # a peer that lives
                return landed
            KEPT.append(asyncio.ensure_future(late(into)))
        return landed


class WritesAfterClose(Direct):
    """What was under way when it was closed is written behind that."""

    views: list[memoryview]

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        self.views = [into]
        landed = await super().get(reference, into, timeout_s)
        self.views = []
        return landed

    async def close(self) -> None:
        KEPT.extend(map(asyncio.ensure_future, map(late, getattr(self, "views", []))))
        await super().close()


class WritesAfterWithdrawal(Toy):
    """Whether memory may be written is looked up before the bytes have come."""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        reference = await reader.readexactly(16)
        view = self.offered.get(reference, memoryview(b""))
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


class ReadsAfterCancel(Toy):
    """A put sends what its memory holds when there is time for it."""

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        async def later() -> bool:
            await asyncio.sleep(0.02)
            return await super(ReadsAfterCancel, self).put(reference, data, timeout_s)

        work = asyncio.ensure_future(later())
        KEPT.append(work)
        return await asyncio.shield(work)


class Stale(Toy):
    """A reference is the place of its memory."""

    async def offer(self, data: memoryview) -> bytes:
        reference = await super().offer(data)
        self.stale = {**getattr(self, "stale", {}), reference: data}
        return reference

    async def withdraw(self, reference: bytes) -> None:
        await super().withdraw(reference)
        self.offered[reference] = memoryview(bytearray(self.stale[reference]))
        asyncio.get_running_loop().call_soon(
            self.offered.__setitem__, reference, self.stale[reference]
        )


class Torn(Toy):
    """Answers in parts, and looks at the right to them only once."""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = await reader.read()
        view = self.offered.get(request, memoryview(b""))
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(view), len(view) // 8 or 1):
                writer.write(view[start : start + (len(view) // 8 or 1)])
                await writer.drain()
                await asyncio.sleep(0.0005)
        writer.close()

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        return await Toy.put(self, b"x" * 16, data, timeout_s)

    @classmethod
    def can(cls, verb: str) -> bool:
        return verb == "get"


class Hole(Toy):
    """The last bytes of a get are forgotten."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        answer = await self.ask(reference, timeout_s)
        if len(answer) == len(into):
            into[: len(into) - 512] = answer[:-512]
        return len(answer) == len(into)


class Misplaced(Toy):
    """Two pieces of a get change their places."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool | bytes:
        answer = await self.ask(reference, timeout_s)
        half = len(into) // 2
        return len(answer) == len(into) and answer[half:] + answer[:half]


class Damaged(Direct):
    """A byte is changed on its way."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        landed = await super().get(reference, into, timeout_s)
        if landed:
            into[100] ^= 1
        return landed


class Lost(Toy):
    """A put is acknowledged before it is written, and then it is not."""

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        return True


class Forgets(Toy):
    """What was offered is not there any more."""

    async def offer(self, data: memoryview) -> bytes:
        reference = await super().offer(data)
        self.offered[reference] = memoryview(b"")
        return reference


class Fails(Direct):
    """An operation behind a cancelled one fails."""

    cancelled = False

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        if self.cancelled:
            raise ConnectionError("broken by a cancel")
        try:
            return await super().get(reference, into, timeout_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class Slow(Direct):
    """A get takes longer than the limit of the test, and ends."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        await asyncio.sleep(1.5)
        return await super().get(reference, into, timeout_s)


class NeverOpens(Toy):
    """The right end has no device."""

    async def open(self, memory: memoryview) -> bytes:
        raise OSError("there is no such device")


class OffersNothing(Toy):
    """The right end cannot offer its memory."""

    async def offer(self, data: memoryview) -> bytes:
        raise OSError("memory cannot be registered")


class Hangs(Direct):
    """A get waits for an answer that nobody will send."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        landed = await super().get(reference, into, timeout_s)
        if not landed:
            await asyncio.Event().wait()
        return landed


class Blocks(Direct):
    """The same, in a call that stops the loop."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        landed = await super().get(reference, into, timeout_s)
        if not landed:
            time.sleep(60)  # noqa: ASYNC251 - it is the mistake
        return landed


class Crashes(Direct):
    """A get by a reference that has ended takes its process with it."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        landed = await super().get(reference, into, timeout_s)
        if not landed:
            os.kill(os.getpid(), signal.SIGSEGV)
        return landed


class CrashesThere(Toy):
    """The same at the other end."""

    async def withdraw(self, reference: bytes) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class PollsWhileIdle(Toy):
    """A task looks for something to do, again and again."""

    async def connect(self, peer: bytes) -> None:
        await super().connect(peer)
        KEPT.append(asyncio.ensure_future(self.poll()))

    async def poll(self) -> None:
        while True:  # noqa: ASYNC110 - it is the mistake
            await asyncio.sleep(0)


class KeepsMemory(Toy):
    """What has come is kept."""

    async def ask(self, request: bytes, timeout_s: float | None) -> bytes:
        answer = await super().ask(request, timeout_s)
        KEPT.append(answer)
        return answer


class KeepsDescriptors(Toy):
    """Each connection leaves a descriptor open."""

    async def close(self) -> None:
        KEPT.append(os.dup(0))
        await super().close()


class KeepsThreads(Toy):
    """Each connection leaves a thread."""

    async def close(self) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        await super().close()
