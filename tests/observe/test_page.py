"""A page of tables: what is on it, and how a browser shows it, narrow and wide."""

from __future__ import annotations

import html.parser
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kvwire.limits import GIB, PAGE_ROWS_MAX, TIB
from kvwire.observe.page import Table, in_bytes, render, share

ROW = ("http://10.0.0.7:8100", "prefill", "<b>bold</b>", "local tcp rdma " * 5)
TABLE = Table("Engines", ("engine", "role", "state", "transports"), [ROW] * 3)


class Texts(html.parser.HTMLParser):
    """Collects what is between tags, and checks that they match."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(document)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_what_is_on_a_page() -> None:
    many = Table("Many", ("n",), [(str(n),) for n in range(PAGE_ROWS_MAX + 5)])
    nothing = Table("Nothing", ("n",), [], "nobody is there")
    page = render("A <title>", [("a & b", "'1'")], [TABLE, many, nothing])
    texts = Texts(page).texts
    for text in ("A <title>", "a & b", "'1'", *ROW, "and 5 more", "nobody is there"):
        assert text.strip() in texts
    assert str(PAGE_ROWS_MAX) not in texts
    assert '<meta name="viewport"' in page
    assert '<meta http-equiv="refresh" content="5">' in page


def test_shares() -> None:
    assert [share(1, 4), share(0, 4), share(0, 0)] == ["25%", "0%", "-"]


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4096, "4 KiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (2 * TIB, "2 TiB"),
    ],
)
def test_sizes(count: int, said: str) -> None:
    assert in_bytes(count) == said


def browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    for name in (os.environ.get("FLEET_TEST_BROWSER", ""), *names):
        if name and (found := shutil.which(name)):
            return found
    pytest.skip("no browser: apt-get install chromium, or set FLEET_TEST_BROWSER")


# A window of a browser is 500 wide at least.
@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_shows_it_whole(width: int, tmp_path: Path) -> None:
    """Nothing is cut off at the right: a row is a card where the screen is narrow."""
    probe = (
        "<script>document.title = [document.documentElement.scrollWidth,"
        " innerWidth, getComputedStyle(document.querySelector('thead')).display]"
        "</script></body>"
    )
    page = render("kvwire fleet", [("running", "3"), ("waiting", "0")], [TABLE])
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", probe))
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(browser(), "--headless", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", f"--user-data-dir={profile}"),
            *(f"--window-size={width},720", "--dump-dom", file.as_uri()),
        ]
        dumped = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60
        ).stdout
    title = dumped.partition("<title>")[2].partition("</title>")[0]
    needed, had, head = title.split(",")
    assert int(needed) <= int(had)
    assert head == ("none" if width < 720 else "table-header-group")
