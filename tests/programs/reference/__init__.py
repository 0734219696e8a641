"""What ``make reference`` writes into the pages of docs/reference, from the code.

What a docstring says once is not said a second time by hand, and a test holds the pages
to the code. Titles, paragraphs and examples are the pages' own: for a new name, write
its heading and an example into a page below docs/reference/api.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from tests.programs.reference import api, configuration, errors, metrics

PAGES: Final[dict[str, Callable[[], str]]] = {
    "api.md": api.index,
    **{where: partial(api.page, where) for where in api.topics()},
    "configuration.md": configuration.page,
    "errors.md": errors.page,
    "metrics.md": metrics.page,
}
