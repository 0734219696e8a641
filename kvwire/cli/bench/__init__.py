"""``kvwire bench``: compares kvwire with other programs over your transports.

An absolute figure depends more on the machine than on the library. So each benchmark
runs kvwire and another program with the same work, on the same machine in the same
minute, and reports medians and their ratio.

* :mod:`~kvwire.cli.bench.side`: the frame of a program, which both processes run.
* :mod:`~kvwire.cli.bench.side`: the frame for a program, which both processes run.
* :mod:`~kvwire.cli.bench.peer`: the right side on another host.
* :mod:`~kvwire.cli.bench.turns`: cases, and the rounds in which contenders take turns.
* :mod:`~kvwire.cli.bench.report`: the output, and the common options.
* :mod:`~kvwire.cli.bench.operations`: kvwire's program for several benchmarks, and
  ``bare``: the programs of streams and sockets to compare it with.

A new benchmark is a module like :mod:`~kvwire.cli.bench.overlap`: a program and a list
of cases. Benchmarks of other software are in ``tests/programs/bench`` of the source
tree.
"""
