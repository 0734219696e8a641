"""What a town of processes reads of the library's inside."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvwire.errors import ClosedOK
from kvwire.kv.fragments import Fragments
from kvwire.transfers.offer import TransferOffer
from kvwire.transfers.registry import Answer, Question, answer_of
from kvwire.transfers.state import OVER, LegState
from tests.support import inside

if TYPE_CHECKING:
    from tests.transfers.town import End

# As few as that, so that a life has more.
TOMBSTONES: Final = 2


class Jobs:
    """Stands for the threads of codecs: jobs run when the town says so."""

    def __init__(self, real: Any) -> None:
        self.devices = real.devices
        self.waiting: list[tuple[Callable[[], None], Callable[[Any], None], Any]] = []
        self.closed = False

    def run(
        self, job: Callable[[], None], then: Callable[[Any], None], of: Any = None
    ) -> None:
        if self.closed:
            then(ClosedOK("the communicator is closed"))
        else:
            self.waiting.append((job, then, of))

    def work(self, count: int | None = None) -> None:
        count = len(self.waiting) if count is None else count
        jobs, self.waiting = self.waiting[:count], self.waiting[count:]
        for job, then, _ in jobs:
            try:
                job()
            except Exception as exc:  # noqa: BLE001 - as the threads do
                then(exc)
            else:
                then(None)

    async def close(self) -> None:
        """As the threads do: what waits is done, and nothing more is taken."""
        self.closed = True
        self.work()


class JobsOf:
    """The threads of codecs, as one end of a transfer sees them."""

    def __init__(self, jobs: Jobs, end: End) -> None:
        self.devices = jobs.devices
        self._jobs, self._end = jobs, end

    def run(self, job: Callable[[], None], then: Callable[[Any], None]) -> None:
        self._jobs.run(job, then, self._end)

    @property
    def touch_blocks(self) -> bool:
        """Whether a job waits, or runs, that reads or writes the end's blocks."""
        return any(of is self._end for _, _, of in self._jobs.waiting)


class Inside:
    """What the town reads of the library's inside."""

    @staticmethod
    def jobs(communicator: Any) -> Jobs:
        jobs: Any = inside.services(communicator).codec_threads
        assert isinstance(jobs, Jobs)
        return jobs

    @staticmethod
    def replace_threads(communicator: Any) -> None:
        services: Any = inside.services(communicator)
        services.codec_threads = Jobs(services.codec_threads)

    @staticmethod
    def own_jobs(end: End) -> None:
        """Note for each job of an end that is encoded that it is this end's."""
        stage: Any = getattr(end.end, "_encoding" if end.produces else "_decoding")
        if stage is not None:
            end.jobs = stage._threads = JobsOf(stage._threads, end)

    @staticmethod
    def check_owed(end: End) -> None:
        """A consumer that has everything is kept until its producer knows that."""
        for leg in end.end._legs:
            kept = leg in inside.registry(end.communicator)._owed
            assert leg.state is not LegState.SETTLED or kept, f"{end}: is not owed"

    @staticmethod
    def check_untouched(end: End) -> None:
        """No link and no thread may touch the blocks of an end that has drained."""
        assert end.jobs is None or not end.jobs.touch_blocks, (
            f"{end}: drained, and a thread reads or writes its blocks"
        )
        lent: list[tuple[int, int]] = []
        for payload in inside.buffers(end.communicator)._payloads.values():
            if isinstance(payload, Fragments):
                lent += zip(
                    payload.addresses.tolist(), payload.lengths.tolist(), strict=True
                )
            else:
                lent.append(
                    (np.frombuffer(payload, np.uint8).ctypes.data, payload.nbytes)
                )
        for tensor, block in itertools.product(end.node.tensors, end.blocks):
            first, nbytes = tensor[block].ctypes.data, tensor[block].nbytes
            touched = any(a < first + nbytes and first < a + n for a, n in lent)
            assert not touched, f"{end}: drained, and a link may touch block {block}"

    @staticmethod
    def met_on_a_link(end: End, seconds: float) -> bool:
        """Whether its peer is known, and a link to it has been there for a while."""
        legs = [leg for leg in end.end._legs if leg.planned]
        origins = {leg.origin for leg in legs}
        return any(
            connection.peer.origin in origins
            and inside.driver(connection).age_s > seconds
            for connection in end.communicator.live_connections
        )

    @classmethod
    def check_tables(cls, communicator: Any) -> None:
        """The registry's tables agree with each other, and are bounded."""
        registry = inside.registry(communicator)
        sizes: Counter[Any] = Counter()
        owed: list[Any] = []
        for key, slot in registry._slots.items():
            assert slot.end or slot.asked or slot.owed, f"an empty slot for {key}"
            assert slot.end is None or slot.end in registry.live
            owed += slot.owed
            for request, question in slot.asked.items():
                assert request.context is question
                assert question.key == key
                assert not request.over, "a question waits whose asker is gone"
                sizes[question.link] += question.nbytes
                cls._check_question(registry, slot, question)
        assert sizes == registry._waiting_bytes
        assert len(owed) == len(registry._owed)
        assert set(owed) == set(registry._owed)
        assert all(leg.transfer._state in OVER for leg in owed)
        assert len(registry._past) <= TOMBSTONES
        assert all(end._outcome is None for end in registry.live)

    @staticmethod
    def _check_question(registry: Any, slot: Any, question: Question) -> None:
        """It waits only where nobody is named, or can answer only later."""
        offer = TransferOffer.decode(question.event.description)
        if any(leg.peer_id == offer.endpoint_id for leg in slot.owed):
            return
        past = registry._last_use(question.key, offer)
        assert past is None, f"a question waits that has the answer {past}"
        if slot.end is not None:
            said = answer_of(slot.end, question.link, offer)
            assert said is Answer.LATER, f"a question waits that has the answer {said}"

    @classmethod
    def check_idle(cls, communicator: Any) -> None:
        """Nothing waits, and nobody is owed anything but the reasons of old ends."""
        registry = inside.registry(communicator)
        assert not registry.live
        assert not registry._owed
        cls.check_empty(communicator)

    @classmethod
    def check_empty(cls, communicator: Any) -> None:
        """After its end nothing is left of a communicator."""
        registry = inside.registry(communicator)
        assert not registry.live
        waiting = [slot for slot in registry._slots.values() if slot.end or slot.asked]
        assert not waiting, f"{communicator.name}: {waiting[0].end} {waiting[0].asked}"
        assert not registry._waiting_bytes
        left = len(inside.buffers(communicator))
        assert not left, "memory that was never let go of"
