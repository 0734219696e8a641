"""The page of `kvwire top` in a real browser: what it shows, and what it does not run.

Needs chromium and its driver, and selenium of the group `docs`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.site.crowd import HOSTILE
from tests.support.browser import Browser
from tests.support.servers import free_port

PHONE = 390
OPEN = 1000
PYTHON = [sys.executable, "-u", "-m"]
STATE = "document.getElementById('state').textContent"
# How often the page has asked.
ASKED = (
    "performance.getEntriesByType('resource').filter(e => /json/.test(e.name)).length"
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(driver: Any) -> Browser:
    return Browser(driver)


@contextlib.contextmanager
def started(*command: str) -> Iterator[str]:
    """Start a program, and yield its first line."""
    with subprocess.Popen([*PYTHON, *command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


def rows(table: str) -> str:
    """A script with the texts of a table's rows."""
    lines = f"document.querySelectorAll('[data-table={table}] tbody tr')"
    return f"[...{lines}].map(r => [...r.cells].map(c => c.textContent))"


def section(table: str) -> str:
    """A script with a table's element."""
    return f"document.querySelector('[data-table={table}]')"


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a process with a thousand transfers, whose names are markup."""
    folder = str(tmp_path_factory.mktemp("top") / "run")
    top = ("kvwire", "top", folder, "--serve", f"127.0.0.1:{free_port()}")
    with started("tests.site.crowd", folder, str(OPEN)) as said:
        assert said == "ready"
        with started(*top) as line:
            yield line


def test_names_that_are_markup_are_shown_and_not_run(
    browser: Browser, link: str
) -> None:
    browser.errors()
    browser.show(link)
    assert browser.shows(f"{rows('processes')}.length", 1)
    assert browser.run(f"{rows('processes')}[0][0]") == f"{HOSTILE}a"
    assert HOSTILE in browser.run(f"{rows('transfers')}[0][1]")
    assert HOSTILE in browser.run(f"{rows('connections')}[0][1]")
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    assert browser.run("document.title").endswith("kvwire top")
    assert browser.errors() == []


def test_the_policy_of_the_page_lets_no_text_become_markup(
    browser: Browser, link: str
) -> None:
    """Even if a later change of the page forgot itself."""
    browser.show(link)
    refused = """(() => {
      try { document.body.innerHTML += "<b>x</b>"; } catch (e) { return e.name; }
    })()"""
    assert browser.run(refused) == "TypeError"
    browser.errors()
    browser.run(
        "document.head.append(Object.assign(document.createElement('style'), "
        "{textContent: 'body { opacity: 0 }'}))"
    )
    assert browser.run("getComputedStyle(document.body).opacity") == "1"
    assert "Content Security Policy" in " ".join(browser.errors())


def test_a_thousand_transfers_are_one_reason_and_rows_on_demand(
    browser: Browser, link: str
) -> None:
    browser.show(link)
    assert browser.shows(f"{rows('transfers')}.length", 100)
    assert f"100 of {OPEN:,}" in browser.run(f"{section('transfers')}.textContent")
    waits = browser.run(rows("waits"))
    # All but one have no consumer yet.
    assert any(f"and {OPEN - 2} more" in " ".join(row) for row in waits), waits
    browser.run(f"{section('transfers')}.querySelector('.more').click()")
    assert browser.shows(f"{rows('transfers')}.length", OPEN)
    browser.find("#filter").send_keys("onerror=document.title='taken'> 77")
    # 77 and 770 to 779.
    assert browser.shows(f"{rows('transfers')}.length", 11)
    browser.find("#filter").send_keys("x")
    assert browser.shows(f"{rows('transfers')}.length", 0)
    assert "no row has this text" in browser.run(f"{section('transfers')}.textContent")


@pytest.mark.parametrize("width", [PHONE, 320])
def test_a_phone_shows_it_without_scrolling_sideways(
    browser: Browser, link: str, width: int
) -> None:
    browser.show(link, width=width)
    assert browser.shows(f"{rows('transfers')}.length", 100)
    wide = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    assert browser.run(wide) <= width
    # Each row names its columns, since the head is gone.
    label = f"{section('waits')}.querySelector('td')"
    assert browser.run(f"getComputedStyle({label}, '::before').content") == '"who"'


def test_light_and_dark_follow_the_system(browser: Browser, link: str) -> None:
    def brightness(of: str) -> int:
        script = f"getComputedStyle(document.body).{of}.match(/\\d+/g)"
        return sum(map(int, browser.run(script)[:3]))

    for scheme, dark in (("dark", True), ("light", False)):
        browser.prefer(scheme)
        browser.show(link)
        assert (brightness("backgroundColor") < brightness("color")) is dark


def test_a_hidden_tab_and_a_paused_page_ask_for_nothing(
    browser: Browser, link: str
) -> None:
    browser.show(link)
    browser.until(lambda _: browser.run(ASKED) > 2, "several looks")

    def hide(hidden: str) -> None:
        described = f"{{value: {hidden}, configurable: true}}"
        browser.run(f"void Object.defineProperty(document, 'hidden', {described})")
        browser.run("document.dispatchEvent(new Event('visibilitychange'))")

    def pause(_: str) -> None:
        browser.find("#pause").click()

    for stop in (hide, pause):
        stop("true")
        # A look that is under way ends; then two and a half times the usual pause.
        waited = """(async () => {
          const asked = () => performance.getEntriesByType('resource').length;
          await new Promise((done) => setTimeout(done, 1500));
          const before = asked();
          await new Promise((done) => setTimeout(done, 2500));
          return asked() - before;
        })()"""
        assert browser.run(waited) == 0
        goal = browser.run(ASKED) + 2
        stop("false")
        browser.shows(f"{ASKED} >= {goal}", value=True)


def test_a_link_without_its_key_shows_a_form_and_nothing_else(
    browser: Browser, link: str
) -> None:
    address, _, key = link.partition("#")
    browser.show(address)
    assert browser.shows(STATE, "no access")
    assert browser.run("document.querySelectorAll('main *').length") == 0
    browser.find("#key").send_keys("\u00e9 no key")
    browser.find("#login button").click()
    assert browser.shows("document.getElementById('key').value", "")
    assert browser.shows(STATE, "no access")
    browser.find("#key").send_keys(key)
    browser.find("#login button").click()
    assert browser.shows(f"{rows('processes')}.length", 1)
    assert not browser.find("#login").is_displayed()


def test_nobody_to_show(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    top = ("kvwire", "top", str(folder), "--serve", f"127.0.0.1:{free_port()}")
    with started(*top) as line:
        browser.show(line)
        browser.find("#notes li", "no process answers")
        assert browser.run(f"{section('waits')}.innerText").endswith("nothing")


def test_a_command_that_ends_leaves_what_it_showed(
    browser: Browser, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    top = ("kvwire", "top", str(folder), "--serve", f"127.0.0.1:{free_port()}")
    with started(*top) as line:
        browser.show(line)
        browser.find("#notes li", "no process answers")
    browser.find(".trouble #state", "the server does not answer; what is below is")
    assert browser.run("document.querySelectorAll('#notes li').length") == 1
