"""Credit is neither made nor lost, and never spent twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import FlowControlViolation
from kvwire.proto.credits import ReceiveCredit, SendCredit


@pytest.mark.rule("KVW-CR-01", "KVW-CR-02", "keeps")
@given(
    st.integers(1, 9),
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=60),
)
def test_credit_is_conserved(
    messages: int, nbytes: int, steps: list[tuple[int, int]]
) -> None:
    """What may be sent, what is held and what is due back add up to the window."""
    sender, receiver = SendCredit(messages, nbytes), ReceiveCredit(messages, nbytes)
    held: list[int] = []
    for size, taken in steps:
        if sender.spend(size):
            receiver.arrived(size)
            held.append(size)
        for _ in range(min(taken, len(held))):
            if receiver.taken(held.pop(0)):
                sender.add(*receiver.give_back())
        assert sender.messages + len(held) + receiver.due_messages == messages
        assert sender.nbytes + sum(held) + receiver.due_bytes == nbytes
        assert min(sender.messages, sender.nbytes) >= 0
        assert receiver.left.messages >= sender.messages
        assert receiver.left.nbytes >= sender.nbytes
    while held:
        receiver.taken(held.pop())
    sender.add(*receiver.give_back())
    assert (sender.messages, sender.nbytes) == (messages, nbytes)


@pytest.mark.parametrize(("messages", "nbytes"), [(2, 99), (3, 20)])
@pytest.mark.rule("KVW-CR-01", "breaks")
def test_a_message_without_credit(messages: int, nbytes: int) -> None:
    """The window in messages, and the window in bytes; nothing is taken for it."""
    receiver = ReceiveCredit(messages, nbytes)
    receiver.arrived(10)
    receiver.arrived(10)
    left = (receiver.left.messages, receiver.left.nbytes)
    with pytest.raises(FlowControlViolation) as caught:
        receiver.arrived(1)
    assert caught.value.rule == "KVW-CR-01"
    assert (receiver.left.messages, receiver.left.nbytes) == left


@pytest.mark.parametrize("back", [(2, 10), (1, 11), (2**20, 2**26)])
@pytest.mark.rule("KVW-CR-02", "breaks")
def test_more_back_than_was_spent(back: tuple[int, int]) -> None:
    """Beyond what has left in messages or in bytes; nothing is added."""
    sender = SendCredit(5, 50)
    assert sender.spend(10)
    with pytest.raises(FlowControlViolation) as caught:
        sender.add(*back)
    assert caught.value.rule == "KVW-CR-02"
    assert (sender.messages, sender.nbytes) == (4, 40)
    sender.add(1, 10)
    assert (sender.messages, sender.nbytes) == (5, 50)


@pytest.mark.rule("KVW-CR-01", "keeps")
def test_all_credit_can_be_spent() -> None:
    """To the last byte, and to the last message."""
    sender = SendCredit(2, 50)
    assert [sender.spend(size) for size in (51, 50, 1, 0, 0)] == [
        *(False, True, False, True, False)
    ]


def test_credit_goes_back_in_lumps() -> None:
    """Half a window at a time, in messages or in bytes, whatever is first."""
    many, large = ReceiveCredit(8, 1000), ReceiveCredit(8, 1000)
    for _ in range(4):
        many.arrived(1)
    assert [many.taken(1) for _ in range(4)] == [False, False, False, True]
    assert many.give_back() == (4, 4)
    for size in (499, 1):
        large.arrived(size)
    assert [large.taken(size) for size in (499, 1)] == [False, True]
    assert large.give_back() == (2, 500)
