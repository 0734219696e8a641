"""The pages of docs/reference that are written from the code, by ``make reference``.

What a docstring says once is not said a second time by hand, and a test holds the pages
to the code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from tests.programs.reference import api, configuration, errors, metrics
from tests.support.tree import ROOT

FOLDER: Final = ROOT / "docs" / "reference"

PAGES: Final[dict[str, Callable[[], str]]] = {
    "api.md": api.index,
    **{f"api/{topic.page}.md": partial(api.page, topic) for topic in api.TOPICS},
    "configuration.md": configuration.page,
    "errors.md": errors.page,
    "metrics.md": metrics.page,
}
