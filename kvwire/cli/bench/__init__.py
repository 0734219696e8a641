"""``kvwire bench``: kvwire over your transports, in one run, with medians and ratios.

A figure alone says more about a machine than about a library. So whatever is measured
is measured beside something that does the same work on the same machine in the same
minute, and what counts is the ratio.

* :mod:`~kvwire.cli.bench.side`: what runs in a process of a contender.
* :mod:`~kvwire.cli.bench.pair`: contenders, and their processes.
* :mod:`~kvwire.cli.bench.peer`: a side on another host.
* :mod:`~kvwire.cli.bench.turns`: cases, and the rounds in which everybody takes turns.
* :mod:`~kvwire.cli.bench.report`: how it is shown, and the common options.
* :mod:`~kvwire.cli.bench.operations`: the side of kvwire of several benchmarks, and
  ``bare``: streams and sockets beside it.

A new benchmark is a module like :mod:`~kvwire.cli.bench.messages`: a list of cases.
What runs others' software beside it is ``tests/programs/bench`` of the source tree.
"""
