"""Hashes of blocks are a chain that every process computes the same."""

from __future__ import annotations

import hashlib
import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.hashing import HashScheme
from tests.support.depth import examples
from tests.support.runs import python

GOLDEN = "a156349219d49e5bad7ac11ab1fa715b4f473118e0d1d48c9034baa3ee2614eb"

tokens_of = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(tokens_of, st.integers(1, 5), st.binary(max_size=9), st.binary(max_size=9))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_the_chain_is_as_documented(
    tokens: list[int], size: int, seed: bytes, salt: bytes
) -> None:
    """A second implementation, straight from the words."""
    name = hashlib.sha256(f"kvwire/sha256-chain-1/{size}".encode()).digest()
    seeded = name + hashlib.sha256(seed).digest() + salt
    link = hashlib.sha256(seeded).digest()
    expected = []
    for start in range(0, len(tokens) - size + 1, size):
        block = struct.pack(f"<{size}i", *tokens[start : start + size])
        link = hashlib.sha256(link + block).digest()
        expected.append(link)
    assert HashScheme(size, seed).block_hashes(tokens, salt=salt) == expected


@given(tokens_of, st.integers(0, 8))
@settings(max_examples=examples(50), deadline=None, derandomize=True)
def test_a_chain_goes_on_where_it_stopped(tokens: list[int], blocks: int) -> None:
    """Decoding adds blocks to a prompt whose hashes are known."""
    scheme = HashScheme(4)
    whole = scheme.block_hashes(tokens)
    blocks = min(blocks, len(whole))
    parent = whole[blocks - 1] if blocks else None
    rest = scheme.block_hashes(tokens[blocks * 4 :], parent=parent)
    assert whole[:blocks] + rest == whole


def test_r44_another_process_finds_the_same() -> None:
    """Whatever its hash seed is."""
    code = (
        "from kvwire.kv.hashing import HashScheme;"
        "print(HashScheme(4, b'seed').block_hashes([1, 2, 3, 4])[0].hex())"
    )
    for seed in ("1", "2"):
        out = python(
            "-c",
            code,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert out.stdout.strip() == GOLDEN


def test_whatever_kv_depends_on_changes_the_hash() -> None:
    """One token, the block size, seed, salt, an image: and all blocks behind it."""
    tokens = list(range(8))
    plain = HashScheme(4).block_hashes(tokens)
    others = [
        HashScheme(4).block_hashes([9, *tokens[1:]]),
        HashScheme(4, b"x").block_hashes(tokens),
        HashScheme(4).block_hashes(tokens, salt=b"x"),
        HashScheme(4).block_hashes(tokens, extra={0: b"x"}),
        HashScheme(4).block_hashes(tokens, parent=plain[0]),
        HashScheme(8).block_hashes(tokens),
    ]
    hashes = [digest for chain in [plain, *others] for digest in chain]
    assert len(set(hashes)) == len(hashes)
    later = HashScheme(4).block_hashes(tokens, extra={1: b"x"})
    assert later[0] == plain[0]
    assert later[1] != plain[1]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -2, 3], "token id -2 is outside"),
        ([1, 2**31], "token id 2147483648 is outside"),
        ([1.5], "0-dimensional|1-dimensional float64"),
        ([[1, 2]], "2-dimensional int64"),
        (np.ma.array([1, 2], mask=[False, True]), "block_hashes: a masked array"),
    ],
    ids=str,
)
def test_what_is_no_token_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HashScheme(1).block_hashes(tokens)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"salt": "acme"}, "block_hashes: salt: pass bytes, not a str"),
        ({"parent": "x" * 32}, "block_hashes: parent: pass bytes, not a str"),
        # Without a root its hashes would be the same for every seed and salt.
        ({"parent": b"", "salt": b"acme"}, "parent has 0 bytes, and a hash has 32"),
        ({"extra": [b"x"]}, "extra: pass {position: bytes}, not a list"),
        ({"extra": {"0": b"x"}}, "extra: key: pass a position, not a str"),
        ({"extra": {0: "x"}}, "extra of block 0: pass bytes, not a str"),
    ],
)
def test_what_is_no_bytes_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HashScheme(1).block_hashes([1], **wrong)


def test_a_seed_is_bytes() -> None:
    seed: Any = "secret"
    with pytest.raises(UsageError, match="seed: pass bytes, not a str"):
        HashScheme(1, seed)


def test_extra_is_of_full_blocks() -> None:
    with pytest.raises(
        UsageError, match=r"blocks \[0, 2\], but the prompt has only 1 full"
    ):
        HashScheme(2).block_hashes([1, 2, 3], extra={2: b"x", 0: b"y"})


@pytest.mark.parametrize("size", [0, 2.0, True, "2"])
def test_a_block_size_that_is_none(size: Any) -> None:
    with pytest.raises(UsageError, match=f"block_tokens={size!r}"):
        HashScheme(size)


def test_a_block_size_of_any_whole_type() -> None:
    scheme = HashScheme(np.int64(2))  # type: ignore[arg-type]
    assert type(scheme.block_tokens) is int
    assert scheme == HashScheme(2)


def test_r44_the_handshake_tells_schemes_apart_and_keeps_the_seed() -> None:
    seed = b"a secret seed"
    pairs = HashScheme(16, seed).to_pairs()
    assert [name for name, _ in pairs] == [
        "hash_scheme",
        "hash_block_tokens",
        "hash_seed",
    ]
    assert pairs == HashScheme(16, seed).to_pairs()
    assert pairs[2] != HashScheme(16, b"another").to_pairs()[2]
    assert pairs[1] != HashScheme(32, seed).to_pairs()[1]
    assert hashlib.sha256(seed).hexdigest()[:16] not in pairs[2]
