"""Credit for eager messages, which bounds the memory that a receiver holds for them.

An eager message is sent before a receive is posted for it, so its receiver may have to
hold it. The receiver declares in the handshake how many bytes and messages it can hold,
and the sender counts down. When the application takes messages, their credit is
returned, half a window at a time, so that one frame returns the credit of hundreds of
messages.
"""

from __future__ import annotations

from kvwire.errors import FlowControlViolation


class SendCredit:
    """Counts the messages and bytes that this side may still send eagerly."""

    __slots__ = ("_max_bytes", "_max_messages", "messages", "nbytes")

    def __init__(self, messages: int, nbytes: int) -> None:
        self.messages: int = messages
        self.nbytes: int = nbytes
        self._max_messages = messages
        self._max_bytes = nbytes

    def spend(self, nbytes: int) -> bool:
        """Take credit for one message; return False if there is not enough."""
        if self.messages < 1 or self.nbytes < nbytes:
            return False
        self.messages -= 1
        self.nbytes -= nbytes
        return True

    def add(self, messages: int, nbytes: int) -> None:
        """Add the credit that a CREDIT frame gives back."""
        if (
            messages > self._max_messages - self.messages
            or nbytes > self._max_bytes - self.nbytes
        ):
            raise FlowControlViolation(
                "KVW-CR-02", f"credit for {messages} messages that were not sent"
            )
        self.messages += messages
        self.nbytes += nbytes


class ReceiveCredit:
    """Counts the eager messages that have arrived, and the credit to return."""

    __slots__ = ("_messages", "_nbytes", "due_bytes", "due_messages", "left")

    def __init__(self, messages: int, nbytes: int) -> None:
        self._messages = messages
        self._nbytes = nbytes
        self.left: SendCredit = SendCredit(messages, nbytes)
        self.due_messages: int = 0
        self.due_bytes: int = 0

    def arrived(self, nbytes: int) -> None:
        """Subtract the credit of a message whose header has arrived."""
        left = self.left
        if left.messages < 1 or left.nbytes < nbytes:
            raise FlowControlViolation(
                "KVW-CR-01", f"a message of {nbytes} bytes without credit for it"
            )
        left.messages -= 1
        left.nbytes -= nbytes

    def taken(self, nbytes: int) -> bool:
        """Count a message that was taken; return whether to return credit now."""
        self.due_messages += 1
        self.due_bytes += nbytes
        return (
            2 * self.due_messages >= self._messages
            or 2 * self.due_bytes >= self._nbytes
        )

    def give_back(self) -> tuple[int, int]:
        """Return the messages and bytes to give back, and reset their count."""
        messages = self.due_messages
        nbytes = self.due_bytes
        self.left.add(messages, nbytes)
        self.due_messages = self.due_bytes = 0
        return messages, nbytes
