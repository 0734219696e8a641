"""What the demo asks: passages of the book, to be continued.

Each begins where its anchor is found in the text that the model was trained on.
"""

from __future__ import annotations

from typing import Final

from examples.demo.settings import CHECKPOINT

ANCHORS: Final = {
    "tea-party": "There was a table set out under a tree",
    "cheshire-cat": "The Cat only grinned when it saw Alice.",
    "caterpillar": "The Caterpillar and Alice looked at each other",
    "rabbit-hole": "The rabbit-hole went straight on like a tunnel",
    "croquet": "A large rose-tree stood near the entrance",
    "mock-turtle": "They had not gone far before they saw the Mock Turtle",
    "white-rabbit": "It was the White Rabbit, trotting slowly back again",
    "tarts": "The King and Queen of Hearts were seated on their throne",
}
"""Requests by name."""


def passages(count: int) -> dict[str, str]:
    """The text behind each of the first ``count`` anchors, far more than is needed."""
    book = (CHECKPOINT / "alice.txt").read_text(encoding="ascii")
    chosen = list(ANCHORS.items())[:count]
    return {name: book[book.index(anchor) :][:4000] for name, anchor in chosen}
