"""The site of the pages in a real browser: search, the next page, colours, a phone.

`make docs` builds it. Needs chromium and its driver, and selenium of the group `docs`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser
from tests.support.docs_site import DOCS, tabs, version
from tests.support.servers import Server
from tests.support.tree import ROOT

SITE = ROOT / "build" / "site"
PHONE = 390
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / version() / "index.html").exists():
        pytest.skip(f"{SITE}: not built, see `make docs`")
    # A process of its own, since a browser keeps connections, and so threads here.
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1"]
    server = Server([*command, "--directory", str(SITE), "{port}"], "Serving HTTP")
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.kill()


class Site(Browser):
    """A page of the site in chromium."""

    def __init__(self, driver: Any, address: str) -> None:
        super().__init__(driver)
        self.address = address

    def open(self, page: str = "index.html", *, width: int = 1280) -> None:
        """Show a page of the version that was built."""
        self.show(f"{self.address}/{version()}/{page}", width=width)

    @property
    def at(self) -> str:
        """The page that is shown."""
        return self.url.removeprefix(f"{self.address}/{version()}/")


@pytest.fixture(scope="module")
def browser(address: str, driver: Any) -> Site:
    return Site(driver, address)


def test_search_finds_a_page_and_leads_to_it(browser: Site) -> None:
    browser.open()
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.find("[data-md-component=search-query]").send_keys("ptrace scope")
    result = browser.find(".md-search-result__link[href*=same-host]")
    browser.run(f"location.assign({result.get_attribute('href')!r})")
    there = "howto/same-host.html"
    assert browser.until(lambda _: browser.at.startswith(there), there)


def test_each_page_leads_to_the_next_of_the_index(browser: Site) -> None:
    (_, tutorial), *_ = tabs((DOCS / "index.md").read_text())
    first, second = (page.replace(".md", ".html") for page in tutorial[:2])
    browser.open(first)
    browser.run("document.querySelector('.md-footer__link--next').click()")
    browser.until(lambda _: browser.at == second, second)
    assert browser.find(".md-footer__link--prev").get_attribute("href").endswith(first)


def test_a_name_leads_to_its_whole_signature(browser: Site) -> None:
    browser.open("reference/api.html")
    browser.run("document.querySelector('a[href$=\"#kvwire.Connection\"]').click()")
    there = "reference/api/connection.html#kvwire.Connection"
    assert browser.until(lambda _: browser.at == there, there)
    # An option that the code has as **options.
    assert browser.find("#connectionpull + .highlight", "lease_s: float")


def test_a_key_leads_to_its_row_of_the_configuration(browser: Site) -> None:
    browser.open("howto/directory.html")
    browser.run("document.querySelector('a[href$=\"#lease_s\"]').click()")
    there = "reference/configuration.html#lease_s"
    assert browser.until(lambda _: browser.at == there, there)
    assert browser.find("#lease_s")


def test_light_and_dark_follow_the_system_until_the_reader_chooses(
    browser: Site,
) -> None:
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    for preferred, shown in (("dark", "slate"), ("light", "default")):
        browser.prefer(preferred)
        browser.open()
        assert browser.shows(scheme, shown)
    browser.run("document.getElementById('__palette_2').click()")
    assert browser.shows(scheme, "slate")
    browser.run("localStorage.clear()")


@pytest.mark.parametrize(
    "page",
    [
        "index.html",
        "howto/vllm.html",
        "reference/api.html",
        "reference/api/connection.html",
        "reference/configuration.html",
        "topics/performance.html",
        "topics/protocol.html",
    ],
)
def test_a_phone_shows_each_page_without_scrolling_sideways(
    browser: Site, page: str
) -> None:
    browser.open(page, width=PHONE)
    assert browser.run("innerWidth") == PHONE
    wide = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    assert browser.run(wide) <= PHONE


def test_the_page_says_its_version_and_the_top_leads_to_the_newest(
    browser: Site,
) -> None:
    browser.open()
    assert browser.find(".md-version__current", version())
    newest = max(path.parent.name for path in SITE.glob("[0-9]*/index.html"))
    top = (SITE / "index.html").read_text()
    assert f"url={newest}/index.html" in top
    assert Path(SITE / newest / "index.html").exists()
