"""Cases of a test, each with what it is called."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


def each(parameter: str, cases: Mapping[str, object]) -> pytest.MarkDecorator:
    """Run the test once with each of the values, under its name."""
    return pytest.mark.parametrize(parameter, list(cases.values()), ids=list(cases))
