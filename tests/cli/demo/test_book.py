"""The tokenizer against the library it stands for, and the passages of the book."""

from __future__ import annotations

import pytest

from kvwire.cli.demo.book import ANCHORS, Tokenizer, passages
from kvwire.cli.demo.llama import CHECKPOINT, CONTEXT

_WHY = "not installed here; `make test-torch` installs it with transformers"


def test_text_comes_back_from_its_tokens() -> None:
    tokenizer = Tokenizer()
    for text in (*passages(len(ANCHORS)).values(), "  two\n\n\n(It's 42!)_", ""):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert len(tokens) <= len(text)


def test_words_are_cut_where_pairs_were_merged() -> None:
    """Ranks decide, not the order of the letters."""
    tokenizer = Tokenizer()
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("Alice's rabbit")]
    assert pieces == ["Alice", "'s", " r", "abbit"]


def test_tokens_are_those_of_the_library() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason=f"tokenizers: {_WHY}")
    library = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = (CHECKPOINT / "alice.txt").read_text(encoding="ascii")
    assert Tokenizer().encode(text) == library.encode(text).ids


def test_every_passage_is_longer_than_the_model_can_read() -> None:
    tokenizer = Tokenizer()
    for name, text in passages(len(ANCHORS)).items():
        assert text.startswith(ANCHORS[name])
        assert len(tokenizer.encode(text)) > CONTEXT
