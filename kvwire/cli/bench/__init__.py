"""``kvwire bench``: kvwire over your transports, in one run, with medians and ratios.

A figure alone depends on the machine more than on the library. So each benchmark
measures kvwire beside something that does the same work on the same machine in the same
minute, and compares the two by their ratio.

* :mod:`~kvwire.cli.bench.side`: the frame of a program, which both processes run.
* :mod:`~kvwire.cli.bench.pair`: contenders, and their processes.
* :mod:`~kvwire.cli.bench.peer`: the right side on another host.
* :mod:`~kvwire.cli.bench.turns`: cases, and the rounds in which contenders take turns.
* :mod:`~kvwire.cli.bench.report`: how it is shown, and the common options.
* :mod:`~kvwire.cli.bench.operations`: kvwire's program of several benchmarks, and
  ``bare``: those of streams and sockets beside it.

A new benchmark is a module like :mod:`~kvwire.cli.bench.overlap`: a program and a list
of cases. Those of other software are in ``tests/programs/bench`` of the source tree.
"""
