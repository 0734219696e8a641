"""A real browser, for the tests of pages: Debian's chromium, started once a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no selenium: make .venv/.installed-docs"
    )
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no chromium with chromedriver: Debian's chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    one = webdriver.Chrome(options=options, service=Service(chromedriver))
    one.set_page_load_timeout(PATIENCE_S)
    yield one
    one.quit()
