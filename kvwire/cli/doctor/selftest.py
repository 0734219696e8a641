"""``kvwire doctor --selftest ADDR``: the same command on two hosts, one report on both.

Whoever can bind the address listens, and the other one connects, waiting for it if it
is early. It then tries every transport that both sides can use, at several sizes of
fragments, and sends what it found back, so that both users have the same report.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Final

from kvwire import (
    Communicator,
    ConnectError,
    Connection,
    ConnectionLost,
    KVWireError,
    ListenError,
    UsageError,
)
from kvwire.cli.doctor.attendant import FRAGMENT_BYTES, PASS_BYTES, attend
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.probe import hand_over, try_out
from kvwire.cli.doctor.trial import Report
from kvwire.types import Address

# Somebody has to walk over to the other terminal.
WAIT_S: Final = 300.0
_AGAIN_S: Final = 0.5
# The address is another host's, or the other side was here first.
_NOT_OURS: Final = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)
# Both hosts can bind these.
_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104 - refused, not bound


async def selftest(
    communicator: Communicator,
    address: Address,
    examination: Examination,
    progress: Callable[[str], None],
    *,
    wait_s: float = WAIT_S,
    pass_bytes: int = PASS_BYTES,
) -> Report:
    """Measure with whoever runs the same at the other side.

    Args:
        communicator: With the doctor's profile.
        address: Of one of the two hosts.
        examination: What this host is like.
        progress: Told in a line what happens now.
        wait_s: How long to wait for the other side.
        pass_bytes: Bytes of one pass.

    Raises:
        UsageError: The address is that of every host.
        KVWireError: The other side did not come, or is no doctor.
    """
    if address.host in _WILDCARDS:
        raise UsageError(f"--selftest {address}: name the address of one of the hosts")
    try:
        bound = await communicator.listen(address)
    except ListenError as exc:
        if exc.errno not in _NOT_OURS:
            raise
        progress(f"connecting to {address}")
        return await _probe(communicator, address, examination, progress, wait_s)
    progress(f"listening on {bound}; run the same command on the other host")
    return await _attend(communicator, examination, wait_s, pass_bytes)


async def _attend(
    communicator: Communicator,
    examination: Examination,
    wait_s: float,
    pass_bytes: int,
) -> Report:
    came: asyncio.Future[Report] = asyncio.get_running_loop().create_future()

    def heard(connection: Connection, report: Report | None) -> None:
        del connection
        if report is not None and not came.done():
            came.set_result(report)

    serving = asyncio.create_task(
        attend(communicator, examination, heard, pass_bytes=pass_bytes)
    )
    try:
        async with asyncio.timeout(wait_s):
            return await came
    except TimeoutError:
        raise KVWireError(f"nobody finished a self-test within {wait_s:g} s") from None
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _probe(
    communicator: Communicator,
    address: Address,
    examination: Examination,
    progress: Callable[[str], None],
    wait_s: float,
) -> Report:
    await _until_there(communicator, address, wait_s)
    progress("what both sides choose")
    choice, there = await try_out(communicator, address, ())
    if there is None:
        raise KVWireError(choice.error)
    trials = [choice]
    # Why each of the others is not, the first trial says.
    for name in [c.name for c in choice.candidates if c.possible]:
        progress(f"transport {name}")
        trial, _ = await try_out(communicator, address, FRAGMENT_BYTES, transport=name)
        trials.append(trial)
    report = Report(
        address=str(address),
        here=examination,
        there=there,
        trials=tuple(trials),
    )
    await hand_over(communicator, address, report)
    return report


async def _until_there(
    communicator: Communicator, address: Address, wait_s: float
) -> None:
    """Wait until somebody listens."""
    end = time.monotonic() + wait_s
    while True:
        try:
            connection = await communicator.connect(address)
        except (ConnectError, ConnectionLost) as exc:
            if time.monotonic() >= end:
                raise KVWireError(f"{exc}, for {wait_s:g} s") from None
            await asyncio.sleep(_AGAIN_S)
        else:
            await connection.close()
            return
