"""The site of the pages in a real browser: search, the next page, colours, a phone.

`make docs` builds it. Needs chromium and its driver, and selenium of the group `docs`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.docs_site import DOCS, tabs, version
from tests.support.servers import Server
from tests.support.tree import ROOT
from tests.support.waiting import PATIENCE_S

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


class Browser:
    """A page in chromium."""

    def __init__(self, driver: Any, address: str) -> None:
        self._driver = driver
        self.address = address

    def open(self, page: str = "index.html", *, width: int = 1280) -> None:
        """Show a page of the version that was built."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.get(f"{self.address}/{version()}/{page}")

    def prefer(self, scheme: str) -> None:
        """Let the system have a colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": features}
        )

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._driver.execute_script(f"return {script}")

    def find(self, css: str, containing: str = "") -> Any:
        """The first element that is shown, once there is one."""

        def shown(_: object) -> Any:
            found = self._driver.find_elements("css selector", css)
            there = [
                one for one in found if containing in one.get_attribute("textContent")
            ]
            return there[0] if there else None

        return self.until(shown, f"{css} with {containing!r}")

    def until(self, true: Callable[[Any], Any], what: str) -> Any:
        """Wait for what a function finds."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self._driver, PATIENCE_S).until(true, what)

    def shows(self, script: str, value: str) -> bool:
        """Wait until a script returns a value."""
        return bool(
            self.until(lambda _: self.run(script) == value, f"{script}: {value}")
        )

    @property
    def at(self) -> str:
        """The page that is shown."""
        return str(self._driver.current_url).removeprefix(
            f"{self.address}/{version()}/"
        )


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no selenium: make .venv/.installed-docs"
    )
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with chromedriver: Debian's chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    one = webdriver.Chrome(options=options, service=Service(driver))
    one.set_page_load_timeout(PATIENCE_S)
    yield Browser(one, address)
    one.quit()


def test_search_finds_a_page_and_leads_to_it(browser: Browser) -> None:
    browser.open()
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.find("[data-md-component=search-query]").send_keys("ptrace scope")
    result = browser.find(".md-search-result__link[href*=same-host]")
    browser.run(f"location.assign({result.get_attribute('href')!r})")
    there = "howto/same-host.html"
    assert browser.until(lambda _: browser.at.startswith(there), there)


def test_each_page_leads_to_the_next_of_the_index(browser: Browser) -> None:
    (_, tutorial), *_ = tabs((DOCS / "index.md").read_text())
    first, second = (page.replace(".md", ".html") for page in tutorial[:2])
    browser.open(first)
    browser.run("document.querySelector('.md-footer__link--next').click()")
    browser.until(lambda _: browser.at == second, second)
    assert browser.find(".md-footer__link--prev").get_attribute("href").endswith(first)


def test_a_name_leads_to_its_whole_signature(browser: Browser) -> None:
    browser.open("reference/api.html")
    browser.run(
        "document.querySelector('a[href$=\"#kvwire.Connection.pull\"]').click()"
    )
    there = "reference/api/connect.html#kvwire.Connection.pull"
    assert browser.until(lambda _: browser.at == there, there)
    # An option that the code has as **options.
    signature = "h4[id='kvwire.Connection.pull'] + .doc-signature"
    assert browser.find(signature, "lease_s: float")


def test_a_key_leads_to_its_row_of_the_configuration(browser: Browser) -> None:
    browser.open("howto/directory.html")
    browser.run("document.querySelector('a[href$=\"#lease_s\"]').click()")
    there = "reference/configuration.html#lease_s"
    assert browser.until(lambda _: browser.at == there, there)
    assert browser.find("#lease_s")


def test_light_and_dark_follow_the_system_until_the_reader_chooses(
    browser: Browser,
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
        "reference/api/connect.html",
        "reference/configuration.html",
        "topics/performance.html",
        "topics/protocol.html",
    ],
)
def test_a_phone_shows_each_page_without_scrolling_sideways(
    browser: Browser, page: str
) -> None:
    browser.open(page, width=PHONE)
    assert browser.run("innerWidth") == PHONE
    wide = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    assert browser.run(wide) <= PHONE


def test_the_page_says_its_version_and_the_top_leads_to_the_newest(
    browser: Browser,
) -> None:
    browser.open()
    assert browser.find(".md-version__current", version())
    newest = max(path.parent.name for path in SITE.glob("[0-9]*/index.html"))
    top = (SITE / "index.html").read_text()
    assert f"url={newest}/index.html" in top
    assert Path(SITE / newest / "index.html").exists()
