"""What one forward pass says of its layers."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import KVSpec
from kvwire_vllm.sending import ForwardPass, PromptBlocks, PromptSend


class Heard:
    def __init__(self) -> None:
        self.layers: list[list[int]] = []
        self.blocks: set[tuple[int, int]] = set()
        self.events: list[object] = []
        self.over = 0

    def ready(
        self, group: str, layers: slice, blocks: slice, after: object | None
    ) -> None:
        assert not self.over
        self.layers.append(list(range(layers.start, layers.stop)))
        self.blocks.add((blocks.start, blocks.stop))
        self.events.append(after)

    def finish(self) -> None:
        self.over += 1


def spec(layers: range) -> KVSpec:
    """Layers of 100 bytes in a block."""
    return KVSpec(
        layers=len(layers),
        kv_heads=1,
        head_dim=25,
        block_tokens=1,
        first_layer=layers.start,
    )


def passing(
    *heard: Heard, layers: range, group_bytes: int, last: bool = True
) -> ForwardPass:
    """A pass that writes two blocks of each, whose layers have 100 bytes in each."""
    counter = itertools.count()
    parts = [
        PromptBlocks(cast(PromptSend, one), {"kv": range(4, 6)}, last) for one in heard
    ]
    return ForwardPass(parts, {"kv": spec(layers)}, group_bytes, lambda: next(counter))


@pytest.mark.parametrize(
    ("prompts", "count", "group_bytes", "marks"),
    [
        # A layer has 200 bytes, less than 250; so they go up to four times 250.
        (1, 8, 250, [[0, 1, 2, 3, 4], [5, 6], [7]]),
        (1, 3, 200, [[0], [1], [2]]),
        # Two prompts have 400 bytes in a layer together.
        (2, 6, 500, [[0, 1, 2, 3, 4], [5]]),
        (2, 3, 400, [[0], [1], [2]]),
    ],
)
def test_small_layers_go_together_and_the_last_one_alone(
    prompts: int, count: int, group_bytes: int, marks: list[list[int]]
) -> None:
    heard = [Heard() for _ in range(prompts)]
    writing = passing(*heard, layers=range(count), group_bytes=group_bytes)
    for layer in range(count):
        writing.layer("kv", layer)
    for one in heard:
        assert one.layers == marks
        # One event orders the kernels of all that a mark names.
        assert one.events == list(range(len(marks)))
        assert one.over == 1


def test_a_pass_that_completes_no_block_says_nothing() -> None:
    heard = Heard()
    part = PromptBlocks(cast(PromptSend, heard), {"kv": range(3, 3)}, False)
    writing = ForwardPass([part], {"kv": spec(range(4))})
    for layer in range(4):
        writing.layer("kv", layer)
    writing.rest()
    assert not heard.layers
    assert not heard.over


def test_a_prompt_that_goes_on_is_not_finished() -> None:
    heard = Heard()
    passing(heard, layers=range(2), group_bytes=0, last=False).rest()
    assert heard.layers == [[0, 1]]
    assert not heard.over


@given(
    named=st.lists(st.integers(0, 12)),
    first=st.integers(0, 4),
    count=st.integers(1, 8),
    group_bytes=st.integers(0, 2000),
)
def test_every_layer_is_said_once_whatever_the_hooks_name(
    named: list[int], first: int, count: int, group_bytes: int
) -> None:
    heard = Heard()
    layers = range(first, first + count)
    writing = passing(heard, layers=layers, group_bytes=group_bytes)
    done: set[int] = set()
    for layer in named:
        writing.layer("kv", layer)
        done.add(layer)
        assert set(itertools.chain(*heard.layers)) <= done
    writing.rest()
    assert sorted(itertools.chain(*heard.layers)) == list(layers)
    assert heard.over == 1
    assert heard.blocks == {(4, 6)}
