"""The model of the tests that need llama.cpp's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.engines.tests.llamacpp.server import toy_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model; skips where the server or what writes models is not installed."""
    for name in ("xllamacpp", "gguf"):
        why = f"{name}: not installed here; `make test-llamacpp` installs it"
        pytest.importorskip(name, reason=why)
    return toy_model(tmp_path_factory.mktemp("model") / "toy.gguf")
