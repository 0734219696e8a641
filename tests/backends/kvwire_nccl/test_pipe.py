"""What a lane asks of a direction, and what both stand-ins for NCCL must therefore do.

The tests of lanes and of their threads run over these; one that keeps less than the
contract says would let them pass for nothing. gloo is checked where torch is installed:
``make test-torch`` does it.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator

import pytest

from kvwire_nccl.library import CollectiveLibrary
from kvwire_nccl.pipe import Move, MoveFailed, MoveProgress, Pipe
from tests.backends.kvwire_nccl.fake import FakeLibrary
from tests.backends.kvwire_nccl.gloo import Gloo

pytestmark = pytest.mark.usefixtures("gloo_is_loaded")

# Below the timeout of a test, which would end the whole run.
_PATIENCE_S = 10.0
PAYLOADS = [bytes([number]) * 1000 * number for number in range(1, 9)]


@pytest.fixture(
    params=[
        FakeLibrary,
        pytest.param(
            Gloo,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("torch") is None,
                reason="torch is not installed here; make test-torch runs this",
            ),
        ),
    ]
)
def library(request: pytest.FixtureRequest) -> CollectiveLibrary:
    made: CollectiveLibrary = request.param()
    made.move_timeout_s = 1.0
    return made


@pytest.fixture
def ends(library: CollectiveLibrary) -> Iterator[tuple[Pipe, Pipe]]:
    """The sending end of a direction and the receiving one, both up."""
    name = library.name()
    sending, receiving = library.open(name, True), library.open(name, False)
    assert not sending.is_up()
    begins = [threading.Thread(target=end.begin) for end in (sending, receiving)]
    for begin in begins:
        begin.start()
    for begin in begins:
        begin.join(_PATIENCE_S)
    until(sending.is_up)
    until(receiving.is_up)
    yield sending, receiving
    sending.abort()
    receiving.abort()
    library.close()


def until(condition: Callable[[], bool]) -> None:
    """Look again and again, as the thread of a direction does."""
    pause = threading.Event()
    for _ in range(int(_PATIENCE_S * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise TimeoutError


def end(moves: list[Move]) -> None:
    """See each of them done, oldest first."""
    for move in moves:
        until(lambda move=move: move.progress() is MoveProgress.DONE)  # type: ignore[misc]


def test_payloads_arrive_in_the_order_in_which_they_were_given(
    ends: tuple[Pipe, Pipe],
) -> None:
    sending, receiving = ends
    into = [bytearray(len(payload)) for payload in PAYLOADS]
    sends = [sending.move(memoryview(p), len(p)) for p in PAYLOADS]
    receives = [receiving.move(memoryview(i), len(i)) for i in into]
    end(receives)
    end(sends)
    assert [bytes(i) for i in into] == PAYLOADS
    sending.check()
    receiving.check()


def test_a_receive_without_memory_drops_its_payload_and_keeps_the_order(
    ends: tuple[Pipe, Pipe],
) -> None:
    sending, receiving = ends
    into = bytearray(2000)
    sends = [sending.move(memoryview(p), len(p)) for p in PAYLOADS[:2]]
    receives = [receiving.move(None, 1000), receiving.move(memoryview(into), 2000)]
    end(receives)
    end(sends)
    assert bytes(into) == PAYLOADS[1]


def test_nothing_is_done_before_its_other_half_is_there(
    ends: tuple[Pipe, Pipe],
) -> None:
    sending, receiving = ends
    into = bytearray(1000)
    receive = receiving.move(memoryview(into), 1000)
    assert receive.progress() is not MoveProgress.DONE
    send = sending.move(memoryview(PAYLOADS[0]), 1000)
    end([receive])
    end([send])
    assert bytes(into) == PAYLOADS[0]


def test_after_an_abort_no_memory_is_written(ends: tuple[Pipe, Pipe]) -> None:
    """Though the sender goes on: what it sends has nowhere to go."""
    sending, receiving = ends
    into = bytearray(1000)
    receiving.move(memoryview(into), 1000)
    receiving.abort()
    # Whatever the library raises; here a failure of gloo's own is a RuntimeError.
    with pytest.raises((MoveFailed, RuntimeError)):
        send_until_lost(sending)
    assert not any(into)


def send_until_lost(sending: Pipe) -> None:
    """Send, and look at it as the thread does until the loss of the peer is told."""
    move = sending.move(memoryview(PAYLOADS[0]), 1000)

    def looked() -> bool:
        sending.check()
        assert move.progress() is not MoveProgress.DONE
        return False

    until(looked)
