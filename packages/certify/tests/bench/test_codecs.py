"""What the codec saves and costs."""

from __future__ import annotations

import pytest

from kvwire.cli.main import main
from packages.certify.tests.bench import codecs
from packages.certify.tests.bench.__main__ import app


def test_what_is_saved_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--rounds", "1"], app) == 0
    printed = capsys.readouterr().out
    for images in codecs.SETS:
        assert f"{images}: 0." in printed
        found = codecs.measure(images, 1)
        assert 0.2 < found.ratio < 0.9
        assert found.encode_bytes_per_s < found.memcpy_bytes_per_s
