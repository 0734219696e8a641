"""What ``make reference`` writes into the pages of docs, from the code.

What a docstring or a table says once is not said a second time by hand, and a test
holds the pages to the code. Titles, paragraphs and examples are the pages' own: for a
new name, write its heading and an example into a page below docs/reference/api.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from tests.programs.reference import api, configuration, errors, metrics
from tests.programs.reference.words import with_blocks
from tests.proto.diagrams import diagrams
from tests.protocol.examples import examples

_PROTOCOL: Final = "topics/protocol.md"
_TRANSFERS: Final = "topics/protocol-kv-transfers.md"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/api.md": api.index,
    **{f"reference/{where}": partial(api.page, where) for where in api.topics()},
    "reference/configuration.md": configuration.page,
    "reference/errors.md": errors.page,
    "reference/metrics.md": metrics.page,
    _PROTOCOL: lambda: with_blocks(_PROTOCOL, diagrams()),
    _TRANSFERS: lambda: with_blocks(_TRANSFERS, examples()),
}
