"""What a config says of rotations, for models that have none or an incomplete one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwire_store.conventions import meaning_of, rotates_so


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_a_rotation_without_its_numbers_is_not_known(kind: str) -> None:
    """GPT-2 has no rope_theta: its KV is kept under the engine's own name."""
    meaning = meaning_of(object(), {"rope_type": kind}, None)

    def turned(_position: int) -> Any:
        return np.ones(8)

    assert not rotates_so(meaning, turned, 8)
