"""``kvwire bench``: kvwire over your transports, in one run, with medians and ratios.

A figure alone says more about a machine than about a library. So whatever is measured
is measured beside something that does the same work on the same machine in the same
minute, and what counts is the ratio.

* :mod:`~kvwire.cli.bench.case`: what is measured, who does it, and what is aimed at.
* :mod:`~kvwire.cli.bench.turns`: rounds, in which everybody takes turns.
* :mod:`~kvwire.cli.bench.pair`: two processes that do the work.
* :mod:`~kvwire.cli.bench.sides`: what runs in them, one module for each contender.
* :mod:`~kvwire.cli.bench.solo`: contenders that are one process.
* :mod:`~kvwire.cli.bench.summary`: medians, percentiles, ratios.
* :mod:`~kvwire.cli.bench.table`, ``document``, ``plot``: how it is shown.

A new benchmark is a module like :mod:`~kvwire.cli.bench.messages`: a list of cases.
That of others' software stands beside it in ``tests/bench`` of the source tree.
"""
