"""A test that runs again, under `.ci/run`, has its time again.

pytest-timeout sets one timer for a test and all of its reruns. Once that has ended the
first of them, the next one could hang for ever, and the whole run with it.
"""

from __future__ import annotations

import pytest
import pytest_timeout


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if getattr(item, "execution_count", 1) > 1:
        settings = pytest_timeout._get_item_settings(item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
