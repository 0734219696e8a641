"""A page of tables for people, such as ``/fleet``: a document that loads nothing else.

It is made by the server and asks for itself again. On a narrow screen each row is a
card, so that a phone shows all of it. Every text on it is escaped: names come from
peers and directories.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template
from typing import Final

from kvwire.limits import GIB, KIB, MIB, PAGE_ROWS_MAX, TIB

REFRESH_S: Final = 5
CONTENT_TYPE: Final = "text/html; charset=utf-8"
# A browser that is told so runs no script and fetches nothing, whatever is on it.
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Holds a table of a page.

    Attributes:
        title: Its heading.
        columns: Names of the columns.
        rows: Cells; those beyond the limit are counted and left out.
        empty: What is there instead of no rows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = "none"


def render(
    title: str, facts: Sequence[tuple[str, str]], tables: Sequence[Table]
) -> str:
    """Return the page."""
    said = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts
    )
    return _PAGE.substitute(
        title=html.escape(title),
        refresh=REFRESH_S,
        facts=said,
        tables="".join(map(_table, tables)),
    )


def share(part: float, whole: float) -> str:
    """Return a part of a whole in per cent; a dash if there is no whole."""
    return f"{part / whole:.0%}" if whole else "-"


def in_bytes(count: int) -> str:
    """Return a size as people say it: "64 KiB", "1.5 GiB"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def _table(table: Table) -> str:
    head = f"<h2>{html.escape(table.title)}</h2>"
    if not table.rows:
        return f"{head}<p>{html.escape(table.empty)}</p>"
    names = [html.escape(name) for name in table.columns]
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{name}">{html.escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in table.rows[:PAGE_ROWS_MAX]
    )
    more = len(table.rows) - PAGE_ROWS_MAX
    foot = f"<p>and {more} more</p>" if more > 0 else ""
    columns = "".join(f"<th>{name}</th>" for name in names)
    return (
        f"{head}<table><thead><tr>{columns}</tr></thead>"
        f"<tbody>{rows}</tbody></table>{foot}"
    )


_PAGE: Final = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="$refresh">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 75rem;
  padding: 0 0.8rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.4rem 0 0.3rem; }
dl { display: flex; flex-wrap: wrap; gap: 0.3rem 1.6rem; margin: 0; }
dt, td::before { color: GrayText; font-size: 0.85em; } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; vertical-align: top;
  border-bottom: 1px solid #8884; overflow-wrap: anywhere; }
th { font-weight: 600; font-size: 0.85em; overflow-wrap: normal; }
@media (max-width: 45rem) {
  thead { display: none; }
  tr { display: flex; flex-wrap: wrap; gap: 0.1rem 1.2rem; padding: 0.5rem 0;
    border-bottom: 1px solid #8888; }
  td { border: 0; padding: 0; }
  td:first-child { flex-basis: 100%; font-weight: 600; }
  td:not(:first-child)::before { content: attr(data-name) " "; }
}
</style>
</head>
<body>
<h1>$title</h1>
<dl>$facts</dl>
$tables
</body>
</html>
""")
