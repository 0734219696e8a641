"""The ``kvwire bench`` command line."""

from __future__ import annotations

from cyclopts import App

app: App = App(
    name="bench",
    help=(
        "Measure kvwire beside what you would otherwise use.\n\n"
        "In one run, in turns, in processes of their own; what counts is the ratio of "
        "the medians. Run it where nothing else runs."
    ),
)
for name in (
    "messages",
    "overlap",
    "fragments",
    "many",
    "ops",
    "setup",
    "store",
    "codecs",
):
    app.command(f"kvwire.cli.bench.{name}:command", name=name)
