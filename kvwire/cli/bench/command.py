"""The ``kvwire bench`` command line."""

from __future__ import annotations

from cyclopts import App

from kvwire.cli.bench import fragments, many, ops, overlap, peer, store

app: App = App(name="bench")
app.command(ops.messages)
app.command(overlap.command, name="overlap")
app.command(fragments.command, name="fragments")
app.command(many.command, name="many")
app.command(ops.ops)
app.command(ops.setup)
app.command(store.command, name="store")
app.command(peer.serve)
