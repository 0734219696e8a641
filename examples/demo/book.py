"""The book that the model knows by heart: its tokens, and the passages to continue.

Each passage begins where its anchor is found in the training text.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Final

from demo.llama import CHECKPOINT

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

# GPT-2's word pattern for ASCII: the end of a contraction; or letters, digits or signs
# with the preceding blank; or blanks.
_WORDS: Final = re.compile(
    r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"
)
# Byte-level vocabularies represent a byte that is not a visible letter by a character
# from this range on.
_VISIBLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS: Final = [byte for byte in range(256) if byte not in _VISIBLE]
_LETTERS: Final = {byte: chr(byte) for byte in _VISIBLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_OTHERS)
}
_BYTES: Final = {letter: byte for byte, letter in _LETTERS.items()}


class Tokenizer:
    """Byte pairs for ASCII, read from the checkpoint's ``tokenizer.json``."""

    def __init__(self) -> None:
        model = json.loads((CHECKPOINT / "tokenizer.json").read_text())["model"]
        self._ids: dict[str, int] = model["vocab"]
        self._pieces = {token: piece for piece, token in self._ids.items()}
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}

    def encode(self, text: str) -> list[int]:
        """Convert text to tokens."""
        return [
            self._ids[piece]
            for word in _WORDS.findall(text)
            for piece in self._merged([_LETTERS[byte] for byte in word.encode("ascii")])
        ]

    def decode(self, tokens: list[int]) -> str:
        """Convert tokens to text."""
        letters = "".join(self._pieces[token] for token in tokens)
        return bytes(_BYTES[letter] for letter in letters).decode(errors="replace")

    def _merged(self, pieces: list[str]) -> list[str]:
        """Join the neighbours with the lowest rank until no two have a rank."""
        while True:
            ranked = [
                (self._ranks[pair], index)
                for index, pair in enumerate(pairwise(pieces))
                if pair in self._ranks
            ]
            if not ranked:
                return pieces
            _, index = min(ranked)
            pieces[index : index + 2] = ["".join(pieces[index : index + 2])]


def passages(count: int) -> dict[str, str]:
    """Return 4,000 characters from each of the first ``count`` anchors on."""
    book = (CHECKPOINT / "alice.txt").read_text(encoding="ascii")
    chosen = list(ANCHORS.items())[:count]
    return {name: book[book.index(anchor) :][:4000] for name, anchor in chosen}
