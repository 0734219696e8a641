"""The model in NumPy, its tokens and its KV; and that the libraries agree."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from demo.book import ANCHORS, Tokenizer, passages
from demo.llama import CHECKPOINT, CONTEXT, load
from demo.numpy_llama import NumpyLlama, read_safetensors

_WHY = "not installed here; `make test-torch` installs torch and transformers"


def test_text_comes_back_from_its_tokens() -> None:
    tokenizer = Tokenizer()
    for name, text in passages(len(ANCHORS)).items():
        # Longer than the model can read.
        assert text.startswith(ANCHORS[name])
        assert len(tokenizer.encode(text)) > CONTEXT
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


@pytest.fixture(scope="module")
def llama() -> NumpyLlama:
    return NumpyLlama(num_blocks=32)


@pytest.fixture(scope="module")
def book() -> dict[str, list[int]]:
    tokenizer = Tokenizer()
    return {name: tokenizer.encode(text) for name, text in passages(4).items()}


def test_the_checkpoint_is_small_and_knows_its_book(
    llama: NumpyLlama, book: dict[str, list[int]]
) -> None:
    """It continues passages word for word, so that a reader sees when KV is wrong."""
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 4 << 20
    for name, tokens in book.items():
        said = llama.generate(tokens[:128], 8)
        assert said == tokens[128:136], f"{name}: {Tokenizer().decode(said)}"


@pytest.mark.parametrize("chunk", [1, 16, 23, 100])
def test_a_prompt_in_blocks_is_continued_as_without(
    llama: NumpyLlama, book: dict[str, list[int]], chunk: int
) -> None:
    prompt = book["tea-party"][:100]
    written = []
    sequence = llama.sequence(
        [9, 2, 14, 0, 7, 30, 21], on_written=lambda *what: written.append(what)
    )
    for start in range(0, len(prompt), chunk):
        said = llama.forward(prompt[start : start + chunk], sequence)
    assert [said.token] == llama.generate(prompt, 1)
    assert [span.layer for span in said.spans] == list(range(8))
    assert written[:8] == [(layer, 0, min(chunk, 100)) for layer in range(8)]
    assert sequence.length == 100


def test_other_kv_gives_other_tokens(
    llama: NumpyLlama, book: dict[str, list[int]]
) -> None:
    """Attention reads the blocks: with those of others, the book is not known."""
    prompt, blocks = book["cheshire-cat"][:70], [3, 1, 4, 15, 9]
    llama.forward(prompt[:-1], llama.sequence(blocks))
    said = []
    for read in (blocks, [10, 11, 12, 13, 14]):
        sequence, tokens = llama.sequence(read, length=69), prompt[-1:]
        for _ in range(6):
            tokens.append(llama.forward(tokens[-1:], sequence).token)
        said.append(tokens[1:])
    assert said[0] == llama.generate(prompt, 6) != said[1]


def test_transformers_says_the_same(
    llama: NumpyLlama, book: dict[str, list[int]]
) -> None:
    pytest.importorskip("transformers", reason=f"transformers: {_WHY}")
    torch_llama = load("torch", num_blocks=2)
    for tokens in book.values():
        assert torch_llama.generate(tokens[:420], 64) == llama.generate(
            tokens[:420], 64
        )


def test_a_tensor_is_read_where_the_header_says(tmp_path: Path) -> None:
    entry = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [2, 10]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    # bfloat16 is the upper half of a float32: 1.0, -2.0, 0.5, 0.0.
    values = struct.pack("<5H", 0xFFFF, 0x3F80, 0xC000, 0x3F00, 0)
    file = tmp_path / "w.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + values)
    (tensor,) = read_safetensors(file).values()
    assert np.array_equal(tensor, [[1.0, -2.0], [0.5, 0.0]])
