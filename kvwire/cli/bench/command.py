"""The ``kvwire bench`` command line."""

from __future__ import annotations

from cyclopts import App

from kvwire.cli.bench import (
    fragments,
    many,
    messages,
    ops,
    overlap,
    peer,
    setup,
    store,
)

app: App = App(name="bench")
for benchmark in (messages, overlap, fragments, many, ops, setup, store):
    app.command(benchmark.command, name=benchmark.__name__.rpartition(".")[2])
app.command(peer.serve)
