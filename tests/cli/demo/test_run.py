"""The demo itself, small: three processes, a real transformer, tokens compared.

Needs torch and transformers, which `make test` does not install; `make test-torch` does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.demo.prompts import ANCHORS, passages
from examples.demo.settings import CHECKPOINT
from tests.support.tree import ROOT

_WHY = "not installed here; `make test-torch` installs torch and transformers"
pytest.importorskip("torch", reason=f"torch: {_WHY}")
pytest.importorskip("transformers", reason=f"transformers: {_WHY}")

# Three interpreters that import torch, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(240)


def test_two_processes_say_what_one_says(tmp_path: Path) -> None:
    """One of three requests loses blocks, and exactly what is missing is computed."""
    size = ["--requests", "3", "--prompt", "200", "--new", "12"]
    size += ["--wire-gbit", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", *size, "--json", "--out", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["requests"]
    names = list(ANCHORS)[:3]
    assert [row["request"] for row in rows] == names
    for row in rows:
        assert row["equal"] is True
        assert (row["prompt_tokens"], row["new_tokens"]) == (200, 12)
        assert (row["layers"], row["layers_grouped"]) == (8, 1)
        assert row["transport"] == "tcp"
    whole = [row for row in rows if row["request"] != names[1]]
    # 199 tokens are 13 blocks, which move whole: 16 tokens, 8 layers, keys and values,
    # 2 heads of 32 float32 each.
    assert {row["bytes"] for row in whole} == {13 * 16 * 8 * 2 * 2 * 32 * 4}
    assert [row["prefilled_by_decode"] for row in whole] == [[], []]
    # The third in the middle begins at block 4.
    assert rows[1]["lost_blocks"] == [4, 5, 6, 7]
    assert rows[1]["usable_tokens"] == 64
    assert rows[1]["prefilled_by_decode"] == [[64, 199]]
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg ")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_checkpoint_is_small_and_knows_its_book() -> None:
    """It continues passages word for word, so that a reader sees when KV is wrong."""
    from examples.demo.llama import Llama

    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 4 << 20
    llama = Llama()
    for name, text in passages(4).items():
        tokens = llama.tokenizer.encode(text)
        said = llama.generate(tokens[:420], 64)
        same = sum(a == b for a, b in zip(said, tokens[420:], strict=False))
        assert same >= 48, f"{name}: {llama.tokenizer.decode(said)}"
